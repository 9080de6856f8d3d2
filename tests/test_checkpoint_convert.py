"""The two pickles of a release become safetensors with the same tensors."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.magi2_core.checkpoint.convert import convert
from magi2_native.magi2_core.checkpoint.folder import CheckpointFolder
from magi2_native.magi2_core.checkpoint.inspect import inspect_checkpoint
from magi2_native.magi2_core.checkpoint.loader import load_tensors
from magi2_native.magi2_core.checkpoint.miniature import write_miniature
from magi2_native.magi2_core.checkpoint.network import Network
from magi2_native.magi2_core.errors import CheckpointError, RequestError
from magi2_native.magi2_core.events import Silent
from safetensors.torch import load_file, save_file

PICKLES = ("vae/Wan2.2_VAE.pth", "turbo_vae/checkpoint.ckpt")
CONVERTED = ("vae/Wan2.2_VAE.safetensors", "turbo_vae/checkpoint.safetensors")


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_miniature(tmp_path_factory.mktemp("checkpoint") / "miniature")


@pytest.fixture
def root(miniature: Path, tmp_path: Path) -> Path:
    shutil.copytree(miniature, tmp_path / "copy", copy_function=os.link)
    return tmp_path / "copy"


def loaded(network: Network) -> dict[str, torch.Tensor]:
    with network.open() as reader:
        return load_tensors(network, reader, dict.fromkeys(network.table, torch.float32))


def store(file: Path, content: object) -> None:
    file.unlink()  # it is linked to the fixture's
    torch.save(content, file)


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_both_files_are_written_beside_the_originals(root: Path):
    before = files(root)
    assert convert(root) == [root / name for name in CONVERTED]
    assert files(root) == before | set(CONVERTED)


def test_the_converted_files_give_the_same_weights(root: Path):
    folder = CheckpointFolder(root)
    before = loaded(folder.wan_encoder()), loaded(folder.turbo_decoder())
    convert(root)
    for name in PICKLES:
        (root / name).unlink()
    after = loaded(folder.wan_encoder()), loaded(folder.turbo_decoder())
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[key], new[key]) for key in old)
    assert inspect_checkpoint(root).problems == ()


def test_the_picture_file_keeps_all_tensors_and_the_decoder_only_its_own(root: Path):
    convert(root)
    wan = load_file(root / CONVERTED[0])
    assert len(wan) == 196  # 40 §3.1; other programs recognise the file by its decoder
    assert wan.keys() == torch.load(root / PICKLES[0], weights_only=True).keys()
    turbo = load_file(root / CONVERTED[1])
    assert len(turbo) == 80
    assert all(key.startswith("decoder.") for key in turbo)


def test_a_second_run_does_nothing(root: Path):
    convert(root)
    stamps = [(root / name).stat().st_mtime_ns for name in CONVERTED]
    assert convert(root) == []
    assert [(root / name).stat().st_mtime_ns for name in CONVERTED] == stamps


def test_a_checkpoint_without_a_picture_encoder_converts_the_other_file(root: Path):
    shutil.rmtree(root / "vae")
    assert convert(root) == [root / CONVERTED[1]]


def test_tensors_that_share_memory_or_have_strides_are_written_each_by_itself(root: Path):
    base = torch.arange(12.0).view(3, 4)
    extra = {"decoder.a": base, "decoder.b": base, "decoder.c": base[1:], "decoder.d": base.T}
    store(root / PICKLES[0], torch.load(root / PICKLES[0], weights_only=True) | extra)
    convert(root)
    got = load_file(root / CONVERTED[0])
    assert {key: got[key].tolist() for key in extra} == {key: tensor.tolist() for key, tensor in extra.items()}


@pytest.mark.parametrize("content", [{}, {1: 2}, {"model": {"encoder.conv1.weight": torch.ones(1)}}], ids=str)
@pytest.mark.parametrize("file", PICKLES)
def test_a_file_without_the_tensors_of_its_network_is_refused_and_not_converted(root: Path, file: str, content: object):
    store(root / file, content)
    with pytest.raises(CheckpointError, match=r"does not hold the .*found no such key, and \d+ more\.$"):
        convert(root)
    assert not (root / file).with_suffix(".safetensors").exists()


@pytest.mark.parametrize("file", CONVERTED)
def test_a_converted_file_without_the_tensors_of_its_network_is_not_trusted(root: Path, file: str):
    save_file({}, root / file)
    with pytest.raises(CheckpointError, match=r"does not hold the .* Remove it, then convert \S+ anew\.$"):
        convert(root)


@pytest.mark.parametrize(
    ("key", "tensor", "said"),
    [
        ("decoder.x", torch.eye(2).to_sparse(), "decoder.x: expected a dense tensor, found a sparse_coo tensor"),
        ("decoder.x", torch.ones(2, device="meta"), "decoder.x: expected a dense tensor, .*of the device meta"),
        ("decoder.\ud800", torch.ones(2), r"decoder.\\ud800: expected a name in UTF-8"),
        ("decoder.x", torch.ones(2, dtype=torch.complex64), "decoder.x: expected a dtype of .*, found torch.complex64"),
    ],
    ids=["sparse", "meta", "surrogate", "complex"],
)
def test_a_tensor_that_safetensors_cannot_hold_is_named(root: Path, key: str, tensor: torch.Tensor, said: str):
    store(root / PICKLES[0], torch.load(root / PICKLES[0], weights_only=True) | {key: tensor})
    with pytest.raises(CheckpointError, match=said):
        convert(root)


@pytest.mark.parametrize(
    "content",
    [
        lambda sd: {"ema_state_dict": {f"module.{k}": v for k, v in sd.items()}, "state_dict": {}},
        lambda sd: {"state_dict": sd},
        lambda sd: {f"module.{k}": v for k, v in sd.items()},
        lambda sd: {k.removeprefix("decoder."): v for k, v in sd.items()},
        lambda sd: {"encoder.x": torch.ones(1)} | sd,
    ],
)
def test_every_layout_of_the_decoder_file_is_understood(root: Path, content: Any):
    # 40 §4.2
    expected = loaded(CheckpointFolder(root).turbo_decoder())
    stored = torch.load(root / PICKLES[1], weights_only=True)["ema_state_dict"]
    plain = {key.removeprefix("module."): tensor for key, tensor in stored.items() if ".decoder." in key}
    (root / PICKLES[1]).unlink()
    torch.save(content(plain), root / PICKLES[1])
    got = loaded(CheckpointFolder(root).turbo_decoder())
    assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_a_pickle_of_the_old_format_is_read_too(root: Path):
    expected = loaded(CheckpointFolder(root).wan_encoder())
    content = torch.load(root / PICKLES[0], weights_only=True)
    (root / PICKLES[0]).unlink()
    torch.save(content, root / PICKLES[0], _use_new_zipfile_serialization=False)
    got = loaded(CheckpointFolder(root).wan_encoder())
    assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_a_pickle_that_needs_code_is_refused_with_advice_and_nothing_is_written(root: Path):
    (root / PICKLES[0]).unlink()
    torch.save({"a": torch.ones(1), "path": Path("x")}, root / PICKLES[0])
    before = files(root)
    with pytest.raises(CheckpointError, match=r"save its tensors alone with torch\.save under the same name") as error:
        convert(root)
    assert "Path" in str(error.value)
    assert files(root) == before


def test_a_disk_without_room_is_named_and_no_file_is_left(root: Path):
    before, limit = files(root), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limit[1]))
    try:
        with pytest.raises(RequestError, match="cannot be written: File too large"):
            convert(root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert files(root) == before


def test_a_cancelled_conversion_keeps_what_is_finished(root: Path):
    class Stopped(BaseException):
        pass

    class StopAtSecond(Silent):
        checks = 0

        def check(self) -> None:
            self.checks += 1
            if self.checks == 2:
                raise Stopped

    before, told = files(root), []
    with pytest.raises(Stopped):
        convert(root, StopAtSecond(), told.append)
    assert files(root) == before | {CONVERTED[0]}
    assert told == [root / CONVERTED[0]], "the caller knows what is there"
