"""`magi2 run`: workflows read, changed, checked and executed without ComfyUI."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import magi2_native.distributed.pool as pool_module
import pytest
from magi2_native.headless.cli import main
from magi2_native.headless.files import new_file
from magi2_native.headless.run import check_workflow, run_workflow
from magi2_native.headless.steps import STEPS
from magi2_native.headless.workflow import read_workflow, set_inputs
from magi2_native.magi2_core.codecs.media import read_back
from magi2_native.magi2_core.errors import CheckpointError, RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.stages.folders import Folders
from magi2_native.stages.manager import manager
from magi2_native.tests.comfy_server.client import clip_of, node_of, small_prompt
from magi2_native.tests.comfy_stub.fake_pool import FakePool
from magi2_native.tests.comfy_stub.fixtures import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = sorted((ROOT / "workflows" / "api").glob("*.json"))


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    from PIL import Image

    write_checkpoint(tmp_path / "models" / "MAGI-2-Preview", without=())
    (tmp_path / "input").mkdir()
    Image.new("RGB", (64, 36), "gray").save(tmp_path / "input" / "example.png")
    return Folders((tmp_path / "models",), tmp_path / "output", tmp_path / "input")


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakePool]]:
    made: list[FakePool] = []

    def make(model: Any) -> FakePool:
        made.append(FakePool(model, pool_module))
        return made[-1]

    monkeypatch.setattr(manager, "_make_pool", make)
    yield made
    manager.stop()


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_every_template_runs_and_writes_a_clip_with_exact_counts(
    folders: Folders, pools: list[FakePool], template: Path
) -> None:
    workflow = small_prompt(template.stem, width=64, height=32)
    written = run_workflow(workflow, folders, Silent())
    (clip,) = (path for path in written if path.suffix == ".mp4")
    facts = read_back(clip)
    assert (facts.frames, facts.width, facts.height, facts.frame_rate) == clip_of(workflow)
    assert facts.audio_seconds == 10.0
    assert clip == folders.output / "video" / "magi2_00001_.mp4"
    assert pools[-1].closed, "workers end with the run"
    again = run_workflow(workflow, folders, Silent())
    assert folders.output / "video" / "magi2_00002_.mp4" in again


def test_each_node_runs_once_however_many_read_it(folders: Folders, pools: list[FakePool]) -> None:
    run_workflow(small_prompt("low_memory", width=32, height=48), folders, Silent())
    assert [call for pool in pools for call, _ in pool.calls].count("sample") == 1


def test_unknown_nodes_are_refused_by_name_before_anything_runs(folders: Folders, pools: list[FakePool]) -> None:
    workflow = small_prompt()
    workflow["x"] = {"class_type": "KSampler", "inputs": {}}
    workflow["y"] = {"class_type": "PreviewImage", "inputs": {}}
    with pytest.raises(RequestError, match="KSampler, PreviewImage"):
        run_workflow(workflow, folders, Silent())
    assert pools == []


def bridge(name: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": f"Magi2{name}Latent", "inputs": inputs}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w["3"]["inputs"].update(sharpness=3), "has no input sharpness"),
        (lambda w: w["2"]["inputs"].pop("prompt"), "lacks its input prompt"),
        (lambda w: w["5"]["inputs"].update(video=["77", 0]), "node 77, which is not in the workflow"),
        (lambda w: w["2"]["inputs"].update(model=["4", 0]), r"takes MAGI2_MODEL, but output 0 of Magi2Decode"),
        (lambda w: w.update(a=bridge("Join", latent=["b", 0]), b=bridge("Split", magi2_latent=["a", 0])), "a -> b"),
        (lambda w: w["3"]["inputs"].update(steps="many"), r"steps of Magi2Sampler \(node 3\) is 'many'; it must be a"),
        (lambda w: w["3"]["inputs"].update(steps=True), "is True; it must be a whole number"),
        (lambda w: w["3"]["inputs"].update(shift="wide"), "shift of .* is 'wide'; it must be a number"),
        (lambda w: w["options"]["inputs"].update(use_dynamic_cfg=1), "is 1; it must be true or false"),
        (lambda w: w["options"]["inputs"].update(cfg_rescale=None), "is None; it must be a number"),
        (lambda w: w["2"]["inputs"].update(model="mini"), "must be linked to a node that gives MAGI2_MODEL"),
        (lambda w: w["5"]["inputs"].update(codec="av1"), "is 'av1'; it must be one of auto, h264"),
        (lambda w: [w.pop(key) for key in ("5", "latent")], "saves nothing"),
        (lambda w: w["5"]["inputs"].update(video=["4", 9]), "output 9 of Magi2Decode"),
        (lambda w: w["5"]["inputs"].update(video=["4", 0]), r"takes VIDEO, but output 0 of Magi2Decode \(node 4\) is"),
        (lambda w: w["5"]["inputs"].update(filename_prefix="../../evil"), "names no file below the output folder"),
        (lambda w: w["5"]["inputs"].update(filename_prefix="/tmp/evil"), "names no file below the output folder"),
        (lambda w: w["5"]["inputs"].update(filename_prefix="a" * 300), "longer than 200 bytes"),
        (lambda w: w["1"]["inputs"].update(checkpoint="none"), "Found there: MAGI-2-Preview"),
        (lambda w: w["1"]["inputs"].update(checkpoint="a" * 300), "Found there: MAGI-2-Preview"),
        (lambda w: (w.update(u={"class_type": "Magi2UnloadWorkers", "inputs": {"after": ["2", 0]}}),
                    w["4"]["inputs"].update(latent=["u", 0])), "output 0 of Magi2UnloadWorkers .* MAGI2_CONDITIONING"),
    ],
)
def test_broken_workflows_are_refused_in_a_sentence(
    folders: Folders, pools: list[FakePool], change: Any, message: str
) -> None:
    workflow = small_prompt(width=32, height=48)
    change(workflow)
    with pytest.raises(RequestError, match=message):
        run_workflow(workflow, folders, Silent())
    assert pools == [], "nothing starts for a workflow that cannot end"


@pytest.mark.parametrize(
    ("template", "node", "inputs", "message"),
    [
        ("text_to_clip", "Magi2EncodePrompt", {"prompt": " "}, "prompt is empty"),
        ("text_to_clip", "Magi2Sampler", {"steps": 0}, "number of steps is 0"),
        ("text_to_clip", "Magi2Sampler", {"seed": -1}, "seed is -1"),
        ("text_to_clip", "Magi2Sampler", {"orientation": "round"}, "orientation is 'round'"),
        ("text_to_clip", "Magi2SamplerOptions", {"width": 30}, "30x"),
        ("text_to_clip", "Magi2Decode", {"output_width": 64}, "64x0; give both sides"),
        ("text_to_clip", "SaveVideo", {"filename_prefix": ""}, "names no file below"),
        ("text_to_clip", "Magi2SaveLatent", {"filename_prefix": "a\0b"}, "that no file's name can have"),
        ("picture_to_clip", "LoadImage", {"image": "gone.png"}, "no picture 'gone.png'"),
        ("preview_to_1080p", "Magi2Refine", {"noise_value": 1000}, "1000"),
        ("preview_to_1080p", "Magi2Refine", {"width": 100}, "100x64"),
        ("preview_to_1080p", "Magi2Refine", {"refiner_seed": -2}, "seed is -2"),
        ("enhance_to_clip", "Magi2EnhancePrompt", {"variation": -1}, "variation is -1"),
    ],
)
def test_a_value_that_a_later_node_cannot_use_is_found_before_workers_start(
    folders: Folders, pools: list[FakePool], template: str, node: str, inputs: dict[str, Any], message: str
) -> None:
    workflow = small_prompt(template)
    workflow[node_of(workflow, node)]["inputs"] |= inputs
    with pytest.raises(RequestError, match=message):
        run_workflow(workflow, folders, Silent())
    assert pools == []


@pytest.mark.parametrize(
    ("template", "lost"), [("text_to_clip", "turbo_vae"), ("picture_to_clip", "vae"), ("preview_to_1080p", "refiner")]
)
def test_a_part_of_the_checkpoint_that_the_workflow_takes_is_missed_before_workers_start(
    folders: Folders, pools: list[FakePool], template: str, lost: str
) -> None:
    shutil.rmtree(folders.checkpoints[0] / "MAGI-2-Preview" / lost)
    with pytest.raises(CheckpointError, match=rf"MAGI-2-Preview/{lost}.*found no such"):
        run_workflow(small_prompt(template), folders, Silent())
    assert pools == []


def test_nodes_that_nothing_saved_depends_on_are_left_alone(folders: Folders, pools: list[FakePool]) -> None:
    workflow = small_prompt()
    workflow["unused"] = {"class_type": "LoadImage", "inputs": {"image": "gone.png"}}
    run_workflow(workflow, folders, Silent())


def test_an_output_that_was_not_made_is_missed_by_name(folders: Folders, pools: list[FakePool]) -> None:
    workflow = small_prompt()
    workflow["4"]["inputs"]["make_frames"] = "never"
    nodes = {
        "again": ("Magi2ImageConditioning", {"conditioning": ["2", 0], "image": ["4", 0]}),
        "next": ("Magi2Sampler", {"model": ["1", 0], "conditioning": ["again", 0]}),
        "save": ("Magi2SaveLatent", {"magi2_latent": ["next", 0]}),
    }
    workflow |= {key: {"class_type": name, "inputs": inputs} for key, (name, inputs) in nodes.items()}
    with pytest.raises(RequestError, match=r"image of Magi2ImageConditioning \(node again\) .* was not made this time"):
        run_workflow(workflow, folders, Silent())


def test_a_save_that_fails_costs_no_other_result(folders: Folders, pools: list[FakePool]) -> None:
    workflow = small_prompt()
    workflow["4"]["inputs"]["parts"] = "sound only"
    assert list(workflow).index("5") < list(workflow).index("latent")
    written: list[Path] = []
    with pytest.raises(RequestError, match=r"video of SaveVideo \(node 5\) .* was not made this time"):
        run_workflow(workflow, folders, Silent(), written.append)
    assert [path.suffix for path in written] == [".safetensors"]


def test_a_result_that_was_computed_before_workers_died_is_saved(folders: Folders, pools: list[FakePool]) -> None:
    workflow = small_prompt()

    class Killing(Silent):
        def progress(self, stage: str, *_: Any) -> None:
            pools[0].die = stage == "sample"

    with pytest.raises(pool_module.PoolError, match="SIGKILL"):
        run_workflow(workflow, folders, Killing())
    assert len(list(folders.output.rglob("*.safetensors"))) == 1


def test_a_folder_that_is_named_for_the_checkpoints_and_is_one_itself_is_explained(folders: Folders) -> None:
    itself = replace(folders, checkpoints=(folders.checkpoints[0] / "MAGI-2-Preview",))
    with pytest.raises(RequestError, match="MAGI-2-Preview is a checkpoint itself; name the folder around it"):
        run_workflow(small_prompt(), itself, Silent())


def test_an_output_folder_that_cannot_be_written_is_refused_before_workers_start(
    folders: Folders, pools: list[FakePool]
) -> None:
    folders.output.write_text("a file")
    with pytest.raises(RequestError, match=r"output folder .* cannot be written: File exists"):
        run_workflow(small_prompt(), folders, Silent())
    assert pools == []


def test_pictures_come_from_the_input_folder_only(folders: Folders, pools: list[FakePool], tmp_path: Path) -> None:
    workflow = small_prompt("picture_to_clip", width=32, height=48)
    (loader,) = (key for key, node in workflow.items() if node["class_type"] == "LoadImage")
    (tmp_path / "secret.png").write_bytes((tmp_path / "input" / "example.png").read_bytes())
    for name in ("../secret.png", str(tmp_path / "secret.png"), "none.png"):
        workflow[loader]["inputs"]["image"] = name
        with pytest.raises(RequestError, match="no picture"):
            run_workflow(workflow, folders, Silent())


def test_two_runs_into_one_folder_keep_both_clips(tmp_path: Path) -> None:
    with new_file("video/clip", ".mp4", tmp_path) as first, new_file("video/clip", ".mp4", tmp_path) as second:
        assert first != second
        first.touch()
        second.touch()
    with new_file("video/clip", ".mp4", tmp_path) as third:
        assert third.name == "clip_00003_.mp4"
    assert sorted(tmp_path.rglob("*.mp4")) == [first, second]
    assert len(list((tmp_path / "video").iterdir())) == 2, "what kept the names is gone"


def test_a_prefix_has_the_date_as_in_comfyui(tmp_path: Path) -> None:
    with new_file("%year%/%month%-%day%/a%seed%", ".mp4", tmp_path) as path:
        assert path.parent == tmp_path / time.strftime("%Y/%m-%d")
        assert path.name.startswith("a%seed%_")


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(RequestError, match=r"folder .*/x/deep cannot be made"), new_file("x/deep/y", ".mp4", tmp_path):
        pass


def test_workers_end_also_when_the_run_fails(folders: Folders, pools: list[FakePool]) -> None:
    class Stopping(Silent):
        def progress(self, stage: str, *_: Any) -> None:
            if stage == "sample":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_workflow(small_prompt(width=32, height=48), folders, Stopping())
    assert pools[0].cancelled == ["sample"]
    assert pools[0].closed
    assert not list(folders.output.rglob("*.mp4"))


def test_the_steps_cover_our_nodes_and_two_of_the_core() -> None:
    assert {name for name in STEPS if not name.startswith("Magi2")} == {"LoadImage", "SaveVideo"}


# ---- reading and changing


def test_a_workflow_of_the_page_is_refused_with_advice() -> None:
    with pytest.raises(RequestError, match="API twin"):
        read_workflow(ROOT / "workflows" / "text_to_clip.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"1": {"inputs": {}}}', '{"1": 3}', "{", "[" * 100_000],
                         ids=range(7))
def test_files_that_are_no_workflow_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(RequestError):
        read_workflow(path)


def test_a_workflow_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text(json.dumps(small_prompt()), encoding="utf-8-sig")
    assert read_workflow(tmp_path / "w.json") == small_prompt()


def test_a_titles_place_that_holds_something_else_is_no_title() -> None:
    workflow = small_prompt() | {"1": {**small_prompt()["1"], "_meta": []}}
    set_inputs(workflow, ["Magi2Sampler.seed=7"])
    assert workflow["3"]["inputs"]["seed"] == 7


def test_a_value_of_many_brackets_is_a_text() -> None:
    workflow = small_prompt()
    set_inputs(workflow, ["Magi2EncodePrompt.prompt=" + "[" * 100_000])
    assert workflow["2"]["inputs"]["prompt"] == "[" * 100_000


def chain(length: int, *, closed: bool = False) -> dict[str, Any]:
    nodes = {
        str(number): {"class_type": "Magi2UnloadWorkers", "inputs": {"after": [str(number - 1), 0]}}
        for number in range(length)
    }
    nodes["0"]["inputs"] = {"after": [str(length - 1), 0]} if closed else {}
    return nodes


def test_a_chain_that_python_could_not_follow_is_refused_at_once() -> None:
    with pytest.raises(RequestError, match="chains 5000 nodes one after the other; at most 100 are run"):
        check_workflow(chain(5000))
    with pytest.raises(RequestError, match=r"run in a circle: (2 -> 1 -> 0 -> 2|1 -> 0 -> 2 -> 1|0 -> 2 -> 1 -> 0)\."):
        check_workflow(chain(3, closed=True))
    with pytest.raises(RequestError, match="circle"):
        check_workflow(chain(5000, closed=True))
    assert len(check_workflow(chain(100))) == 100


def test_a_saved_request_body_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"prompt": small_prompt()}))
    assert check_workflow(read_workflow(path))


def test_inputs_are_set_by_id_title_or_class() -> None:
    workflow = small_prompt()
    set_inputs(workflow, [
        "3.seed=18446744073709551615", "Magi2Sampler.video_guidance=4.5", "MAGI-2 Encode Prompt.prompt=a = b, {x}",
        "Magi2EncodePrompt.for_picture=true", "5.filename_prefix=1234", "Magi2Sampler.orientation=portrait",
    ])  # fmt: skip
    assert workflow["3"]["inputs"]["seed"] == 2**64 - 1
    assert workflow["3"]["inputs"]["video_guidance"] == 4.5
    assert workflow["2"]["inputs"]["prompt"] == "a = b, {x}"
    assert workflow["2"]["inputs"]["for_picture"] is True
    assert workflow["5"]["inputs"]["filename_prefix"] == "1234", "a text stays a text"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("seed=3", "write node.input=value"),
        ("3.seed", "write node.input=value"),
        ("99.seed=3", "No node is called '99'"),
        ("3.model=x", "comes from another node"),
    ],
)
def test_assignments_that_cannot_be_made_are_refused(assignment: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        set_inputs(small_prompt(), [assignment])


def test_a_name_that_fits_two_nodes_is_refused() -> None:
    workflow = small_prompt()
    workflow["other"] = dict(workflow["3"])
    with pytest.raises(RequestError, match="2 nodes are called 'Magi2Sampler'"):
        set_inputs(workflow, ["Magi2Sampler.seed=3"])


def test_the_command_runs_a_workflow_and_prints_what_it_wrote(
    folders: Folders, pools: list[FakePool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps(small_prompt(width=32, height=48)))
    arguments = [str(path), "--models", str(tmp_path / "models"), "--output", str(tmp_path / "out"),
                 "--set", "Magi2Sampler.steps=1"]  # fmt: skip
    assert main(["run", *arguments]) == 0
    assert str(tmp_path / "out" / "video" / "magi2_00001_.mp4") in capsys.readouterr().out
    assert next(request for call, request in pools[0].calls if call == "sample")["steps"] == 1
    assert main(["run", *arguments, "--set", "Magi2Sampler.steps=0"]) == 1
    assert "number of steps" in capsys.readouterr().err


def test_an_interrupted_command_says_that_it_has_written_something_before(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(call: str) -> None:
        if call == "decode_video":
            raise KeyboardInterrupt

    def make(model: Any) -> FakePool:
        pool = FakePool(model, pool_module)
        pool.on_call = press
        return pool

    monkeypatch.setattr(manager, "_make_pool", make)
    workflow = small_prompt(width=32, height=48)
    (tmp_path / "w.json").write_text(json.dumps({"latent": workflow.pop("latent"), **workflow}))
    folder = tmp_path / "out"
    arguments = ["run", str(tmp_path / "w.json"), "--models", str(tmp_path / "models"), "--output", str(folder)]
    assert main(arguments) == 130
    printed = capsys.readouterr()
    assert printed.out == f"{folder / 'magi2' / 'test_00001_.safetensors'}\n"
    assert printed.err.endswith("Interrupted; nothing else was written.\n")
