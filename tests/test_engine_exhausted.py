"""A device that runs out of memory is told with the call, the amounts and the settings that lower them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.distributed.exchange import ParallelContext
from magi2_native.magi2_core.engine import Engine, make_engine
from magi2_native.magi2_core.errors import DeviceMemoryError
from magi2_native.magi2_core.events import Silent
from magi2_native.tests.miniatures import tiny_plan

GIB = 1 << 30
TORCHS = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.15 GiB of which 5.00 MiB is"


def exhausted(tiny: Path, monkeypatch: pytest.MonkeyPatch, call: str, text: str = TORCHS, **options: Any) -> str:
    """What is said when `call` fails on cuda:1, of 80 GiB: 60 are the worker's, 12 another program's."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60 * GIB)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError(text)

    monkeypatch.setattr(Engine, call, fail)
    engine = make_engine(tiny_plan(tiny, **options).to_dict(), ParallelContext.single(torch.device("cuda:1")))
    with pytest.raises(DeviceMemoryError) as caught:
        engine.run(call, {}, Silent())
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    return str(caught.value)


def test_the_call_the_device_and_the_amounts_are_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exhausted(tiny, monkeypatch, "sample", residency="keep") == (
        "cuda:1 ran out of memory in 'sample'. 2.50 GiB more were asked for. Of its 80.0 GiB, 60.0 GiB are held by this"
        " worker and 12.0 GiB by other programs and the driver. What lowers it: set residency to swap, so that it holds"
        " one network at a time; end other programs on this device; use more devices, each of which then holds a"
        " smaller share; choose a smaller resolution."
    )


def test_only_what_lowers_this_call_is_advised(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = exhausted(tiny, monkeypatch, "refine", residency="swap")
    assert "residency" not in said
    assert "refiner_residual to bfloat16" in said
    assert "residual" not in exhausted(tiny, monkeypatch, "refine", refiner_residual="bfloat16")
    assert "resolution" not in exhausted(tiny, monkeypatch, "encode_text")


def test_a_message_without_an_amount_is_understood_too(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = exhausted(tiny, monkeypatch, "decode_video", "HIP out of memory.")
    assert said.startswith("cuda:1 ran out of memory in 'decode_video'. Of its 80.0 GiB")
