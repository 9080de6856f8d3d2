"""The tensors of the second stage (50 §4)."""

from math import prod

import torch
from magi2_native.magi2_core.config import RefinerConfig
from magi2_native.magi2_core.refiner.model import RefinerTransformer
from magi2_native.magi2_core.refiner.parameters import refiner_tensors

RELEASED = RefinerConfig()
TABLE = refiner_tensors(RELEASED)


def elements(prefix: str) -> int:
    return sum(prod(spec.shape) for name, spec in TABLE.items() if name.startswith(prefix))


def test_the_released_refiner_has_the_stated_tensors_elements_and_bytes() -> None:
    assert len(TABLE) == 281
    assert elements("") == 6_720_075_280
    by_dtype = dict.fromkeys((torch.bfloat16, torch.float32), 0)
    for spec in TABLE.values():
        by_dtype[spec.dtype] += prod(spec.shape)
    assert by_dtype == {torch.bfloat16: 6_697_844_736, torch.float32: 22_230_544}
    assert sum(prod(spec.shape) * spec.dtype.itemsize for spec in TABLE.values()) == 13_484_611_648


def test_layers_with_weights_for_each_modality_are_three_times_as_large() -> None:
    assert [elements(f"block.layers.{layer}.") for layer in (0, 1, 28, 29)] == [528_802_560] * 4
    assert elements("block.layers.2.") == 176_267_520


def test_the_mlp_width_is_rounded_to_four() -> None:
    assert RELEASED.mlp_width == 10920
    assert TABLE["block.layers.5.mlp.up_gate_proj.weight"].shape == (21840, 4096)


def test_the_module_of_the_released_size_has_exactly_these_tensors() -> None:
    with torch.device("meta"):
        state = RefinerTransformer(RELEASED).state_dict()
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in TABLE.items()
    }
