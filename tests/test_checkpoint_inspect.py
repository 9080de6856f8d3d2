"""`inspect_checkpoint` finds every fault that a checkpoint folder can have, by headers alone."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.magi2_core.checkpoint.inspect import Report, inspect_checkpoint, require
from magi2_native.magi2_core.checkpoint.miniature import write_miniature
from magi2_native.magi2_core.errors import CheckpointError
from safetensors.torch import load_file, save_file

SHARD = "preview/model-00002-of-00003.safetensors"
INDEX = "preview/model.safetensors.index.json"
WAN = "vae/Wan2.2_VAE.pth"
TURBO = "turbo_vae/checkpoint.ckpt"
TURBO_CONFIG = "turbo_vae/TurboV3-Wan22-TinyShallow_7_7.json"
KEY = "block.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_miniature(tmp_path_factory.mktemp("checkpoint") / "miniature")


@pytest.fixture
def root(miniature: Path, tmp_path: Path) -> Path:
    """A copy whose files are links: a test replaces them, and never writes into them."""
    shutil.copytree(miniature, tmp_path / "copy", copy_function=os.link)
    return tmp_path / "copy"


def replace(file: Path, content: bytes) -> None:
    file.unlink()
    file.write_bytes(content)


def edit_json(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    edit(content)
    replace(file, json.dumps(content).encode())


def edit_tensors(file: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(file)
    tensors = {key: tensor for key, tensor in (tensors | changes).items() if tensor is not None}
    file.unlink()
    save_file(tensors, file)


def only_problem(root: Path) -> dict[str, Any]:
    (problem,) = (p for p in inspect_checkpoint(root).to_json()["problems"] if p["severity"] == "error")
    return problem


def folders_not_usable(report: Report) -> set[str]:
    return {network.folder for network in report.networks if not network.usable}


def test_a_sound_checkpoint_has_no_problem_and_can_do_everything(root: Path):
    report = inspect_checkpoint(root)
    assert (report.problems, report.warnings) == ((), ())
    assert report.capabilities == {"T2VA": True, "I2VA": True, "1080p": True}
    assert {n.folder: (n.files, n.tensors == n.expected_tensors) for n in report.networks} == {
        "preview": (3, True), "text_encoder": (2, True), "turbo_vae": (1, True),
        "stable-audio-open-1.0": (1, True), "vae": (1, True), "refiner": (3, True),
    }  # fmt: skip
    stored = sum(t.nbytes for file in (root / "preview").glob("*.safetensors") for t in load_file(file).values())
    assert report.networks[0].bytes_on_disk == stored


def test_the_numbers_of_tensors_are_those_of_the_specification(root: Path):
    tensors = {network.folder: network.tensors for network in inspect_checkpoint(root).networks}
    assert tensors["turbo_vae"] == 80  # 40 §4.2
    assert tensors["stable-audio-open-1.0"] == 182  # 40 §5.1
    assert tensors["vae"] == 86  # 40 §3.1


def test_a_missing_shard(root: Path):
    (root / SHARD).unlink()
    assert only_problem(root) == {
        "file": SHARD, "key": None, "expected": "a file", "found": "no such file", "severity": "error",
    }  # fmt: skip


def test_a_shard_cut_by_one_byte(root: Path):
    raw = (root / SHARD).read_bytes()
    replace(root / SHARD, raw[:-1])
    problem = only_problem(root)
    assert problem["file"] == SHARD
    assert problem["expected"].startswith(f"{len(raw)} bytes")
    assert problem["found"].startswith(f"{len(raw) - 1} bytes")


@pytest.mark.parametrize("file", [SHARD, WAN, TURBO, "text_encoder/tokenizer.json", "magi2_preview.json"])
def test_a_git_lfs_pointer(root: Path, file: str):
    replace(root / file, b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 2147483648\n")
    problem = only_problem(root)
    assert problem["file"] == file
    assert "git-lfs pointer to a file of 2147483648 bytes" in problem["found"]


@pytest.mark.parametrize("file", [SHARD, INDEX, WAN, TURBO, TURBO_CONFIG, "text_encoder/config.json"])
def test_an_empty_file(root: Path, file: str):
    replace(root / file, b"")
    problem = only_problem(root)
    assert (problem["file"], problem["found"]) == (file, "an empty file")


def test_a_wrong_shape(root: Path):
    file = root / json.loads((root / INDEX).read_text())["weight_map"][KEY]
    file = root / "preview" / file.name
    edit_tensors(file, **{KEY: torch.zeros(3, 5, dtype=torch.bfloat16)})
    problem = only_problem(root)
    assert (problem["key"], problem["expected"], problem["found"]) == (KEY, "shape [1152, 256]", "shape [3, 5]")
    assert problem["file"] == f"preview/{file.name}"


def test_a_missing_key(root: Path):
    edit_json(root / INDEX, lambda content: content["weight_map"].pop(KEY))
    problem = only_problem(root)
    assert (problem["file"], problem["key"], problem["found"]) == (INDEX, KEY, "no such key")
    assert problem["expected"] == "a tensor of shape [1152, 256]"


def test_missing_bands_are_no_problem(root: Path):
    edit_json(root / INDEX, lambda content: content["weight_map"].pop("pre_adapter.rope.bands"))
    assert inspect_checkpoint(root).problems == ()


def test_a_stray_key_is_a_warning(root: Path):
    name = "model-00001-of-00003.safetensors"
    edit_tensors(root / "preview" / name, stray=torch.ones(1))
    edit_json(root / INDEX, lambda content: content["weight_map"].update(stray=name))
    report = inspect_checkpoint(root)
    assert report.problems == ()
    assert [(problem.key, problem.file.name) for problem in report.warnings] == [("stray", name)]
    assert "warning: preview/" in report.render()


def test_a_header_that_claims_two_to_the_63_bytes(root: Path):
    replace(root / SHARD, struct.pack("<Q", 2**63) + (root / SHARD).read_bytes()[8:])
    problem = only_problem(root)
    assert (problem["file"], problem["found"]) == (SHARD, f"a header that claims {2**63} bytes")


def test_an_index_that_names_a_key_which_the_shard_lacks(root: Path):
    name = json.loads((root / INDEX).read_text())["weight_map"][KEY]
    edit_tensors(root / "preview" / name, **{KEY: None})
    problem = only_problem(root)
    assert (problem["file"], problem["key"]) == (f"preview/{name}", KEY)


@pytest.mark.parametrize("path", ["../preview/model-00001-of-00003.safetensors", "/etc/hostname"])
def test_an_index_path_that_leaves_the_folder(root: Path, path: str):
    edit_json(root / INDEX, lambda content: content["weight_map"].update({KEY: path}))
    problem = only_problem(root)
    assert (problem["file"], problem["key"], problem["found"]) == (INDEX, KEY, repr(path))


@pytest.mark.parametrize(
    "file", [INDEX, "magi2_preview.json", "text_encoder/config.json", TURBO_CONFIG, "text_encoder/tokenizer.json",
             "stable-audio-open-1.0/model_config.json"],
)  # fmt: skip
def test_bad_json(root: Path, file: str):
    replace(root / file, b'{"weight_map": ')
    problem = only_problem(root)
    assert problem["file"] == file
    assert "not JSON" in problem["found"]


@pytest.mark.parametrize(
    ("file", "field", "value", "found"),
    [
        ("magi2_preview.json", "hidden_size", 385, "must divide"),
        ("magi2_preview.json", "hidden_size", "wide", "that is not"),
        ("magi2_preview.json", "params_dtype", "int4", "int4"),
        ("magi2_preview.json", "moe_config", {"num_heads": 7}, "must divide"),
        ("magi2_refiner.json", "activation_type", "gelu", "gelu"),
    ],
)
def test_a_wrong_architecture(root: Path, file: str, field: str, value: object, found: str):
    edit_json(root / file, lambda content: content["arch_config"].update({field: value}))
    problem = only_problem(root)
    assert problem["file"] == file
    assert found in problem["found"]


def test_an_architecture_file_without_its_section(root: Path):
    replace(root / "magi2_preview.json", b'{"engine_config": {}}')
    assert "arch_config" in only_problem(root)["found"]


def test_an_architecture_that_is_not_the_weights(root: Path):
    # Without the file the released architecture is expected, and every tensor of it is wrong or missing.
    (root / "magi2_preview.json").unlink()
    report = inspect_checkpoint(root)
    keys = {problem.key for problem in report.problems if problem.file.parent.name == "preview"}
    assert len(keys) > 1_300
    assert f"and {len(report.problems) - 40} more" in report.render()


@pytest.mark.parametrize(
    ("file", "field", "found"),
    [("text_encoder/config.json", "hidden_size", "64"), (TURBO_CONFIG, "latent_channels", "48")],
)
def test_widths_that_do_not_fit_the_transformer(root: Path, file: str, field: str, found: str):
    channels = {"text_encoder/config.json": "text_in_channels", TURBO_CONFIG: "video_in_channels"}[file]
    edit_json(root / "magi2_preview.json", lambda content: content["arch_config"].update({channels: 32}))
    problems = [p for p in inspect_checkpoint(root).to_json()["problems"] if p["file"] == file]
    assert [(p["key"], p["found"]) for p in problems] == [(field, found)]


def test_a_tokenizer_of_another_model(root: Path):
    edit_json(root / "text_encoder/tokenizer.json", lambda content: content["model"]["vocab"].update(word=100_000))
    problem = only_problem(root)
    assert (problem["file"], problem["found"]) == ("text_encoder/tokenizer.json", "100000")


@pytest.mark.parametrize("file", [WAN, TURBO])
def test_a_pickle_cut_by_one_byte(root: Path, file: str):
    replace(root / file, (root / file).read_bytes()[:-1])
    problem = only_problem(root)
    assert problem["file"] == file
    assert "damaged" in problem["found"]


@pytest.mark.parametrize("content", [b"<html>404 Not Found</html>", b"absent", struct.pack("<Q", 64) + b"{}"], ids=str)
def test_a_file_that_is_no_pickle_at_all_is_shown_by_how_it_begins(root: Path, content: bytes):
    replace(root / WAN, content)
    problem = only_problem(root)
    assert problem["expected"] == "a file written by torch.save"
    assert problem["found"] == f"another, which begins with {content[:16]!r}"


@pytest.mark.parametrize("file", [WAN, TURBO])
def test_a_pickle_that_would_run_code_is_refused_unrun(root: Path, tmp_path: Path, file: str):
    (root / file).unlink()
    torch.save({"state_dict": {"x": torch.ones(1)}, "hook": Dangerous(tmp_path / "ran")}, root / file)
    problem = only_problem(root)
    assert problem["file"] == file
    assert "code to be run" in problem["found"]
    assert "magi2 convert" in problem["found"]
    assert not (tmp_path / "ran").exists()


class Dangerous:
    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def test_a_pickle_that_lacks_a_decoder_tensor(root: Path):
    content = torch.load(root / TURBO, weights_only=True)
    del content["ema_state_dict"]["module.decoder.conv_in.conv.bias"]
    (root / TURBO).unlink()
    torch.save(content, root / TURBO)
    problem = only_problem(root)
    assert (problem["file"], problem["key"]) == (TURBO, "decoder.conv_in.conv.bias")


def test_a_picture_encoder_tensor_of_a_wrong_shape(root: Path):
    content = torch.load(root / WAN, weights_only=True)
    content["encoder.middle.1.proj.bias"] = torch.ones(7)
    (root / WAN).unlink()
    torch.save(content, root / WAN)
    problem = only_problem(root)
    assert (problem["key"], problem["expected"], problem["found"]) == (
        "encoder.middle.1.proj.bias", "shape [32]", "shape [7]",
    )  # fmt: skip


@pytest.mark.parametrize(("folder", "lost"), [("vae", "I2VA"), ("refiner", "1080p")])
def test_an_optional_folder_may_be_absent_and_costs_one_capability(root: Path, folder: str, lost: str):
    shutil.rmtree(root / folder)
    report = inspect_checkpoint(root)
    assert report.problems == ()
    assert [problem.file.name for problem in report.warnings] == [folder]
    assert {name for name, possible in report.capabilities.items() if not possible} == {lost}
    assert f"not possible without {folder}" in report.render()


@pytest.mark.parametrize("folder", ["preview", "text_encoder", "turbo_vae", "stable-audio-open-1.0"])
def test_a_needed_folder_that_is_absent_costs_everything(root: Path, folder: str):
    shutil.rmtree(root / folder)
    report = inspect_checkpoint(root)
    assert not any(report.capabilities.values())
    assert folders_not_usable(report) == {folder}
    assert all(folder in str(problem.file) for problem in report.problems)


def test_all_problems_are_in_one_list(root: Path):
    (root / SHARD).unlink()
    replace(root / WAN, b"")
    replace(root / "text_encoder/config.json", b"{}")
    edit_tensors(root / "stable-audio-open-1.0/model.safetensors",
                 **{"pretransform.model.decoder.layers.7.weight_g": None})  # fmt: skip
    report = inspect_checkpoint(root)
    assert [problem.file.relative_to(root).as_posix() for problem in report.problems] == [
        SHARD, "text_encoder/config.json", "stable-audio-open-1.0/model.safetensors", WAN,
    ]  # fmt: skip
    text = report.render()
    for problem in report.problems:
        assert f"problem: {problem.sentence(root)}" in text
    assert folders_not_usable(report) == {"preview", "text_encoder", "stable-audio-open-1.0", "vae"}
    json.dumps(report.to_json())


def test_a_root_that_is_no_folder_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="does not exist"):
        inspect_checkpoint(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        inspect_checkpoint(tmp_path / "file")


def test_requiring_a_capability_looks_only_at_the_folders_that_it_takes(root: Path):
    replace(root / WAN, b"")
    require(root, ["T2VA", "1080p"])
    with pytest.raises(CheckpointError, match=r"Wan2\.2_VAE\.pth: expected a file with data, found an empty file"):
        require(root, ["I2VA"])
