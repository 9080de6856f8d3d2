"""The prompt's tokens: Qwen's tokenizer behind one more splitter, exactly as the model was used (30 §3)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, MissingDependencyError, RequestError

TOKEN_LIMIT = 7000
OLDEST_TRANSFORMERS = (5, 2)  # Qwen3.5 came with it (30 §2)

# Every character of this class becomes a piece of its own before the tokenizer's own rules apply. It was meant to be
# "CJK", but the class that took effect also holds the digits, `:;<=>?@` and the letters A to U, and has no
# supplementary ideographs. The model knows prompts cut this way, so it must not be repaired (30 §3.1).
SPLIT_CLASS = "[0-U\u1100-\u11ff\u2e80-\ua4cf\ua840-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc]"


@dataclass(frozen=True)
class Tokens:
    """One prompt's token ids and their character intervals [start, end) in it, cut to the limit."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    untruncated: int

    @property
    def truncated(self) -> bool:
        return self.untruncated > len(self.ids)


class PromptTokenizer:
    """The tokenizer of a text encoder folder, with the extra splitter in front of its own (30 §3)."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer files; CheckpointError if they are absent or broken."""
        self._tokenizer = _load(folder)
        backend = self._tokenizer.backend_tokenizer
        backend.pre_tokenizer = with_extra_split(backend.pre_tokenizer)

    def __call__(self, text: str, limit: int = TOKEN_LIMIT) -> Tokens:
        """Cut `text` into at most `limit` tokens, keeping the first ones: no template, no added tokens (30 §3).

        Offsets count characters of `text` itself, before the tokenizer's NFC. RequestError for a lone surrogate.
        """
        try:
            encoded = self._tokenizer(text, return_offsets_mapping=True, verbose=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(
                "The prompt holds half of a surrogate pair, which is no character; retype the symbol next to it."
            ) from error
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        return Tokens(tuple(ids[:limit]), tuple((a, b) for a, b in offsets[:limit]), len(ids))

    @property
    def pre_tokenizer(self) -> Any:
        """Both splitters: the extra one and the tokenizer's own."""
        return self._tokenizer.backend_tokenizer.pre_tokenizer

    def pieces(self, tokens: Tokens) -> list[str]:
        """The tokens' spellings in the tokenizer's byte alphabet, for display."""
        return list(self._tokenizer.convert_ids_to_tokens(list(tokens.ids)))


def extra_split() -> Any:
    """The splitter alone: isolates every character of SPLIT_CLASS."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    return Split(Regex(SPLIT_CLASS), behavior="isolated")


def with_extra_split(own: Any) -> Any:
    """Put the extra splitter in front of a tokenizer's own pre-tokenizer, which may be None."""
    from tokenizers.pre_tokenizers import Sequence

    return Sequence([extra_split(), own] if own is not None else [extra_split()])


def _auto_tokenizer() -> Any:
    """transformers' class; MissingDependencyError when the package is absent, broken or too old for Qwen3.5 (30 §2)."""
    needed = ".".join(map(str, OLDEST_TRANSFORMERS))
    advice = f"Install it with: pip install 'transformers>={needed}'"
    try:
        import transformers
        from transformers import AutoTokenizer
    except (ImportError, OSError, RuntimeError) as error:  # a broken neighbour package shows up here (30 §15)
        raise MissingDependencyError(
            f"The text encoder needs the package transformers, version {needed} or newer, which cannot be imported"
            f" ({error}). {advice}"
        ) from error
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRANSFORMERS:
        raise MissingDependencyError(
            f"The text encoder needs transformers {needed} or newer for Qwen3.5, but version {version} is installed."
            f" {advice}"
        )
    return AutoTokenizer


def _load(folder: Path) -> Any:
    auto_tokenizer = _auto_tokenizer()
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(
            f"The text encoder folder {folder} has no tokenizer.json; copy the release's files there."
        )
    try:
        return auto_tokenizer.from_pretrained(str(folder), padding_side="right", local_files_only=True)
    except Exception as error:  # the library raises every kind of error for a broken file
        raise CheckpointError(f"The tokenizer files in {folder} cannot be used: {error}") from error
