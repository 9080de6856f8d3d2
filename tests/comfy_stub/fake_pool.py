"""A pool without processes: answers each engine call with small tensors, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from magi2_native.magi2_core.codecs.media import Sound, write_video

WIDTH = 8  # of the text features


class FakePool:
    """Stands for `distributed.pool.Pool`. `die` makes the next call fail as a dead rank does, `silent` ones report
    nothing.

    `module` is the `distributed.pool` of the pack under test, whose events and errors it uses.
    """

    def __init__(self, model: Any, module: ModuleType) -> None:
        self.model, self.module = model, module
        self.spec = SimpleNamespace(layout=model.plan.parallel)
        self.alive = False
        self.closed = 0
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.cancelled: list[str] = []
        self.die = self.silent = False
        self.refuse_start = False
        self.lines: list[Any] = []
        self.on_call: Callable[[str], None] = lambda call: None

    def open(self, poll: Callable[[], None] | None = None) -> FakePool:
        if poll is not None:
            poll()
        if self.refuse_start:
            raise self.module.PoolError("Rank 1 did not join.")
        self.alive = True
        return self

    def close(self) -> None:
        self.alive = False
        self.closed += 1

    def status(self) -> dict[str, Any]:
        return {"replicas": [{"ranks": [{"rank": 0, "device_name": "fake", "memory": {"resident": 5}}]}]}

    def submit(self, call: str, arguments: Mapping[str, Any]) -> FakeJob:
        self.calls.append((call, dict(arguments)))
        return FakeJob(self, call, dict(arguments))


class FakeJob:
    def __init__(self, pool: FakePool, call: str, arguments: dict[str, Any]) -> None:
        self.pool, self.call, self.arguments = pool, call, arguments

    def result(self, on_event: Callable[[Any], None], poll: Callable[[], None]) -> dict[str, Any]:
        try:
            self.pool.on_call(self.call)
            if self.pool.die:
                self.pool.die, self.pool.alive = False, False
                raise self.pool.module.PoolError("Rank 1 was killed by SIGKILL.")
            steps = int(self.arguments.get("steps", 2))
            for step in range(steps):
                poll()
                if self.pool.silent:
                    continue
                latent = torch.zeros(48, 32, 2, 2) if self.call == "sample" else None
                on_event(self.pool.module.Progress(self.call, step + 1, steps, None, latent))
            for line in self.pool.lines:
                on_event(line)
            on_event(self.pool.module.LogLine(0, "INFO", f"{self.call} is done"))
            poll()
        except self.pool.module.PoolError:
            raise
        except BaseException:
            self.pool.cancelled.append(self.call)
            raise
        return answer(self.call, self.arguments)


def answer(call: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What an engine would return, as far as shapes go; values depend on what was asked."""
    match call:
        case "encode_text":
            tokens = max(1, len(arguments["prompt"].split()))
            negative = len(arguments["negative_prompt"].split())
            return {
                "features": torch.full((tokens, WIDTH), len(arguments["prompt"]), dtype=torch.bfloat16),
                "null_features": torch.zeros(negative, WIDTH, dtype=torch.bfloat16),
                "markers": torch.ones(len(arguments["figures"]), WIDTH, dtype=torch.bfloat16),
                "prompt": arguments["prompt"],
                "tokens": tokens,
                "negative_tokens": negative,
                "truncated": False,
                "warnings": ["a warning"] if "warn" in arguments["prompt"] else [],
            }
        case "encode_image":
            return {"latents": torch.zeros(len(arguments["pictures"]), 48, 1, 2, 2)}
        case "sample":
            grid = (32, arguments["height"] // 16, arguments["width"] // 16)
            generator = torch.Generator().manual_seed(arguments["seed"])
            return {
                "video": torch.randn(48, *grid, generator=generator),
                "audio": torch.randn(250, 64, generator=generator),
            }
        case "refine":
            settings = arguments["settings"]
            frames = 2 * arguments["video"].shape[1] - 1
            return {"video": torch.zeros(48, frames, settings["height"] // 16, settings["width"] // 16)}
        case "write_clip":
            write_clip(**arguments)
            return {}
        case "decode_video":
            _, frames, height, width = arguments["video"].shape
            shape = (4 * (frames - 1) + 1, height * 16, width * 16, 3)
            return {"frames": torch.arange(shape[0], dtype=torch.uint8).view(-1, 1, 1, 1).expand(shape).contiguous()}
        case "decode_audio":
            return {"waveform": torch.linspace(-2, 2, 882_000).view(2, 441_000), "sample_rate": 44_100}
        case "release":
            return {}
    raise AssertionError(call)


def write_clip(
    *, video: torch.Tensor, waveform: torch.Tensor | None, sample_rate: int, path: str, crf: int, fps: str,
    size: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """A file of black frames of the right number, size and rate."""
    width, height = size or (16 * video.shape[3], 16 * video.shape[2])
    frames = torch.zeros(4 * (video.shape[1] - 1) + 1, 1, 1, 3, dtype=torch.uint8)
    sound = None if waveform is None else Sound(waveform, sample_rate)
    write_video(path, (frame.expand(1, height, width, 3) for frame in frames), Fraction(fps), sound, crf)
