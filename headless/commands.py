"""The commands of `magi2`. Each is a thin layer over one function; errors are one sentence and exit code 1."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..distributed.layout import LayoutError
from ..distributed.pool import PoolError
from ..magi2_core.checkpoint.miniature import MiniatureSize, write_miniature
from ..magi2_core.codecs.media import DEFAULT_CRF
from ..magi2_core.conditioning.negative import default_negative_prompt
from ..magi2_core.errors import Magi2Error, RequestError
from ..magi2_core.memory.plan import DTYPES, RESIDENCIES, make_plan
from ..magi2_core.refiner.stage import RefinerSettings
from ..magi2_core.refiner.window_attention import BACKENDS
from ..magi2_core.sampling.denoise import SamplingSettings
from ..magi2_core.sampling.geometry import ORIENTATIONS, TIERS
from ..magi2_core.sampling.guidance import HELP, GuidanceSettings
from ..magi2_core.sampling.noise import NOISE_DEVICES
from .arguments import devices, folder, name_pictures, path, read_prompt, size
from .cli import INTERRUPTED
from .terminal import JsonEvents, TerminalEvents, write_json

DEFAULTS = SamplingSettings()
REFINER_DEFAULTS = RefinerSettings()


class _Terminated(KeyboardInterrupt):
    """A supervisor's SIGTERM: it unwinds like Ctrl-C, so that no partial file and no worker stays behind."""


def run_command(arguments: Sequence[str] | None) -> int:
    """Run one command line and return its exit code."""
    options = _parser().parse_args(arguments, argparse.Namespace(written=[]))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Lines()])
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return options.run(options)
    except _Terminated:
        return _failed(f"Ended by SIGTERM; {_rest(options)}.", options, 128 + signal.SIGTERM)
    except KeyboardInterrupt:
        return _failed(f"Interrupted; {_rest(options)}.", options, INTERRUPTED)
    except (Magi2Error, LayoutError, PoolError, OSError) as error:
        return _failed(str(error), options, 1)
    except Exception as error:
        if not _as_json(options):
            raise
        logging.getLogger("magi2").exception("This is a fault of the program:")
        return _failed(f"{type(error).__name__}: {error}", options, 1)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(*_: object) -> None:
    raise _Terminated


def _rest(options: argparse.Namespace) -> str:
    return "nothing else was written" if options.written else "nothing was written"


def _as_json(options: argparse.Namespace) -> bool:
    return getattr(options, "json", False)


def _failed(sentence: str, options: argparse.Namespace, code: int) -> int:
    if _as_json(options):
        write_json({"event": "error", "text": sentence})
    else:
        print(sentence, file=sys.stderr)
    return code


class _Lines(logging.Handler):
    """Log records on stderr, above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="magi2", description="MAGI-2 Preview: ten seconds of video with sound.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_run(commands)
    _add_queue(commands)
    _add_inspect(commands)
    _add_convert(commands)
    _add_miniature(commands)
    _add_enhance(commands)
    return parser


def _add_generate(commands: Any) -> None:
    command = commands.add_parser("generate", help="make a clip from a prompt, and perhaps a picture",
                                  formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    command.set_defaults(run=_generate)
    add = command.add_argument
    add("checkpoint", type=path, help="the checkpoint folder")
    add("--prompt", help="what the clip shows and sounds like: text, or a caption in JSON")
    add("--prompt-file", type=path, help="read the prompt from this file instead")
    add("--negative-prompt", help="what to stay away from; no text if empty; if left out, negative_prompt.txt of your"
                                  " --settings, or else of the pack")
    _add_settings(command)
    add("--image", action="append", default=[],
        help="a picture the clip starts from. Repeated, they are <Figure 1>, <Figure 2> and so on; or give one JSON"
             """ object with the names, like '{"<Figure 1>": "a.png", "<Figure 2>": "b.png"}'""")
    add("--image-order", default="string", choices=["string", "number"],
        help="how the model is given ten pictures or more. string: sorted by name as the reference does, <Figure 10>"
             " before <Figure 1>; number: by number")
    add("--output", type=path, required=True, help="the mp4 file to write")
    add("--resolution", default="540p", choices=TIERS,
        help="272p: 448x256. 540p: 896x512. 1080p: a 540p preview, refined")
    add("--orientation", default=ORIENTATIONS[0], choices=ORIENTATIONS,
        help="a picture's shape does not change it")
    add("--seed", type=int, default=42, help="the same seed and settings give the same clip")
    add("--steps", type=int, default=DEFAULTS.steps, help="denoising steps; the time grows with them")
    add("--shift", type=float, default=DEFAULTS.shift, help="how much of the schedule is spent at high noise")
    add("--noise-device", default=NOISE_DEVICES[0], choices=NOISE_DEVICES,
        help="cpu: the same noise on every machine; cuda: the reference's, which depends on the GPU model")
    add("--refiner-steps", type=int, default=REFINER_DEFAULTS.steps,
        help="steps of the second stage, which 1080p takes")
    add("--output-size", type=size, help="rescale the finished frames, such as 1920x1080")
    add("--crf", type=int, default=DEFAULT_CRF, help="H.264 quality, 0 best to 51 worst")
    guidance = command.add_argument_group("guidance")
    for field in fields(GuidanceSettings):
        name = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        else:
            kind = {"type": type(field.default)}
        guidance.add_argument(name, default=field.default, help=HELP[field.name], **kind)
    machine = command.add_argument_group("machine")
    machine.add_argument("--device", help="devices, such as cuda:0,cuda:1 or cpu; every GPU, else the CPU, if left out")
    machine.add_argument("--workers", type=int, help="number of worker processes; one for each device if left out")
    machine.add_argument("--launch", metavar="SOCKET",
                         help="use the workers that torchrun started, on this host or several, see docs/multi-node.md")
    machine.add_argument("--layout", default="auto", help="how the model divides over workers, such as sp4 or tp2sp2")
    machine.add_argument("--dtype", default=DTYPES[0], choices=DTYPES,
                         help="of the weights; float32 takes twice the memory")
    machine.add_argument("--residency", default=RESIDENCIES[0], choices=RESIDENCIES,
                         help="swap: one network on a device at a time")
    machine.add_argument("--start-anyway", action="store_true", help="start though the plan does not fit into memory")
    machine.add_argument("--refiner-residual", default="float32", choices=DTYPES,
                         help="bfloat16 saves memory in the second stage and loses some precision")
    machine.add_argument("--refiner-attention", default=REFINER_DEFAULTS.attention, choices=BACKENDS,
                         help="how the second stage computes the windows of its attention; all give the same picture."
                         " auto is right nearly always; flex is torch's compiled kernel, on GPUs alone")
    add("--json", action="store_true", help="progress and result as JSON lines on stdout")


def _generate(options: argparse.Namespace) -> int:
    from ..stages.session import launched_places
    from .generate import ClipRequest, generate
    from .session import open_session

    negative = options.negative_prompt
    guidance = GuidanceSettings(**{field.name: getattr(options, field.name) for field in fields(GuidanceSettings)})
    request = ClipRequest(
        prompt=read_prompt(options.prompt, options.prompt_file), output=options.output,
        negative_prompt=default_negative_prompt(options.settings) if negative is None else negative,
        images=name_pictures(options.image, numeric=options.image_order == "number"), resolution=options.resolution,
        orientation=options.orientation, seed=options.seed, noise_device=options.noise_device,
        settings=SamplingSettings(options.steps, options.shift, guidance),
        refiner=RefinerSettings(steps=options.refiner_steps, attention=options.refiner_attention),
        output_size=options.output_size, crf=options.crf,
    )
    if options.launch and (options.device or options.workers):
        raise RequestError("--launch uses all workers that torchrun started; leave out --device and --workers.")
    places = launched_places(options.launch) if options.launch else None
    plan = make_plan(options.checkpoint, layout=options.layout, devices=devices(options.device, options.workers),
                     dtype=options.dtype, residency=options.residency, refiner_residual=options.refiner_residual,
                     places=places)
    if plan.shortage and not options.start_anyway:
        raise RequestError(f"{plan.describe()}\nGive --start-anyway to try it all the same.")
    with JsonEvents() if options.json else TerminalEvents() as events:
        events.log(plan.describe())
        with open_session(plan, options.launch) as session:
            clip = generate(request, session, events)
            options.written.append(clip.path)
    if options.json:
        write_json({"event": "result", **asdict(clip), "path": str(clip.path)})
    else:
        print(f"{clip.path}: {clip.frames} frames of {clip.width}x{clip.height} at {clip.fps} fps, "
              f"{clip.samples} samples at {clip.sample_rate} Hz, seed {clip.seed}")
    return 0


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--settings", type=folder, help="the folder of magi2_enhance.json and of your own texts:"
                         " negative_prompt.txt, enhance_t2v.md, enhance_i2v.md; ComfyUI's is user/magi2")


def _add_run(commands: Any) -> None:
    command = commands.add_parser("run", help="run an API workflow of MAGI-2 nodes without ComfyUI")
    command.set_defaults(run=_run)
    add = command.add_argument
    add("workflow", type=path, help="an API workflow, such as workflows/api/text_to_clip.json")
    add("--models", type=path, required=True, help="the folder that holds checkpoint folders, as models/magi2 does")
    add("--input", type=path, default=Path("input"), help="where LoadImage looks")
    add("--output", type=path, default=Path("output"), help="where files are written")
    _add_settings(command)
    _add_workflow_options(command)


def _add_queue(commands: Any) -> None:
    command = commands.add_parser("queue", help="run an API workflow on a ComfyUI server and download the results")
    command.set_defaults(run=_queue)
    add = command.add_argument
    add("workflow", type=path, help="an API workflow, such as workflows/api/text_to_clip.json")
    add("--server", default="http://127.0.0.1:8188", help="the server's address")
    add("--output", type=path, default=Path("output"), help="where the results go")
    _add_workflow_options(command)


def _add_workflow_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--set", action="append", default=[], metavar="NODE.INPUT=VALUE", dest="assignments",
                         help="change an input; the node by id, title or class; may be repeated, the last one"
                              " counts")
    command.add_argument("--json", action="store_true", help="progress and result as JSON lines on stdout")


def _run(options: argparse.Namespace) -> int:
    from ..stages.folders import Folders
    from .run import check_workflow, run_workflow
    from .workflow import read_workflow, set_inputs

    workflow = read_workflow(options.workflow)
    set_inputs(workflow, options.assignments)
    check_workflow(workflow)
    folders = Folders(
        (options.models.absolute(),), options.output.absolute(), options.input.absolute(), user=options.settings
    )
    with JsonEvents() if options.json else TerminalEvents() as events:
        run_workflow(workflow, folders, events, partial(_report, options))
    return 0


def _queue(options: argparse.Namespace) -> int:
    from .queue import queue_workflow
    from .workflow import read_workflow, set_inputs

    workflow = read_workflow(options.workflow)
    new_inputs = set_inputs(workflow, options.assignments)
    with JsonEvents() if options.json else TerminalEvents() as events:
        queue_workflow(
            workflow, options.server, options.output, events, partial(_report, options),
            files_near=options.workflow.parent, new_inputs=new_inputs,
        )  # fmt: skip
    return 0


def _report(options: argparse.Namespace, file: Path) -> None:
    """Tell of a file as soon as it is there: what comes later may fail."""
    options.written.append(file)
    if _as_json(options):
        write_json({"event": "result", "path": str(file)})
    else:
        print(file, flush=True)


def _add_inspect(commands: Any) -> None:
    command = commands.add_parser("inspect", help="check a checkpoint folder in seconds, without loading it")
    command.set_defaults(run=_inspect)
    command.add_argument("checkpoint", type=path)
    command.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    command.add_argument("--plan", choices=TIERS,
                         help="also show the memory that a resolution takes on 1, 2, 4 and 8 devices")


def _inspect(options: argparse.Namespace) -> int:
    from ..magi2_core.checkpoint.inspect import inspect_checkpoint
    from ..magi2_core.memory.table import plan_table

    report = inspect_checkpoint(options.checkpoint)
    plans = plan_table(options.checkpoint, options.plan) if options.plan else ()
    if options.json:
        print(json.dumps({**report.to_json(), **({"plan": [asdict(row) for row in plans]} if plans else {})}, indent=1))
    else:
        print("\n".join([report.render(), *(row.describe() for row in plans)]))
    return 1 if report.problems else 0


def _add_convert(commands: Any) -> None:
    command = commands.add_parser("convert", help="rewrite the two pickled files of a release as safetensors")
    command.set_defaults(run=_convert)
    command.add_argument("checkpoint", type=path)


def _convert(options: argparse.Namespace) -> int:
    from ..magi2_core.checkpoint.convert import convert

    with TerminalEvents() as events:
        convert(options.checkpoint, events, partial(_report, options))
    return 0


def _add_miniature(commands: Any) -> None:
    command = commands.add_parser("miniature", help="write a small checkpoint of random weights, for trying things out",
                                  formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    command.set_defaults(run=_miniature)
    command.add_argument("checkpoint", type=path, help="the folder to write; it must not exist, or be empty")
    command.add_argument("--seed", type=int, default=0)
    dimensions = command.add_argument_group("dimensions", (MiniatureSize.__doc__ or "").partition("\n\n")[2])
    for field in fields(MiniatureSize):
        dimensions.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default, help=" ")


def _miniature(options: argparse.Namespace) -> int:
    size = MiniatureSize(**{field.name: getattr(options, field.name) for field in fields(MiniatureSize)})
    with TerminalEvents() as events:
        print(write_miniature(options.checkpoint, options.seed, size, events=events))
    return 0


def _add_enhance(commands: Any) -> None:
    command = commands.add_parser("enhance", help="turn a short prompt into a structured caption",
                                  formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    command.set_defaults(run=_enhance)
    command.add_argument("prompt")
    command.add_argument("--image", help="a picture that the clip starts from: a path or an address")
    command.add_argument("--form", default="text", choices=["text", "json"],
                         help="text: ready to be used as prompt; json: the caption, to be edited")
    _add_settings(command)
    command.add_argument("--variation", default="", help="another text gives another caption")


def _enhance(options: argparse.Namespace) -> int:
    from ..stages.enhance import enhancer_of

    enhancer = enhancer_of(options.settings)
    with TerminalEvents() as events:
        enhanced = enhancer.enhance(options.prompt, options.image, events, variation=options.variation)
    print(enhanced.prompt if options.form == "text" else enhanced.caption_json)
    return 0
