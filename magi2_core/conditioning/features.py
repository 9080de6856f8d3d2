"""Text features kept by content, so that an unchanged prompt is not encoded again (30 §12)."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor


class FeatureCache:
    """Features [L, D] by encoder and normalised text, the most recently used ones up to a number of bytes."""

    def __init__(self, max_bytes: int = 512 << 20) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], Tensor] = OrderedDict()

    def get(self, identity: str, text: str) -> Tensor | None:
        """The features of a normalised text by the encoder of that identity, or None."""
        features_LD = self._entries.get((identity, text))
        if features_LD is not None:
            self._entries.move_to_end((identity, text))
        return features_LD

    def put(self, identity: str, text: str, features_LD: Tensor) -> None:
        """Remember features, and forget those that were used the longest ago if there is no room."""
        self._entries[identity, text] = features_LD
        self._entries.move_to_end((identity, text))
        while sum(entry.nbytes for entry in self._entries.values()) > self._max_bytes:
            self._entries.popitem(last=False)
