"""Random weights that keep activations near unit variance, so that a miniature makes varied pictures and sound.

Every tensor is drawn by a rule that looks at its name, from a generator of its own: a tensor's values depend on the
seed, its name and its shape, and on nothing else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Draw = Callable[[str, tuple[int, ...], torch.Generator], Tensor]


def generator_of(seed: int, name: str) -> torch.Generator:
    """The generator of one tensor of one network."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_transformer(key: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A tensor of the preview transformer or of the refiner, fp32. Norm weights are offsets from one (10 §5)."""
    noise = torch.randn(shape, generator=generator)
    last = key.rsplit(".", 1)[-1]
    if key.endswith(("q_norm.weight", "k_norm.weight")):
        # Attention that looks at a few tokens, not at the average of thousands: so the prompt is seen.
        return 0.8 + 0.1 * noise
    if "norm" in key:
        return 0.1 * noise
    if last.startswith("mhc_alpha"):
        return 0.3 + 0.05 * noise
    if last.startswith("mhc_phi"):
        return noise  # 10 §6: the product is divided by sqrt(nC), which undoes the sum over nC channels
    if last.startswith("mhc_bias_res"):
        return 2.0 * torch.eye(shape[0]) + 0.3 * noise
    if last.startswith("mhc_bias"):
        return 0.5 * noise
    if last in ("expert_bias", "expert_bias_ema"):
        return 0.05 * noise
    if last == "sinks":
        return noise
    if last == "bias":
        return 0.1 * noise
    if last in ("W_gate", "W_up", "W_down"):
        return noise * shape[1] ** -0.5  # input-major (10 §9)
    return noise * shape[-1] ** -0.5


def draw_text(key: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A tensor of the text encoder, fp32. Norm weights are offsets from one but that of the linear layers (30 §4.3)."""
    noise = torch.randn(shape, generator=generator)
    if key.endswith("linear_attn.A_log"):
        return torch.empty(shape).uniform_(1, 8, generator=generator).log()
    if key.endswith("linear_attn.dt_bias"):
        return noise - 3  # memories from some to some hundred tokens long
    if key.endswith("linear_attn.norm.weight"):
        return 1 + 0.1 * noise
    if "norm" in key:
        return 0.1 * noise
    if key.endswith("embed_tokens.weight"):
        return noise
    if key.endswith("bias"):
        return 0.02 * noise
    return noise * _fan_in(shape) ** -0.5


def draw_wan(key: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A tensor of the Wan 2.2 VAE, fp32."""
    noise = torch.randn(shape, generator=generator)
    if key.endswith("gamma"):
        return 1 + 0.1 * noise
    if key.endswith("bias"):
        return 0.05 * noise
    # Of a causal kernel over time a single frame meets only the last slice (40 §3.5).
    return noise * (shape[1] * math.prod(shape[-2:])) ** -0.5


def draw_turbo(key: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A tensor of the Turbo decoder, fp32. Its norms have no weights, so only the last layer sets the contrast."""
    noise = torch.randn(shape, generator=generator)
    if key.endswith("bias"):
        return 0.05 * noise if "conv_out" not in key else torch.zeros(shape)
    if "conv_out" in key:
        # One value for all taps and for the four pixels of a patch, and no sum over channels: soft patches around
        # gray instead of a fine grid, which is pleasanter to look at, and quicker to encode.
        colour = noise.view(-1, 4, *shape[1:]).mean((1, 3, 4, 5), keepdim=True)
        colour = colour - colour.mean(2, keepdim=True)
        return 0.4 * colour.expand(-1, 4, *shape[1:]).reshape(shape) * shape[1] ** -0.5
    return noise * _fan_in(shape) ** -0.5


def draw_oobleck(key: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A tensor of the Oobleck decoder, fp32: directions and lengths of weight-normed kernels, snakes as logarithms."""
    noise = torch.randn(shape, generator=generator)
    if key.endswith(("alpha", "beta", "bias")):
        return 0.05 * noise
    return noise


def oobleck_lengths(tensors: dict[str, Tensor], prefix: str, keys: Iterable[str]) -> None:
    """Set every `weight_g` from the kernel that it scales, so that variance is kept from layer to layer (40 §5.2)."""
    for key in keys:
        if not key.endswith("weight_g"):
            continue
        kernel = tensors[prefix + key.removesuffix("weight_g") + "weight_v"]
        if key.endswith("layers.7.weight_g"):
            length = 0.05  # the last layer: sound well inside [-1, 1]
        elif key.count("layers.") == 3:
            length = 0.3 if ".layers.3.weight_g" in key else 1.0  # the end of a residual unit: the sum must not grow
        elif key.count("layers.") == 2:
            # Transposed: [in, out, 2·stride], of which two taps meet in every sample.
            length = math.sqrt(kernel.shape[1] * kernel.shape[2] / (2 * kernel.shape[0]))
        else:
            length = 1.0
        tensors[prefix + key] = torch.full_like(tensors[prefix + key], length)


def _fan_in(shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:])
