"""The default negative prompt: what a clip should look, sound and speak like least (30 §7)."""

from __future__ import annotations

from pathlib import Path

from .user_texts import read_text

NEGATIVE_PROMPT_FILE = "negative_prompt.txt"


def default_negative_prompt(user_folder: Path | None = None) -> str:
    """The text of `negative_prompt.txt`: the user's if their folder has one, otherwise the pack's."""
    return read_text(NEGATIVE_PROMPT_FILE, user_folder).strip()
