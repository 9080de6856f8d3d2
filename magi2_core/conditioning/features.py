"""Text features kept by content, so that an unchanged prompt is not encoded again (30 §12)."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections import OrderedDict
from pathlib import Path

from torch import Tensor

logger = logging.getLogger("magi2")

_KEY = "features"


class FeatureCache:
    """Features [L, D] by text and encoder, the most recently used ones up to a number of bytes.

    With a `folder`, features put with `keep` are also written there and outlive the process: meant for the negative
    prompt, which hardly ever changes. The newest `kept_files` stay.
    """

    def __init__(self, max_bytes: int = 512 << 20, folder: Path | None = None, kept_files: int = 8) -> None:
        self._max_bytes = max_bytes
        self._folder = folder
        self._kept_files = kept_files
        self._entries: OrderedDict[str, Tensor] = OrderedDict()

    def get(self, identity: str, text: str) -> Tensor | None:
        """The features of a normalised text by the encoder of that identity, or None."""
        key = _key(identity, text)
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        features = self._read(key)
        if features is not None:
            self._remember(key, features)
        return features

    def put(self, identity: str, text: str, features_LD: Tensor, *, keep: bool = False) -> None:
        """Remember features; `keep` also writes them to the folder, if there is one."""
        key = _key(identity, text)
        self._remember(key, features_LD)
        if keep and self._folder is not None:
            self._write(self._folder, key, features_LD)

    def clear(self) -> None:
        """Forget what is in memory; files stay."""
        self._entries.clear()

    def _remember(self, key: str, features: Tensor) -> None:
        self._entries[key] = features
        self._entries.move_to_end(key)
        while sum(entry.nbytes for entry in self._entries.values()) > self._max_bytes:
            self._entries.popitem(last=False)

    def _read(self, key: str) -> Tensor | None:
        from safetensors.torch import load_file

        if self._folder is None or not (file := self._folder / f"{key}.safetensors").is_file():
            return None
        try:
            return load_file(file)[_KEY]
        except Exception as error:  # a damaged file only costs the time to encode again
            logger.warning("The kept text features in %s cannot be read and are made again: %s", file, error)
            return None

    def _write(self, folder: Path, key: str, features: Tensor) -> None:
        """Write through a temporary file, so that no reader ever sees half of one."""
        from safetensors.torch import save

        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
                part.write(save({_KEY: features.contiguous()}))
            os.replace(part.name, folder / f"{key}.safetensors")
            files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime, reverse=True)
            for old in files[self._kept_files :]:
                old.unlink()
        except OSError as error:
            logger.warning("The text features could not be kept in %s: %s", folder, error)


def _key(identity: str, text: str) -> str:
    return hashlib.sha256(f"{identity}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()
