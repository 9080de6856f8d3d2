"""Enhanced captions as Markdown: every field, in the layout that the model was used with (30 §9).

Not to be confused with the compact text (`compact.py`), which JSON typed as a prompt becomes.
"""

from __future__ import annotations

import json
from typing import Any

_DEEPEST_HEADING = 6
_BETWEEN = " | "


def render_markdown(caption: Any) -> str:
    """Render parsed JSON, key order kept; one final newline, or "" when nothing but empty values is left (30 §9)."""
    caption = _filter(caption)
    if _empty(caption):
        return ""
    lines: list[str] = []
    if isinstance(caption, dict):
        for key, value in caption.items():  # the root keeps its order, also between simple and complex children
            if lines:
                lines.append("")
            _emit(lines, key, value, 1)
    else:
        _emit(lines, None, caption, 1)
    return _clean(lines)


def _filter(value: Any) -> Any:
    """Drop null, blank strings and containers that are empty after filtering; keep 0 and false."""
    if isinstance(value, dict):
        return {key: kept for key, item in value.items() if not _empty(kept := _filter(item))}
    if isinstance(value, list):
        return [kept for item in value if not _empty(kept := _filter(item))]
    return value


def _empty(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, dict | list) and not value)


def _emit(lines: list[str], key: str | None, value: Any, level: int) -> None:
    if isinstance(value, dict):
        if key is not None:
            lines += [_heading(level, key), ""]
            level += 1
        _fields(lines, value, level)
    elif isinstance(value, list) and not (key is not None and _simple(value)):
        _array(lines, key, value, level)
    else:
        text = _BETWEEN.join(map(_scalar, value)) if isinstance(value, list) else _scalar(value)
        lines.append(text if key is None else f"{key}:{text}")


def _array(lines: list[str], key: str | None, values: list[Any], level: int) -> None:
    if key is not None:
        lines += [_heading(level, key), ""]
    for number, value in enumerate(values, 1):
        title = f"{'item' if key is None else key}{number}"
        if isinstance(value, dict):
            lines += [_heading(level + 1, title), ""]
            _fields(lines, value, level + 2)
            lines.append("")
        elif isinstance(value, list):
            lines += [_heading(level + 1, title), ""]
            _emit(lines, None, value, level + 2)  # its own titles come one level deeper again (30 §9)
        else:
            lines.append(f"{title}:{_scalar(value)}")


def _fields(lines: list[str], fields: dict[str, Any], level: int) -> None:
    simple = [item for item in fields.items() if _simple(item[1])]
    complex_ = [item for item in fields.items() if not _simple(item[1])]
    for position, (key, value) in enumerate(simple + complex_):
        # A blank line before every container, also before a list that takes a single line.
        if position and isinstance(value, dict | list) and lines and lines[-1]:
            lines.append("")
        _emit(lines, key, value, level)


def _simple(value: Any) -> bool:
    if isinstance(value, list):
        return not any(isinstance(item, dict | list) for item in value)
    return not isinstance(value, dict)


def _heading(level: int, title: str) -> str:
    return f"{'#' * level} {title}" if level <= _DEEPEST_HEADING else f"*{title}*"


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value.replace("\r\n", "\\n").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return json.dumps(value)


def _clean(lines: list[str]) -> str:
    kept: list[str] = []
    for line in lines:
        line = line.rstrip()
        if line or (kept and kept[-1]):
            kept.append(line)
    while kept and not kept[-1]:
        kept.pop()
    return "\n".join(kept) + "\n" if kept else ""
