"""Tensors that a release holds beside those that are used: shapes only, so that a miniature has them too."""

from __future__ import annotations

import itertools

from .miniature_text import VISION

Shapes = dict[str, tuple[int, ...]]


def wan_decoder_shapes(dim: int, z_dim: int = 48) -> Shapes:
    """`decoder.*` and `conv2.*` of Wan2.2_VAE.pth: 110 tensors; the released width is 256 (40 §3.1)."""
    widths = [4 * dim, 4 * dim, 4 * dim, 2 * dim, dim]
    shapes: Shapes = {"conv2.weight": (z_dim, z_dim, 1, 1, 1), "conv2.bias": (z_dim,)}
    shapes |= _conv("decoder.conv1", widths[0], z_dim, 3, 3, 3)
    shapes |= _residual("decoder.middle.0", widths[0], widths[0])
    shapes["decoder.middle.1.norm.gamma"] = (widths[0], 1, 1)
    shapes |= _conv("decoder.middle.1.to_qkv", 3 * widths[0], widths[0], 1, 1)
    shapes |= _conv("decoder.middle.1.proj", widths[0], widths[0], 1, 1)
    shapes |= _residual("decoder.middle.2", widths[0], widths[0])
    for block, (cin, cout) in enumerate(itertools.pairwise(widths)):
        prefix = f"decoder.upsamples.{block}.upsamples"
        for unit in range(3):
            shapes |= _residual(f"{prefix}.{unit}", cin if unit == 0 else cout, cout)
        if block < 3:
            shapes |= _conv(f"{prefix}.3.resample.1", cout, cout, 3, 3)
        if block < 2:
            shapes |= _conv(f"{prefix}.3.time_conv", 2 * cout, cout, 3, 1, 1)
    shapes["decoder.head.0.gamma"] = (dim, 1, 1, 1)
    return shapes | _conv("decoder.head.2", 12, dim, 3, 3, 3)


def turbo_training_shapes(widths: tuple[int, ...]) -> Shapes:
    """The eight training-only tensors of the Turbo checkpoint (40 §4.2)."""
    shapes: Shapes = {}
    for head in (0, 1):
        for layer, (cin, cout) in enumerate(((widths[-1], widths[-1]), (widths[-1], 2 * widths[-1]))):
            shapes |= _conv(f"aligned_feature_projection_heads.{head}.{layer}.conv", cout, cin, 1, 1, 1)
    return shapes


def text_extra_shapes(hidden: int, vocabulary: int) -> Shapes:
    """Final norm, heads and vision tower of the multimodal text encoder (30 §2)."""
    width, inner, merged = VISION["hidden_size"], VISION["intermediate_size"], 4 * VISION["hidden_size"]
    shapes: Shapes = {
        "model.language_model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "model.visual.pos_embed.weight": (VISION["num_position_embeddings"], width),
    }
    patch = VISION["patch_size"]
    shapes |= _conv("model.visual.patch_embed.proj", width, VISION["in_channels"], 2, patch, patch)
    for name, out, into in (
        ("blocks.0.attn.qkv", 3 * width, width),
        ("blocks.0.attn.proj", width, width),
        ("blocks.0.mlp.linear_fc1", inner, width),
        ("blocks.0.mlp.linear_fc2", width, inner),
        ("merger.linear_fc1", merged, merged),
        ("merger.linear_fc2", hidden, merged),
    ):
        shapes |= _conv(f"model.visual.{name}", out, into)
    for name in ("blocks.0.norm1", "blocks.0.norm2", "merger.norm"):
        shapes |= {f"model.visual.{name}.weight": (width,), f"model.visual.{name}.bias": (width,)}
    return shapes


def stable_audio_extra_shapes(channels: int) -> Shapes:
    """Some of the diffusion model and of the encoder half that share the sound decoder's file (40 §5.1)."""
    return {
        "model.model.to_timestep_embed.0.weight": (channels, channels),
        "model.model.transformer.layers.0.self_attn.to_qkv.weight": (3 * channels, channels),
        "conditioner.conditioners.seconds_total.embedder.embedding.1.weight": (channels, channels),
        "pretransform.model.encoder.layers.0.bias": (channels,),
        "pretransform.model.encoder.layers.0.weight_g": (channels, 1, 1),
        "pretransform.model.encoder.layers.0.weight_v": (channels, 2, 7),
    }


def _conv(name: str, out: int, into: int, *kernel: int) -> Shapes:
    return {f"{name}.weight": (out, into, *kernel), f"{name}.bias": (out,)}


def _residual(name: str, cin: int, cout: int) -> Shapes:
    shapes: Shapes = {f"{name}.residual.0.gamma": (cin, 1, 1, 1), f"{name}.residual.3.gamma": (cout, 1, 1, 1)}
    shapes |= _conv(f"{name}.residual.2", cout, cin, 3, 3, 3)
    shapes |= _conv(f"{name}.residual.6", cout, cout, 3, 3, 3)
    return shapes | (_conv(f"{name}.shortcut", cout, cin, 1, 1, 1) if cin != cout else {})
