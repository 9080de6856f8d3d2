"""Both prompts to features: everything about the text that sampling needs (30 §4.4, 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..events import Events
from .features import FeatureCache
from .markers import pool_markers
from .prompt import prepare_negative, prepare_prompt
from .text_encoder import TextEncoder


@dataclass(frozen=True)
class TextConditioning:
    """The text side of one request, all tensors on the CPU in the encoder's dtype (bf16).

    features_LD: the prompt. null_features_LD: the negative prompt, [0, D] if it is empty.
    markers_MD: one vector for each picture, in the order of the request's figures.
    prompt: the normalised text that was encoded. tokens: how many it is; truncated: whether that is the limit.
    """

    features_LD: Tensor
    null_features_LD: Tensor
    markers_MD: Tensor
    prompt: str
    tokens: int
    truncated: bool
    warnings: tuple[str, ...]


def encode_text(
    encoder: TextEncoder,
    prompt: str,
    negative: str,
    figures: Sequence[int],
    events: Events,
    *,
    cache: FeatureCache | None = None,
) -> TextConditioning:
    """Encode a prompt and its negative, and pool the vectors of its pictures (30 §1).

    `figures` are the picture numbers in processing order (`markers.picture_order`), empty for text alone. An empty
    negative prompt means no text tokens in that branch. Raises RequestError for a prompt that cannot be encoded.
    """
    positive = prepare_prompt(prompt, encoder.tokenizer, figures)
    null = prepare_negative(negative, encoder.tokenizer)
    warnings = positive.warnings + null.warnings
    for warning in warnings:
        events.log(warning)
    wanted = {text.text: text.tokens.ids for text in (positive, null) if text.tokens.ids}
    features = _features(encoder, wanted, events, cache)
    features_LD = features[positive.text]
    return TextConditioning(
        features_LD=features_LD,
        null_features_LD=features[null.text] if null.tokens.ids else features_LD.new_zeros(0, features_LD.shape[1]),
        markers_MD=pool_markers(features_LD, positive.text, positive.tokens, figures),
        prompt=positive.text,
        tokens=len(positive.tokens.ids),
        truncated=positive.tokens.truncated,
        warnings=warnings,
    )


def _features(
    encoder: TextEncoder, wanted: dict[str, tuple[int, ...]], events: Events, cache: FeatureCache | None
) -> dict[str, Tensor]:
    """Features of each text, from the cache or from one pass over the layers for all that it lacks."""
    found = {}
    if cache is not None:
        found = {text: hit for text in wanted if (hit := cache.get(encoder.identity, text)) is not None}
    missing = [text for text in wanted if text not in found]
    if missing:
        for text, features in zip(missing, encoder.encode([wanted[t] for t in missing], events), strict=True):
            found[text] = features
            if cache is not None:
                cache.put(encoder.identity, text, features)
    return found
