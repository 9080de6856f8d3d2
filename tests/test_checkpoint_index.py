"""Safetensors headers and index files, sound and damaged, read without the data."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from magi2_native.magi2_core.checkpoint.index import INDEX_NAME, Entry, compare, read_header, scan_folder
from magi2_native.magi2_core.checkpoint.problem import BadFileError, Problem, refuse
from magi2_native.magi2_core.checkpoint.spec import TensorSpec
from magi2_native.magi2_core.errors import CheckpointError
from safetensors.torch import save_file

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "empty": torch.zeros(0, 3)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def sharded(folder: Path, **shards: dict[str, torch.Tensor]) -> Path:
    weight_map = {}
    for name, tensors in shards.items():
        save_file(tensors, folder / f"{name}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{name}.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def rewrite_map(folder: Path, **changes: object) -> None:
    content = json.loads((folder / INDEX_NAME).read_text())
    content["weight_map"] |= changes
    (folder / INDEX_NAME).write_text(json.dumps(content))


def with_header(file: Path, header: bytes, data: bytes = b"") -> Path:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return file


def only_problem(folder: Path) -> Problem:
    (problem,) = scan_folder(folder).problems
    return problem


def test_a_header_gives_dtype_shape_and_place_of_every_tensor(file: Path):
    entries = read_header(file)
    assert {key: (entry.dtype, entry.shape) for key, entry in entries.items()} == {
        key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in TENSORS.items()
    }
    raw = file.read_bytes()
    begin = entries["a"].begin
    assert raw[begin : begin + 24] == TENSORS["a"].numpy().tobytes()


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_a_byte_too_short_or_too_long_is_refused_with_both_sizes(file: Path, change: int):
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] if change < 0 else raw + b"\0")
    with pytest.raises(BadFileError, match=f"expected {len(raw)} bytes as its header says, found {len(raw) + change}"):
        read_header(file)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "an empty file"),
        (b"1234", "claims"),
        (struct.pack("<Q", 2**63) + b"{}" * 50, "a header that claims 9223372036854775808 bytes"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 4711\n",
            "a git-lfs pointer to a file of 4711",
        ),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused_by_what_it_is(tmp_path: Path, content: bytes, found: str):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(BadFileError) as error:
        read_header(tmp_path / "x.safetensors")
    assert found in error.value.problem.found


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (b"{not json", "not JSON"),
        (b"[1]", "a JSON list"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": {"dtype": "F32", "shape": [1]}}', "shape"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "shape"),
        (b'{"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}', "'X9'"),
        (b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', "['F32']"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "4 bytes"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "overlap or leave a gap"),
        (
            b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            b'"b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            "overlap or leave a gap",
        ),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path: Path, header: bytes, found: str):
    with pytest.raises(BadFileError) as error:
        read_header(with_header(tmp_path / "x.safetensors", header, bytes(8)))
    assert found in error.value.problem.found


def test_an_index_joins_its_shards(tmp_path: Path):
    folder = sharded(tmp_path, one={"a": torch.ones(2)}, two={"b": torch.ones(3), "c": torch.ones(1)})
    assert {key: entry.file.name for key, entry in scan_folder(folder).entries.items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
        "c": "two.safetensors",
    }


def test_the_index_wins_over_a_single_file(tmp_path: Path):
    save_file({"old": torch.ones(1)}, tmp_path / "model.safetensors")
    assert set(scan_folder(sharded(tmp_path, one={"new": torch.ones(1)})).entries) == {"new"}


def test_a_folder_without_weights_is_named(tmp_path: Path):
    assert only_problem(tmp_path).found == "neither file"
    assert only_problem(tmp_path / "absent").found == "no such folder"
    with pytest.raises(
        CheckpointError, match=r"absent: expected model\.safetensors\.index\.json or model\.safetensors"
    ):
        refuse(scan_folder(tmp_path / "absent").problems, "It")


def test_a_missing_shard_is_one_problem_and_its_keys_are_not_reported_again(tmp_path: Path):
    folder = sharded(tmp_path, one={"a": torch.ones(2)}, two={"b": torch.ones(3), "c": torch.ones(1)})
    (folder / "two.safetensors").unlink()
    problem = only_problem(folder)
    assert (problem.file.name, problem.found) == ("two.safetensors", "no such file")
    table = {key: TensorSpec((1,), torch.float32) for key in "bc"} | {"a": TensorSpec((2,), torch.float32)}
    assert compare(scan_folder(folder), table) == []


def test_a_key_that_the_shard_lacks_is_named_with_the_shard(tmp_path: Path):
    folder = sharded(tmp_path, one={"a": torch.ones(2)})
    rewrite_map(folder, b="one.safetensors")
    problem = only_problem(folder)
    assert (problem.file.name, problem.key, problem.found) == ("one.safetensors", "b", "no such key")


def test_a_key_that_only_the_shard_has_is_a_warning(tmp_path: Path):
    folder = sharded(tmp_path, one={"a": torch.ones(2), "b": torch.ones(2)})
    content = json.loads((folder / INDEX_NAME).read_text())
    del content["weight_map"]["b"]
    (folder / INDEX_NAME).write_text(json.dumps(content))
    problem = only_problem(folder)
    assert (problem.key, problem.warning) == ("b", True)
    assert set(scan_folder(folder).entries) == {"a"}


@pytest.mark.parametrize(
    "name",
    ["../one.safetensors", "/etc/passwd", "x/../../one.safetensors", "..\\one.safetensors", "C:one", "a\0b", "", 7],
)
def test_an_index_path_that_leaves_the_folder_is_refused_unopened(tmp_path: Path, name: object):
    folder = tmp_path / "inner"
    folder.mkdir()
    save_file({"b": torch.ones(1)}, tmp_path / "one.safetensors")
    rewrite_map(sharded(folder, one={"a": torch.ones(2)}), b=name)
    problem = only_problem(folder)
    assert (problem.file.name, problem.key, problem.found) == (INDEX_NAME, "b", repr(name))
    assert set(scan_folder(folder).entries) == {"a"}


def test_a_shard_in_a_sub_folder_and_a_linked_shard_are_read(tmp_path: Path):
    # Download caches keep the files elsewhere and link to them.
    folder, elsewhere = tmp_path / "inner", tmp_path / "blobs"
    (folder / "sub").mkdir(parents=True)
    elsewhere.mkdir()
    sharded(folder, one={"a": torch.ones(2)})
    (folder / "one.safetensors").rename(elsewhere / "blob")
    (folder / "sub" / "one.safetensors").symlink_to(elsewhere / "blob")
    rewrite_map(folder, a="sub/one.safetensors")
    assert set(scan_folder(folder).entries) == {"a"}


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_broken_index_is_one_problem(tmp_path: Path, content: str):
    (tmp_path / INDEX_NAME).write_text(content)
    assert only_problem(tmp_path).file.name == INDEX_NAME


def test_comparing_names_missing_misshapen_and_stray_keys(tmp_path: Path):
    folder = sharded(tmp_path, one={"a": torch.ones(2), "x": torch.ones(1), "n": torch.ones(1, dtype=torch.int32)})
    table = {key: TensorSpec((3,), torch.float32) for key in ("a", "m", "o")} | {"n": TensorSpec((1,), torch.float32)}
    problems = {problem.key: problem for problem in compare(scan_folder(folder), table, optional={"o"})}
    assert set(problems) == {"a", "m", "n", "x"}
    assert (problems["a"].expected, problems["a"].found) == ("shape [3]", "shape [2]")
    assert (problems["m"].expected, problems["m"].found) == ("a tensor of shape [3]", "no such key")
    assert problems["n"].found == "torch.int32"
    assert problems["x"].warning
    assert not any(problems[key].warning for key in "amn")


def test_a_refusal_lists_eight_problems_and_counts_the_rest(tmp_path: Path):
    folder = sharded(tmp_path, one={"a": torch.ones(2)})
    rewrite_map(folder, **{f"missing{i}": "one.safetensors" for i in range(11)})
    with pytest.raises(CheckpointError, match="11 problems") as error:
        refuse(scan_folder(folder).problems, "It")
    assert str(error.value).count("no such key") == 8
    assert "and 3 more" in str(error.value)


def test_the_bytes_of_a_tensor_follow_from_its_shape():
    assert Entry(Path("x"), torch.bfloat16, (3, 5), 0).nbytes == 30
