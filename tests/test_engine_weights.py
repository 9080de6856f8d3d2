"""Weights that are damaged or do not fit stop the engine with a sentence, not a black clip after an hour."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from magi2_native.magi2_core.errors import CheckpointError, NonFiniteError
from magi2_native.magi2_core.events import Silent
from magi2_native.tests.miniatures import PROMPT, Encoded, Listener, tiny_engine
from safetensors.torch import load_file, save_file


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A checkpoint of the test's own."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.mark.parametrize(("folder", "call"), [("preview", "sample"), ("refiner", "refine")])
def test_one_nan_among_the_weights_stops_at_the_first_step(
    copy: Path, tiny: Path, encoded: Encoded, folder: str, call: str
) -> None:
    latent = tiny_engine(tiny).run("sample", encoded.sample(steps=1), Silent())
    shard = next((copy / folder).glob("*-00001-of-*.safetensors"))
    tensors = load_file(shard)
    tensors["block.layers.0.attention.linear_qkv.weight"].view(-1)[-1] = float("nan")
    save_file(tensors, shard)
    listener = Listener()
    arguments = encoded.sample(steps=3) if call == "sample" else encoded.refine(latent, steps=3)
    with pytest.raises(NonFiniteError, match=r"^non-finite latent at step 1: .*`magi2 inspect`"):
        tiny_engine(copy).run(call, arguments, listener)
    assert (call, 1, 3) not in listener.ticks


def test_a_shard_cut_by_one_byte_is_refused_by_name_when_it_is_loaded(copy: Path, encoded: Encoded) -> None:
    shard = next((copy / "preview").glob("*-00003-of-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    engine = tiny_engine(copy)
    with pytest.raises(CheckpointError, match=shard.name):
        engine.run("sample", encoded.sample(), Silent())
    assert not engine._loaded


def test_stages_that_are_whole_work_beside_a_damaged_one(copy: Path) -> None:
    shutil.rmtree(copy / "refiner")
    engine = tiny_engine(copy)
    text = engine.run("encode_text", {"prompt": PROMPT, "negative_prompt": "", "figures": []}, Silent())
    assert text["null_features"].shape == (0, 32)
    with pytest.raises(CheckpointError, match="refiner"):
        engine.run("load", {"stages": ["refiner"]}, Silent())
