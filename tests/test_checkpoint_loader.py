"""Weights from disk into a module: exact values, exact bytes, strictness, cancelling."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from magi2_native.distributed.layout import ParallelLayout, RankShare
from magi2_native.magi2_core.checkpoint import loader
from magi2_native.magi2_core.checkpoint.index import INDEX_NAME, scan_folder
from magi2_native.magi2_core.checkpoint.loader import load_module, load_tensors
from magi2_native.magi2_core.checkpoint.network import BANDS, Network, network
from magi2_native.magi2_core.checkpoint.reader import SafetensorsReader
from magi2_native.magi2_core.checkpoint.shard import local_bytes, local_shape, local_slices
from magi2_native.magi2_core.config import MoeConfig, PreviewConfig
from magi2_native.magi2_core.dit.parameters import preview_tensors
from magi2_native.magi2_core.errors import CheckpointError
from magi2_native.magi2_core.events import Silent
from safetensors.torch import save_file
from torch import Tensor, nn

CONFIG = PreviewConfig(
    num_layers=2, hidden_size=192, head_dim=8, intermediate_factor=1, mm_layers=(0,), text_in_channels=16,
    moe=MoeConfig(num_experts=8, moe_layers=(1,), expert_intermediate_size=16, shared_expert_intermediate_size=16,
                  modality_specific_expert_intermediate_size=16),
)  # fmt: skip
TABLE = preview_tensors(CONFIG)
BIAS = "block.layers.1.mlp.moe_mlp.router.expert_bias"


def write(folder: Path, tensors: dict[str, Tensor], shards: int = 3) -> None:
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for number in range(shards):
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / f"{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"{number}.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {key: torch.randn(spec.shape, generator=generator).to(spec.dtype) for key, spec in TABLE.items()}
    return tensors | {BANDS: torch.ones(1)}


@pytest.fixture
def folder(tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    write(tmp_path / "preview", weights)
    return tmp_path / "preview"


def opened(folder: Path) -> Network:
    return network("preview transformer", scan_folder(folder), TABLE, optional={BANDS})


class Holder(nn.Module):
    """A module on the meta device whose state dict has given names, shapes and dtypes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype]):
        super().__init__()
        for key, shape in shapes.items():
            module = self
            *path, last = key.split(".")
            for name in path:
                if name not in module._modules:
                    module.add_module(name, nn.Module())
                module = module.get_submodule(name)
            module.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=dtypes[key], device="meta")))


def holder(share: RankShare | None = None, dtype: torch.dtype | None = None, without: str = "nothing") -> Holder:
    keys = [key for key in TABLE if without not in key]
    shapes = {key: local_shape(TABLE[key], share) for key in keys}
    return Holder(shapes, {key: dtype or TABLE[key].dtype for key in keys})


def test_every_tensor_arrives_as_stored(folder: Path, weights: dict[str, Tensor]):
    module = holder()
    load_module(module, opened(folder))
    state = module.state_dict()
    for key, tensor in weights.items():
        stored = weights[f"{BIAS}_ema"] if key == BIAS else tensor
        assert torch.equal(state[key], stored), key
        assert state[key].dtype == TABLE[key].dtype


@pytest.mark.parametrize("layout", ["sp2", "sp8", "sp8-padded", "tp2", "tp4", "tp2sp2"])
def test_each_rank_gets_its_slices_and_reads_no_other_byte(folder: Path, weights: dict[str, Tensor], layout: str):
    # 70 §7, 80 line 15
    parallel = ParallelLayout.parse(layout)
    for rank in range(parallel.world):
        share = parallel.share(rank, 12, 8)
        module = holder(share)
        loaded = load_module(module, opened(folder), share=share)
        assert loaded.bytes_read == local_bytes(TABLE, share)
        for key, tensor in module.state_dict().items():
            source = f"{BIAS}_ema" if key == BIAS else key
            assert torch.equal(tensor, torch.cat([weights[source][r] for r in local_slices(TABLE[key], share)])), key


@pytest.mark.parametrize("layout", ["sp3", "sp8", "sp8-padded", "tp4"])
def test_over_all_ranks_every_expert_byte_is_read_once(folder: Path, layout: str):
    experts = {key: spec.dtype for key, spec in TABLE.items() if ".moe_mlp.W_" in key}
    net, parallel, read = opened(folder), ParallelLayout.parse(layout), 0
    for rank in range(parallel.world):
        with net.open() as reader:
            load_tensors(net, reader, experts, share=parallel.share(rank, 12, 8))
            read += reader.bytes_read
    assert read == sum(net.entries[key].nbytes for key in experts)


def test_each_shard_is_opened_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    net, opened_files = opened(folder), []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: (opened_files.append(Path(path).name), real(path, *rest))[1])
    assert load_module(holder(), net).files_opened == 3
    assert sorted(opened_files) == ["0.safetensors", "1.safetensors", "2.safetensors"]


def test_files_are_closed_after_loading(folder: Path):
    before = len(os.listdir("/proc/self/fd"))
    load_module(holder(), opened(folder))
    assert len(os.listdir("/proc/self/fd")) == before


def test_tensors_are_cast_to_the_dtype_of_the_module(tmp_path: Path, weights: dict[str, Tensor]):
    other = {key: tensor.to(torch.float32 if tensor.dtype == torch.bfloat16 else torch.bfloat16)
             for key, tensor in weights.items()}  # fmt: skip
    write(tmp_path / "other", other)
    for dtype in (None, torch.float32):
        module = holder(dtype=dtype)
        load_module(module, opened(tmp_path / "other"))
        for key, tensor in module.state_dict().items():
            wanted = dtype or TABLE[key].dtype
            assert tensor.dtype == wanted
            if key != BIAS:
                assert torch.equal(tensor, other[key].to(wanted)), key


def test_large_tensors_are_read_in_pieces(folder: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loader, "_CHUNK", 1000)
    for dtype in (None, torch.float64):
        module = holder(dtype=dtype)
        load_module(module, opened(folder))
        key = "block.layers.1.mlp.moe_mlp.W_up"
        assert torch.equal(module.state_dict()[key], weights[key].to(dtype or torch.bfloat16))


@pytest.mark.parametrize(("value", "suffix"), [(None, "_ema"), ("", "_ema"), (" EMA ", "_ema"), (" Main ", "")])
def test_the_router_bias_is_the_ema_one_unless_told_otherwise(
    folder: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, value: str | None, suffix: str
):
    # 10 §12.2
    monkeypatch.delenv("MAGI2_ROUTER_BIAS_SOURCE", raising=False)
    if value is not None:
        monkeypatch.setenv("MAGI2_ROUTER_BIAS_SOURCE", value)
    module = holder()
    load_module(module, opened(folder))
    assert torch.equal(module.state_dict()[BIAS], weights[BIAS + suffix])
    assert torch.equal(module.state_dict()[f"{BIAS}_ema"], weights[f"{BIAS}_ema"])


def test_an_unknown_router_bias_source_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MAGI2_ROUTER_BIAS_SOURCE", "mean")
    with pytest.raises(CheckpointError, match="'mean'"):
        load_module(holder(), opened(folder))


def test_missing_bands_are_supplied_by_their_formula(tmp_path: Path, weights: dict[str, Tensor]):
    config = replace(CONFIG, head_dim=24, num_query_groups=8)
    table = preview_tensors(config)
    write(tmp_path / "preview", {key: torch.zeros(spec.shape) for key, spec in table.items() if key != BANDS})
    net = network("preview transformer", scan_folder(tmp_path / "preview"), table, optional={BANDS})
    module = Holder({key: spec.shape for key, spec in table.items()}, {key: spec.dtype for key, spec in table.items()})
    load_module(module, net)
    exponents = torch.arange(3, dtype=torch.float32) / 3
    assert torch.equal(module.state_dict()[BANDS], 1 / 10000**exponents)


def test_stored_bands_that_differ_are_kept_and_reported(tmp_path: Path, weights: dict[str, Tensor], caplog):
    write(tmp_path / "preview", weights | {BANDS: torch.tensor([0.75])})
    module = holder()
    with caplog.at_level(logging.WARNING, "magi2"):
        load_module(module, opened(tmp_path / "preview"))
    assert module.state_dict()[BANDS].item() == 0.75
    assert "differs from its formula by up to 2.5e-01" in caplog.text


def test_stray_keys_are_warned_about_once(tmp_path: Path, weights: dict[str, Tensor], caplog):
    write(tmp_path / "preview", weights | {f"extra.{i}": torch.ones(1) for i in range(10)})
    with caplog.at_level(logging.WARNING, "magi2"):
        load_module(holder(), opened(tmp_path / "preview"))
    (record,) = caplog.records
    assert "10 keys" in record.getMessage()
    assert "extra.0" in record.getMessage()


def test_missing_and_misshapen_keys_are_refused_by_name(tmp_path: Path, weights: dict[str, Tensor]):
    changed = weights | {BIAS: torch.ones(5)}
    del changed["post_adapter.final_linear_audio.weight"]
    write(tmp_path / "preview", changed)
    with pytest.raises(CheckpointError, match="2 problems") as error:
        load_module(holder(), opened(tmp_path / "preview"))
    assert "post_adapter.final_linear_audio.weight: expected a tensor of shape [64, 768], found no such key" in str(
        error.value
    )
    assert f"{BIAS}: expected shape [96], found shape [5]" in str(error.value)


def test_a_module_may_leave_weights_to_someone_else(folder: Path):
    module = holder(without="moe_mlp.W_")
    loaded = load_module(module, opened(folder))
    experts = sum(spec.dtype.itemsize * torch.Size(spec.shape).numel() for k, spec in TABLE.items() if ".W_" in k)
    assert loaded.bytes_read == local_bytes(TABLE, None) - experts


def test_a_module_of_another_architecture_is_refused(folder: Path):
    shapes = {BANDS: (1,), "block.layers.7.mhc_norm.weight": (768,)}
    with pytest.raises(CheckpointError, match=re.escape("no tensor 'block.layers.7.mhc_norm.weight'")):
        load_module(Holder(shapes, dict.fromkeys(shapes, torch.float32)), opened(folder))
    with pytest.raises(CheckpointError, match=re.escape("the module has shape (2,), this rank's share is (1,)")):
        load_module(Holder({BANDS: (2,)}, {BANDS: torch.float32}), opened(folder))


class Stopped(BaseException):
    pass


class Watching(Silent):
    """Counts the points where a load may be stopped, and stops at one of them."""

    def __init__(self, stop_at: int = -1):
        self.checks, self.stop_at, self.ticks = 0, stop_at, []

    def check(self) -> None:
        self.checks += 1
        if self.checks == self.stop_at:
            raise Stopped

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        self.ticks.append((stage, done, total))


def test_progress_ends_at_the_last_tensor_and_all_ranks_check_equally_often(folder: Path):
    for rank in range(8):
        events, share = Watching(), ParallelLayout.parse("sp8-padded").share(rank, 12, 8)
        load_module(holder(share), opened(folder), share=share, events=events, stage="load transformer")
        assert events.checks == len(TABLE)
        assert events.ticks[-1] == ("load transformer", len(TABLE), len(TABLE))


def test_cancelling_stops_at_the_next_tensor_and_lets_go_of_threads_and_files(folder: Path):
    import threading

    before = len(os.listdir("/proc/self/fd"))
    events = Watching(stop_at=5)
    with pytest.raises(Stopped):
        load_module(holder(), opened(folder), events=events)
    assert events.checks == 5
    assert len(events.ticks) == 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("magi2-load")]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_shrinks_while_it_is_read_is_refused(folder: Path):
    net = opened(folder)
    os.truncate(folder / "1.safetensors", (folder / "1.safetensors").stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"1\.safetensors: expected \d+ bytes, found \d+ bytes: cut while in use"):
        load_module(holder(), net)


def test_regions_are_read_exactly(folder: Path, weights: dict[str, Tensor]):
    key = "block.layers.1.mlp.moe_mlp.W_down"
    with SafetensorsReader(opened(folder).entries) as reader:
        for region in (
            (slice(0, 96), slice(0, 16), slice(0, 16)),
            (slice(3, 9), slice(0, 16), slice(0, 16)),
            (slice(3, 9), slice(2, 5), slice(0, 16)),
            (slice(3, 9), slice(2, 5), slice(7, 8)),
            (slice(3, 9), slice(0, 16), slice(1, 16)),
        ):
            expected = weights[key][region].contiguous()
            got = torch.empty_like(expected)
            before = reader.bytes_read
            reader.read(key, region, got)
            assert torch.equal(got, expected)
            assert reader.bytes_read - before == expected.nbytes
