"""Texts that come with the pack and that users may replace by a file of the same name in a folder of their own."""

from __future__ import annotations

from pathlib import Path

from ..errors import RequestError

PACKED = Path(__file__).parent / "texts"


def text_file(name: str, user_folder: Path | None = None) -> Path:
    """Where a text is read from: the user's file if there is one, otherwise the pack's."""
    if user_folder is not None and (user_folder / name).is_file():
        return user_folder / name
    return PACKED / name


def read_text(name: str, user_folder: Path | None = None) -> str:
    """The text `name`; RequestError if the user's file is not readable UTF-8."""
    file = text_file(name, user_folder)
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"The text {file} cannot be read as UTF-8: {error}.") from error
