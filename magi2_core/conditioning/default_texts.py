"""Texts that users may replace: the instructions for enhancement and the default negative prompt.

A file of the same name in the user's own folder takes the place of the one that comes with the pack.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import RequestError
from .caption_answer import PROMPT_PLACE
from .captions import Task

INSTRUCTIONS: dict[Task, str] = {"t2v": "enhance_t2v.md", "i2v": "enhance_i2v.md"}
NEGATIVE_PROMPT = "negative_prompt.txt"


def instruction(task: Task, user_folder: Path | None = None) -> str:
    """The instruction template of a task; RequestError if it has no place for the user's prompt."""
    file = text_file(INSTRUCTIONS[task], user_folder)
    text = _read(file)
    if PROMPT_PLACE not in text:
        raise RequestError(f"The instruction text {file} must hold {PROMPT_PLACE} where the user's prompt belongs.")
    return text


def negative_prompt(user_folder: Path | None = None) -> str:
    """The default negative prompt (30 §7)."""
    return _read(text_file(NEGATIVE_PROMPT, user_folder)).strip()


def text_file(name: str, user_folder: Path | None = None) -> Path:
    """Where a text is read from: the user's file if there is one, otherwise the pack's."""
    if user_folder is not None and (user_folder / name).is_file():
        return user_folder / name
    return Path(__file__).parent / "texts" / name


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"The text {file} cannot be read as UTF-8: {error}.") from error
