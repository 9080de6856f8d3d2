"""The tensor table of the preview transformer, at full size and divided over ranks (10 §11.3, §12)."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from math import prod

import pytest
import torch
from magi2_native.distributed.exchange import ParallelContext
from magi2_native.distributed.layout import ParallelLayout
from magi2_native.magi2_core.checkpoint.shard import local_bytes, local_shape
from magi2_native.magi2_core.checkpoint.spec import TensorSpec
from magi2_native.magi2_core.config import MoeConfig, PreviewConfig
from magi2_native.magi2_core.dit.model import PreviewTransformer
from magi2_native.magi2_core.dit.parameters import preview_tensors
from magi2_native.magi2_core.errors import RequestError

CONFIG = PreviewConfig()
TABLE = preview_tensors(CONFIG)


def counted(pattern: str) -> tuple[int, int]:
    """Parameters and bytes of the tensors whose names fit one of the patterns."""
    specs = [spec for name, spec in TABLE.items() if any(fnmatch(name, part) for part in pattern.split())]
    return sum(prod(s.shape) for s in specs), sum(prod(s.shape) * s.dtype.itemsize for s in specs)


def test_the_released_model_has_1371_tensors_of_114_billion_parameters() -> None:
    assert len(TABLE) == 1371
    assert counted("*") == (113_934_953_536, 228_107_858_176)


@pytest.mark.parametrize(
    ("pattern", "parameters", "size"),
    [
        ("*.moe_mlp.W_*", 108_716_359_680, 217_432_719_360),
        ("*.linear_qkv.weight", 1_358_954_496, 2_717_908_992),
        ("*.linear_proj.weight", 452_984_832, 905_969_664),
        ("*.linear_g.weight", 3_538_944, 7_077_888),
        ("*.attention.*_norm.weight *.sinks", 160_704, 642_816),
        ("*.up_gate_proj.weight *.down_proj.weight", 905_969_664, 1_811_939_328),
        ("*.modality_specific_shared_expert_fc?.weight", 1_274_019_840, 2_548_039_680),
        ("*.split_linear.weight *.merge_linear.weight", 679_477_248, 1_358_954_496),
        ("*.mlp.shared_expert_fc?.weight", 424_673_280, 849_346_560),
        ("*.moe_mlp.gate", 28_311_552, 113_246_208),
        ("*.expert_bias *.expert_bias_ema", 221_184, 884_736),
        ("*.mlp.pre_norm.weight", 368_640, 1_474_560),
        ("*.mhc_*", 24_184_944, 96_739_776),
        ("pre_adapter.*_embedder.*", 64_327_680, 257_310_720),
        ("post_adapter.* *.bands", 1_400_848, 5_603_392),
    ],
)
def test_every_group_of_tensors_has_the_published_count(pattern: str, parameters: int, size: int) -> None:
    assert counted(pattern) == (parameters, size)


def test_a_full_size_module_has_exactly_the_keys_shapes_and_dtypes_of_the_table() -> None:
    with torch.device("meta"):
        state = PreviewTransformer(CONFIG).state_dict()
    assert {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in state.items()} == {
        name: TensorSpec(spec.shape, spec.dtype) for name, spec in TABLE.items()
    }


@pytest.mark.parametrize(
    ("layout", "rank", "size"),
    [
        ("sp1", 0, 228_107_858_176),
        ("sp2", 1, 119_334_433_024),
        ("sp3", 2, 83_076_624_640),
        ("sp4", 3, 64_947_720_448),
        ("sp6", 5, 46_818_816_256),
        ("sp8-padded", 0, 46_818_816_256),
        ("sp8-padded", 7, 10_561_007_872),
        ("sp12", 11, 28_689_912_064),
        ("tp2", 0, 114_234_812_800),
        ("tp2sp2", 3, 114_234_812_800),
        ("tp4", 3, 57_298_290_112),
    ],
)
def test_a_rank_holds_the_published_bytes(layout: str, rank: int, size: int) -> None:
    assert local_bytes(TABLE, ParallelLayout.parse(layout).share(rank, 12, 256)) == size


def test_eight_ranks_hold_37_8_gb_each_where_banks_are_balanced() -> None:
    sizes = {local_bytes(TABLE, ParallelLayout(sp=8).share(rank, 12, 256)) for rank in range(8)}
    # One eighth of the experts, and the routers of the two heads that every rank touches (70 §5).
    assert sizes == {10_561_007_872 + 217_432_719_360 // 8 + (113_246_208 + 884_736) * 2 // 12}
    assert max(sizes) == pytest.approx(37.7e9, rel=0.002)


@pytest.mark.parametrize("layout", ["sp4", "sp8", "tp2", "tp4", "tp2sp2"])
def test_a_module_is_made_in_the_local_shapes_of_its_rank(layout: str) -> None:
    parsed = ParallelLayout.parse(layout)
    rank = parsed.world - 1
    with torch.device("meta"):
        state = PreviewTransformer(CONFIG, ParallelContext(parsed, rank, None, None, None, None)).state_dict()
    share = parsed.share(rank, 12, 256)
    assert {name: tuple(t.shape) for name, t in state.items()} == {n: local_shape(s, share) for n, s in TABLE.items()}


def test_tensor_parallelism_divides_q_k_and_v_inside_every_modality_block() -> None:
    spec = TABLE["block.layers.0.attention.linear_qkv.weight"]
    assert (spec.blocks, spec.parts) == (3, (3072, 3072, 3072))
    assert local_shape(spec, ParallelLayout(tp=4).share(1, 12, 256)) == (3 * 3 * 768, 3072)


def test_fp32_mode_changes_only_the_tensors_that_are_bf16() -> None:
    exact = preview_tensors(replace(CONFIG, params_dtype=torch.float32))
    assert {spec.dtype for spec in exact.values()} == {torch.float32}
    assert {n: s.shape for n, s in exact.items()} == {n: s.shape for n, s in TABLE.items()}


def test_a_moe_layer_has_three_blocks_only_in_its_norm_and_its_modality_experts() -> None:
    # 10 §14.9
    blocks = {name.removeprefix("block.layers.7."): spec.blocks for name, spec in TABLE.items() if ".layers.7." in name}
    assert {name for name, count in blocks.items() if count == 3} == {
        "mlp.pre_norm.weight",
        "mlp.modality_specific_shared_expert_fc1.weight",
        "mlp.modality_specific_shared_expert_fc2.weight",
    }


def test_layers_may_be_of_both_special_kinds_or_of_neither() -> None:
    config = PreviewConfig(num_layers=2, mm_layers=(0,), moe=MoeConfig(moe_layers=(0,)))
    table = preview_tensors(config)
    assert table["block.layers.0.mhc_norm.weight"].shape == (3 * 12288,)
    assert "block.layers.0.mlp.moe_mlp.gate" in table
    assert table["block.layers.1.mlp.up_gate_proj.weight"].shape == (2 * 8192, 3072)


def test_the_moe_heads_divide_the_split_width_where_it_differs_from_the_hidden_size() -> None:
    table = preview_tensors(PreviewConfig(moe=MoeConfig(split_merge_intermediate_size=1536)))
    assert table["block.layers.2.mlp.split_linear.weight"].shape == (1536, 3072)
    assert table["block.layers.2.mlp.merge_linear.weight"].shape == (3072, 1536)
    assert table["block.layers.2.mlp.moe_mlp.W_down"].shape == (3072, 1280, 128)


def test_a_compute_dtype_that_the_model_does_not_have_is_refused() -> None:
    with torch.device("meta"), pytest.raises(RequestError, match=r"float16; it must be bfloat16 or float32"):
        PreviewTransformer(PreviewConfig(num_layers=1, mm_layers=(0,)), compute_dtype=torch.float16)
