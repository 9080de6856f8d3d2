"""A checkpoint of random weights in exactly the released layout, names, sharding and file formats, but small.

It is for trying things out: every stage runs on it, every parallel layout is possible, and the clip changes with the
prompt, the seed and the picture. What it shows means nothing.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..codecs.oobleck_decoder import OOBLECK_PREFIX, OobleckConfig, oobleck_decoder_tensors
from ..codecs.turbo_decoder import TURBO_PREFIX, TurboConfig, turbo_decoder_tensors
from ..codecs.wan_encoder import WanEncoderConfig, wan_encoder_tensors
from ..conditioning.parameters import TextEncoderConfig, text_encoder_tensors
from ..config import MoeConfig, PreviewConfig, RefinerConfig
from ..dit.parameters import preview_tensors
from ..dit.rope import rotary_bands
from ..errors import RequestError
from ..events import SILENT, Events
from ..refiner.parameters import refiner_tensors
from . import folder as place
from .index import INDEX_NAME, SINGLE_NAME
from .miniature_extras import (
    stable_audio_extra_shapes,
    text_extra_shapes,
    turbo_training_shapes,
    wan_decoder_shapes,
)
from .miniature_text import write_json, write_text_config, write_tokenizer
from .miniature_weights import (
    Draw,
    draw_oobleck,
    draw_text,
    draw_transformer,
    draw_turbo,
    draw_wan,
    generator_of,
    oobleck_lengths,
)
from .network import BANDS
from .spec import TensorSpec
from .writer import save_tensors

_MARKER = "miniature.json"
_HEADS = 24
_MOE_HEADS = 12


@dataclass(frozen=True)
class MiniatureSize:
    """Dimensions of a miniature. Strides, latent channels and head counts are always the released ones.

    hidden_size: of the preview transformer, 24 heads; a multiple of 192. layers: of it; the first has weights for each
    modality, the others have experts. experts: of each of the 12 MoE heads. text_width: of the text encoder's features.
    refiner_hidden: 8 heads with 4 key/value heads. wan_width, turbo_width, oobleck_width: the narrowest layer of each.
    """

    hidden_size: int = 384
    layers: int = 3
    experts: int = 16
    expert_width: int = 64
    text_width: int = 64
    text_layers: int = 6
    text_merges: int = 768
    refiner_hidden: int = 64
    refiner_layers: int = 2
    wan_width: int = 8
    turbo_width: int = 8
    oobleck_width: int = 8

    def preview(self) -> PreviewConfig:
        """Architecture of the preview transformer."""
        moe = MoeConfig(
            num_heads=_MOE_HEADS,
            num_experts=self.experts,
            moe_layers=tuple(range(1, self.layers)),
            expert_intermediate_size=self.expert_width,
            shared_expert_intermediate_size=self.expert_width,
            modality_specific_expert_intermediate_size=self.expert_width,
        )
        return PreviewConfig(
            num_layers=self.layers,
            hidden_size=self.hidden_size,
            head_dim=self.hidden_size // _HEADS,
            num_query_groups=_HEADS,
            text_in_channels=self.text_width,
            intermediate_factor=1,
            mm_layers=(0,),
            moe=moe,
        )

    def refiner(self) -> RefinerConfig:
        """Architecture of the refiner."""
        return RefinerConfig(
            num_layers=self.refiner_layers,
            hidden_size=self.refiner_hidden,
            head_dim=self.refiner_hidden // 8,
            num_query_groups=4,
            text_in_channels=self.text_width,
            mm_layers=(0,),
        )

    def text(self, vocabulary: int) -> TextEncoderConfig:
        """Sizes of the text encoder."""
        return TextEncoderConfig(
            num_hidden_layers=self.text_layers,
            hidden_size=self.text_width,
            intermediate_size=3 * self.text_width // 2,
            vocab_size=vocabulary,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        )

    def check(self) -> None:
        """RequestError for sizes that no model can have."""
        for name, value in asdict(self).items():
            if value < 1:
                raise RequestError(f"{name} of a miniature is {value}; it must be 1 or more.")
        for name, value, part in (("hidden_size", self.hidden_size, 192), ("refiner_hidden", self.refiner_hidden, 64)):
            if value % part:
                raise RequestError(f"{name} of a miniature is {value}; it must be a multiple of {part}.")
        if self.layers < 2 or self.text_layers < 3:
            raise RequestError("A miniature needs 2 layers or more, and 3 text layers or more, of which 1 is run.")
        if self.experts < 6:
            raise RequestError(f"experts of a miniature is {self.experts}; it must be 6 or more: 6 are chosen.")


def write_miniature(
    root: Path | str,
    seed: int = 0,
    size: MiniatureSize = MiniatureSize(),
    *,
    only: Iterable[str] = place.FOLDERS,
    events: Events = SILENT,
) -> Path:
    """Write a miniature checkpoint to the folder `root`, which must not exist or be empty; return its path.

    `only` names the sub-folders to write. Where the same miniature already stands nothing is done. The same arguments
    give the same bytes. Raises RequestError if the folder cannot be taken or written.
    """
    size.check()
    root = Path(root).expanduser().absolute()
    only = [name for name in place.FOLDERS if name in set(only)]
    marker = {"seed": seed, "folders": only, **asdict(size)}
    if _is_done(root, marker):
        return root
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=root.parent, prefix=f".{root.name}."))
    except OSError as error:
        raise RequestError(f"{root} cannot be written: {error.strerror or error}.") from error
    try:
        _write_configs(partial, size)
        for done, name in enumerate(only):
            events.check()
            (partial / name).mkdir()
            _WRITERS[name](partial / name, seed, size)
            events.progress("write miniature", done + 1, len(only))
        write_json(partial / _MARKER, marker)
        partial.chmod(0o755)
        partial.replace(root)
    except OSError as error:
        raise RequestError(f"{root} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return root


def _is_done(root: Path, marker: dict[str, Any]) -> bool:
    """Whether the same miniature stands at `root`; RequestError if something else does."""
    if not root.exists():
        return False
    try:
        if json.loads((root / _MARKER).read_text(encoding="utf-8")) == json.loads(json.dumps(marker)):
            return True
        found = "holds another miniature"
    except (OSError, ValueError):
        if root.is_dir() and not any(root.iterdir()):
            return False
        found = "is not empty"
    raise RequestError(f"{root} {found}; name a folder that does not exist, or remove this one.")


def _write_configs(root: Path, size: MiniatureSize) -> None:
    """The two architecture files, in the released form (10 §1, 50 §2)."""
    preview, refiner = asdict(size.preview()), asdict(size.refiner())
    moe = preview.pop("moe") | {"score_func": "sigmoid"}
    for arch in (preview, refiner):
        arch["params_dtype"] = str(arch["params_dtype"]).removeprefix("torch.")
        arch["activation_type"] = "swiglu7"
    preview |= {
        "attn_gating": {"enable": True},
        "attn_sinks": {"enable": True, "sink_token_num": preview.pop("sink_token_num")},
        "mhc_config": {"enable": True, "num_stream": preview.pop("num_stream"), "alpha_init": 0.01},
        "moe_config": moe,
    }
    refiner["enable_attn_gating"] = True
    write_json(root / "magi2_preview.json", {"arch_config": preview})
    write_json(root / "magi2_refiner.json", {"arch_config": refiner})


def _write_preview(folder: Path, seed: int, size: MiniatureSize) -> None:
    _write_shards(folder, preview_tensors(size.preview()), seed, draw_transformer, shards=3)


def _write_refiner(folder: Path, seed: int, size: MiniatureSize) -> None:
    _write_shards(folder, refiner_tensors(size.refiner()), seed, draw_transformer, shards=3)


def _write_text(folder: Path, seed: int, size: MiniatureSize) -> None:
    config = size.text(write_tokenizer(folder, size.text_merges))
    write_text_config(folder, config)
    table = text_encoder_tensors(config, 0) | _specs(text_extra_shapes(config.hidden_size, config.vocab_size))
    # A release keeps these few in fp32 (30 §2).
    for key, spec in table.items():
        if key.endswith(("linear_attn.A_log", "linear_attn.norm.weight")):
            table[key] = replace(spec, dtype=torch.float32)
    _write_shards(folder, table, seed, draw_text, shards=2)


def _write_wan(folder: Path, seed: int, size: MiniatureSize) -> None:
    table = wan_encoder_tensors(WanEncoderConfig(dim=size.wan_width))
    table |= _specs(wan_decoder_shapes(size.wan_width), torch.float32)
    _save_pickle(_draw_all(table, seed, draw_wan, torch.float32), folder / place.WAN_FILE)


def _write_turbo(folder: Path, seed: int, size: MiniatureSize) -> None:
    widths = [size.turbo_width * factor for factor in (1, 2, 4, 8)]
    config = _TURBO | {"decoder_block_out_channels": widths}
    write_json(folder / place.TURBO_CONFIG, config)
    table = {TURBO_PREFIX + key: spec for key, spec in turbo_decoder_tensors(TurboConfig.from_json(config)).items()}
    table |= _specs(turbo_training_shapes(tuple(widths)))
    tensors = _draw_all(table, seed, draw_turbo, torch.float32)
    checkpoint = {
        "global_step": 1000,
        "ema_state_dict": {f"module.{key}": tensor for key, tensor in tensors.items()},
        # What training would go on from: not what is used (40 §4.2).
        "state_dict": {"module.decoder.conv_out.conv.bias": torch.zeros(table["decoder.conv_out.conv.bias"].shape)},
        "optimizer_states": [{"state": {0: {"step": 1000}}, "param_groups": [{"lr": 1e-4, "params": [0]}]}],
    }
    _save_pickle(checkpoint, folder / place.TURBO_FILE)


def _write_stable_audio(folder: Path, seed: int, size: MiniatureSize) -> None:
    config = _stable_audio_config(size.oobleck_width)
    write_json(folder / "model_config.json", config)
    decoder = oobleck_decoder_tensors(OobleckConfig.from_json(config))
    table = {OOBLECK_PREFIX + key: spec for key, spec in decoder.items()}
    table |= _specs(stable_audio_extra_shapes(size.oobleck_width), torch.float32)
    tensors = _draw_all(table, seed, draw_oobleck, torch.float32)
    oobleck_lengths(tensors, OOBLECK_PREFIX, decoder)
    save_tensors(tensors, folder / SINGLE_NAME)


_WRITERS = {
    place.PREVIEW: _write_preview,
    place.REFINER: _write_refiner,
    place.TEXT_ENCODER: _write_text,
    place.WAN: _write_wan,
    place.TURBO: _write_turbo,
    place.STABLE_AUDIO: _write_stable_audio,
}

# The released configuration of the Turbo decoder but for its widths (40 §4.1).
_TURBO: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 48,
    "decoder_layers_per_block": [2, 2, 2, 3, 3],
    "decoder_spatio_temporal_scaling": [False, True, True, True],
    "decoder_spatio_only": [False, True, False, False],
    "decoder_is_dw_conv": [False] * 5,
    "decoder_dw_kernel_size": 5,
    "decoder_causal": False,
    "patch_size": 2,
    "patch_size_t": 1,
    "use_unpatchify": True,
    "resnet_norm_eps": 1e-6,
    "scaling_factor": 1.0,
    "spatial_compression_ratio": 16,
    "temporal_compression_ratio": 4,
    "first_chunk_size": 7,
    "step_size": 7,
    "aligned_feature_projection_mode": "conv-2layer",
    "aligned_feature_projection_dim": [[512, 1024], [512, 1024]],
    "aligned_blks_indices": [0, 1],
}


def _stable_audio_config(channels: int) -> dict[str, Any]:
    """The released configuration of Stable Audio Open but for its widths (40 §5.1)."""
    shared = {"channels": channels, "c_mults": [1, 2, 4, 8, 16], "strides": [2, 4, 4, 8, 8], "use_snake": True}
    pretransform = {
        "encoder": {"type": "oobleck", "config": {"in_channels": 2, "latent_dim": 128, **shared}},
        "decoder": {
            "type": "oobleck",
            "config": {"out_channels": 2, "latent_dim": 64, "final_tanh": False, **shared},
        },
        "bottleneck": {"type": "vae"},
        "latent_dim": 64,
        "downsampling_ratio": 2048,
        "io_channels": 2,
    }
    return {
        "model_type": "diffusion_cond",
        "sample_rate": 44100,
        "audio_channels": 2,
        "model": {"pretransform": {"type": "autoencoder", "iterate_batch": True, "config": pretransform}},
    }


def _specs(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> dict[str, TensorSpec]:
    return {key: TensorSpec(shape, dtype) for key, shape in shapes.items()}


def _draw(key: str, spec: TensorSpec, seed: int, draw: Draw) -> Tensor:
    if key == BANDS:
        return rotary_bands(8 * spec.shape[0])
    return draw(key, spec.shape, generator_of(seed, f"{draw.__name__} {key}")).to(spec.dtype)


def _draw_all(table: Mapping[str, TensorSpec], seed: int, draw: Draw, dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: _draw(key, replace(spec, dtype=dtype), seed, draw) for key, spec in table.items()}


def _write_shards(folder: Path, table: Mapping[str, TensorSpec], seed: int, draw: Draw, shards: int) -> None:
    """Write a table as `shards` files of about equal size with their index; one shard is in memory at a time."""
    sizes = {key: prod(spec.shape) * spec.dtype.itemsize for key, spec in table.items()}
    total, before = sum(sizes.values()), 0
    parts: list[list[str]] = [[] for _ in range(shards)]
    for key, size in sizes.items():
        parts[min(shards - 1, before * shards // total)].append(key)
        before += size
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(parts):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_tensors({key: _draw(key, table[key], seed, draw) for key in keys}, folder / name)
        weight_map |= dict.fromkeys(keys, name)
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _save_pickle(content: dict[str, Any], path: Path) -> None:
    # torch.save by itself answers a full disk with a RuntimeError that does not name it.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(buffer.getbuffer())
