"""Small codec networks with seeded random weights, for the codec tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from magi2_native.magi2_core.codecs.oobleck_decoder import OobleckConfig, OobleckDecoder
from magi2_native.magi2_core.codecs.turbo_decoder import TurboConfig, TurboDecoder
from magi2_native.magi2_core.codecs.turbo_tiles import Tile
from magi2_native.magi2_core.codecs.turbo_windows import Convert, decode_window, plan_windows
from magi2_native.magi2_core.codecs.wan_encoder import WanEncoder, WanEncoderConfig
from torch import Tensor, nn

RELEASED_TURBO = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 48, "decoder_block_out_channels": [64, 128, 256, 512],
    "decoder_layers_per_block": [2, 2, 2, 3, 3], "decoder_spatio_temporal_scaling": [False, True, True, True],
    "decoder_spatio_only": [False, True, False, False], "decoder_is_dw_conv": [False] * 5, "decoder_dw_kernel_size": 5,
    "decoder_causal": False, "patch_size": 2, "patch_size_t": 1, "use_unpatchify": True, "resnet_norm_eps": 1e-6,
    "scaling_factor": 1.0, "spatial_compression_ratio": 16, "temporal_compression_ratio": 4, "first_chunk_size": 7,
    "step_size": 7, "aligned_feature_projection_mode": "conv-2layer", "aligned_blks_indices": [0, 1],
}  # fmt: skip
SMALL_TURBO = TurboConfig(block_out_channels=(4, 6, 8, 8), layers_per_block=(1, 1, 1, 1, 1))


def seeded(network: nn.Module, seed: int = 0, scale: float = 1.0) -> nn.Module:
    """Fill every parameter with values of a sensible size for its fan-in; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        fan_in = max(1, parameter[0].numel())
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale / fan_in**0.5
    return network.requires_grad_(False)


def turbo(config: TurboConfig = SMALL_TURBO, dtype: torch.dtype = torch.float32) -> TurboDecoder:
    return seeded(TurboDecoder(config)).to(dtype)


def wan(dim: int = 4) -> WanEncoder:
    return seeded(WanEncoder(WanEncoderConfig(dim=dim)))


def oobleck(channels: int = 2) -> OobleckDecoder:
    return seeded(OobleckDecoder(OobleckConfig(channels=channels)))


def decode(decoder: TurboDecoder, z: Tensor, convert: Convert, tiles: Sequence[Tile] | None = None) -> Tensor:
    """A whole clip, window by window."""
    windows = plan_windows(z.shape[2], decoder.config)
    with torch.inference_mode():
        return torch.cat([decode_window(decoder, z, window, convert, tiles) for window in windows])
