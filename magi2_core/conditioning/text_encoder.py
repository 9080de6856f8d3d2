"""The text encoder: Qwen3.5's residual stream two layers below the top, un-normed (30 §4).

Only the layers below that point exist here, and only the embedding rows of the used tokens are ever read. The layers
come from the disk one at a time, each applied to every prompt and let go again (30 §12): 50 GB that are needed once for
a prompt have no place beside the model.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..checkpoint.folder import text_network
from ..checkpoint.index import read_json
from ..checkpoint.loader import load_tensors
from ..checkpoint.problem import refuse
from ..checkpoint.reader import TensorReader
from ..errors import CheckpointError, MissingDependencyError, RequestError
from ..events import Events
from .parameters import PREFIX, SKIPPED_LAYERS, TextEncoderConfig, text_section
from .tokenizer import SPLIT_CLASS, TOKEN_LIMIT, PromptTokenizer

logger = logging.getLogger("magi2")

STAGE = "encode_text"


class TextEncoder:
    """One text encoder folder, opened: tokenizer and checked tensor table.

    Opening reads only the files' headers and the tokenizer. `width` is the hidden size that the transformer expects.
    """

    def __init__(
        self,
        folder: Path,
        *,
        width: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        skipped_layers: int = SKIPPED_LAYERS,
    ) -> None:
        """CheckpointError if the folder does not hold a fitting encoder, MissingDependencyError without its classes."""
        config_json = read_json(folder / "config.json")
        self.config = TextEncoderConfig.from_json(config_json)
        _check_width(self.config, width)
        self.network = text_network(folder, self.config, skipped_layers)
        refuse(self.network.problems, f"The text encoder in {folder}")
        self.tokenizer = PromptTokenizer(folder)
        self.device = torch.device(device)
        self.dtype = dtype
        self.layers = self.config.num_hidden_layers - skipped_layers
        self._qwen = _Qwen(text_section(config_json))
        self.identity = _identity(folder, self, skipped_layers)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[Sequence[int]], events: Events) -> list[Tensor]:
        """Encode each prompt's token ids by itself, never padded together (30 §4.4).

        Returns one [L, D] tensor a prompt, in the encoder's dtype, on the CPU. `events.check` runs between layers.
        RequestError for a prompt without tokens.
        """
        if any(not ids for ids in prompts):
            raise RequestError("The prompt is empty: it has no text that could be encoded.")
        with self.network.open() as reader, _without_advice():
            streams = [self._embed(reader, ids) for ids in prompts]
            ropes = [self._qwen.rope(x_1LD) for x_1LD in streams]
            for index in range(self.layers):
                events.check()
                layer = self._read_layer(reader, index)
                # No mask and no cache: the attention is causal by itself, and there is no padding to hide (30 §4.1).
                streams = [
                    layer(x_1LD, position_embeddings=rope, attention_mask=None)
                    for x_1LD, rope in zip(streams, ropes, strict=True)
                ]
                del layer  # before the next one is read: there is never more than one
                events.progress(STAGE, index + 1, self.layers)
        return [x_1LD[0].cpu() for x_1LD in streams]

    def _embed(self, reader: TensorReader, ids: Sequence[int]) -> Tensor:
        """Embedding rows [1, L, D] of the ids, each distinct row read once from the disk (30 §12)."""
        key = f"{PREFIX}embed_tokens.weight"
        rows = {token: row for row, token in enumerate(sorted(set(ids)))}
        if max(rows) >= self.config.vocab_size:
            raise CheckpointError(
                f"The tokenizer gave token {max(rows)}, but the text encoder has {self.config.vocab_size} embeddings:"
                " the tokenizer files belong to another model."
            )
        table_VD = torch.empty(len(rows), self.config.hidden_size, dtype=self.network.entries[key].dtype)
        for token, row in rows.items():
            whole = (slice(token, token + 1), slice(0, self.config.hidden_size))
            reader.read(key, whole, table_VD[row : row + 1])
        x_LD = table_VD[torch.tensor([rows[token] for token in ids])]
        return x_LD[None].to(self.device, self.dtype)

    def _read_layer(self, reader: TensorReader, index: int) -> nn.Module:
        """Read one layer from the disk to the device, every tensor in the compute dtype (30 §4.3)."""
        layer = self._qwen.layer(index)
        prefix = f"{PREFIX}layers.{index}."
        dtypes = {prefix + name: self.dtype for name in layer.state_dict()}
        weights = load_tensors(self.network, reader, dtypes, device=self.device)
        layer.load_state_dict({key.removeprefix(prefix): x for key, x in weights.items()}, strict=True, assign=True)
        return layer


class _Qwen:
    """transformers' Qwen3.5 classes for one config: layers without weights, and the rotary table."""

    def __init__(self, text_config: Any) -> None:
        config_class, self._layer_class, rotary_class = _import_qwen()
        self._config = config_class(**{**text_config, "attn_implementation": "sdpa"})
        self._rotary = rotary_class(self._config)

    def layer(self, index: int) -> nn.Module:
        """Layer `index` on the meta device, for inference."""
        with torch.device("meta"):
            layer = cast(nn.Module, self._layer_class(self._config, index))
        return layer.eval().requires_grad_(False)

    def rope(self, x_1LD: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for positions 0 to L - 1, the same on all three rotary axes (30 §4.1)."""
        positions_31L = torch.arange(x_1LD.shape[1], device=x_1LD.device).expand(3, 1, -1)
        cos, sin = self._rotary.to(x_1LD.device)(x_1LD, positions_31L)
        return cos, sin


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keep transformers from advising to install kernels, for a text that takes seconds once."""
    advisor = logging.getLogger("transformers.integrations.hub_kernels")
    before = advisor.level
    advisor.setLevel(logging.ERROR)
    try:
        yield
    finally:
        advisor.setLevel(before)


def _import_qwen() -> tuple[Any, Any, Any]:
    """Config, layer and rotary classes of a transformers that is new enough; MissingDependencyError if it is broken."""
    try:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding
    except (ImportError, OSError, RuntimeError) as error:  # a broken neighbour package shows up here (30 §15)
        raise MissingDependencyError(
            f"transformers is installed, but its Qwen3.5 classes cannot be imported: {error}"
        ) from error
    return Qwen3_5TextConfig, Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding


def _check_width(config: TextEncoderConfig, width: int) -> None:
    if config.hidden_size != width:
        raise CheckpointError(
            f"The text encoder has hidden size {config.hidden_size}, but the transformer takes text features of width"
            f" {width} (text_in_channels). The released model uses Qwen3.5-27B, width 5120."
        )
    released = TextEncoderConfig()
    if width == released.hidden_size and config.num_hidden_layers != released.num_hidden_layers:
        logger.warning(
            "The text encoder has %d layers where Qwen3.5-27B has %d; the features may not fit the model.",
            config.num_hidden_layers,
            released.num_hidden_layers,
        )


def _identity(folder: Path, encoder: TextEncoder, skipped_layers: int) -> str:
    """What the features of a text depend on, as a hash: a part of every cache key (30 §12).

    Shards count by name, size and time of change: hashing 50 GB would take longer than encoding.
    """
    import transformers

    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        digest.update(file.read_bytes() if file.is_file() else b"absent")
    for file in sorted({entry.file for entry in encoder.network.entries.values()}):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    settings = (encoder.dtype, encoder.device.type, skipped_layers, TOKEN_LIMIT, SPLIT_CLASS, transformers.__version__)
    digest.update(repr(settings).encode())
    return digest.hexdigest()
