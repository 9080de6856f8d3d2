"""Captions in JSON as the encoder sees them: the compact text (30 §6).

A prompt that is a JSON object with a `global_layer` is rendered to a few labelled lines; every other prompt stays as
it is. Not to be confused with the Markdown of enhanced prompts (`markdown.py`), which keeps all fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_ATTRIBUTES = ("gender", "age_group", "ethnicity", "clothing", "appearance_details")


def normalise(prompt: str) -> str:
    """Turn a prompt into the exact string that is tokenised (30 §6)."""
    try:
        value = json.loads(prompt)
    except (ValueError, RecursionError):
        return prompt
    if not isinstance(value, dict | list):
        return prompt
    try:
        compact = _render(value)
    except (TypeError, RecursionError):  # a number where the renderer iterates: used as it is (30 §6, step 3)
        return prompt
    return prompt if compact is None else compact


def _render(caption: Any) -> str | None:
    """The compact text, or None for anything without a `global_layer` after stripping.

    TypeError if a number or `true` stands where a list is iterated.
    """
    caption = _strip(caption)
    if not isinstance(caption, dict) or "global_layer" not in caption:
        return None
    whole, dynamic = _obj(caption["global_layer"]), _obj(caption.get("dynamic_layer"))
    lines = [
        *_context(whole),
        *_aesthetics(_obj(whole.get("aesthetics"))),
        *_audio(_obj(whole.get("audio_baseline"))),
        *_subjects(whole.get("alive_subjects_static")),
        *_objects(whole.get("objects_static")),
        *_timeline(dynamic.get("timeline_segments")),
        *_references(caption.get("reference_layer")),
    ]
    return "\n".join(line for line in lines if line.strip())


def _strip(value: Any) -> Any:
    """Remove null, [] and {} from objects after stripping their values, and null from arrays (30 §6.1)."""
    if isinstance(value, dict):
        stripped = {key: _strip(item) for key, item in value.items()}
        return {key: item for key, item in stripped.items() if not _void(item)}
    if isinstance(value, list):
        return [_strip(item) for item in value if item is not None]
    return value


def _void(value: Any) -> bool:
    return value is None or (isinstance(value, dict | list) and not value)


def _one(value: Any) -> str:
    """A value as one line of text: Python's spelling, whitespace collapsed (30 §6.2)."""
    return "" if value is None else " ".join(str(value).split())


def _obj(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects_of(values: Iterable[Any] | None) -> Iterable[dict[str, Any]]:
    """The objects among `values`, which is iterated whatever it is; TypeError for a number (30 §6.3)."""
    return [item for item in values or () if isinstance(item, dict)]


def _present(source: dict[str, Any], *keys: str) -> list[str]:
    return [text for key in keys if (text := _one(source.get(key)))]


def _labelled(source: dict[str, Any], **labels: str) -> list[str]:
    return [f"{label}={text}" for label, key in labels.items() if (text := _one(source.get(key)))]


def _context(whole: dict[str, Any]) -> list[str]:
    context, description = _one(whole.get("context")), _one(whole.get("description"))
    if not context and not description:
        return []
    return [f"context: {context}" if context else "context", description]


def _aesthetics(aesthetics: dict[str, Any]) -> list[str]:
    parts = _labelled(aesthetics, style="style", mood="mood_atmosphere", color="color_scheme")
    return [f"aesthetics: {'; '.join(parts)}"] if parts else []


def _audio(audio: dict[str, Any]) -> list[str]:
    dialogue = _obj(audio.get("dialogue"))
    parts = _labelled(dialogue, language="language")
    if "speaker_tags" in dialogue:
        tags = dialogue["speaker_tags"]
        parts.append("speakers=" + ",".join(_one(tag) for tag in (tags if isinstance(tags, list) else [tags])))
    parts += _labelled(audio, ambience="ambience")
    return [f"audio: {'; '.join(parts)}"] if parts else []


def _subjects(subjects: Any) -> list[str]:
    if not isinstance(subjects, list) or not subjects:
        return []
    return ["subjects:", *(_subject(subject) for subject in _objects_of(subjects))]


def _subject(subject: dict[str, Any]) -> str:
    line = " - " + " | ".join(_present(subject, "subject_id", "description"))
    if place := _present(subject, "position", "orientation"):
        line += f" ({'; '.join(place)})"
    looks = _obj(subject.get("visual_attributes"))
    if attributes := [f"{k}={_one(looks[k])}" for k in _ATTRIBUTES if not _void(looks.get(k)) and _one(looks[k])]:
        line += f" :: {'; '.join(attributes)}"
    return line


def _objects(objects: Any) -> list[str]:
    if not isinstance(objects, list) or not objects:
        return []
    lines = ["objects:"]
    for thing in _objects_of(objects):
        line = " - " + " | ".join(_present(thing, "object_id", "description"))
        if looks := _present(thing, "shape_and_color", "position"):
            line += f" :: {'; '.join(looks)}"
        lines.append(line)
    return lines


def _timeline(segments: Any) -> list[str]:
    if not isinstance(segments, list) or not segments:
        return []
    lines = ["timeline:"]
    for segment in _objects_of(segments):
        lines += [_segment_head(_obj(segment.get("segment_basic_info"))), *_segment_rows(segment)]
    return lines


def _segment_head(basic: dict[str, Any]) -> str:
    return " ".join([" -", *_present(basic, "timestamp_range", "segment_description")]).rstrip()


def _segment_rows(segment: dict[str, Any]) -> list[str]:
    rows = []
    for line in _objects_of(_obj(segment.get("audio")).get("dialogue_lines")):
        speaker, text, time = (_one(line.get(key)) for key in ("speaker", "text", "timestamp"))
        if text:
            rows.append(f"   - dialogue{' ' if speaker else ''}{speaker}: {text}" + (f" ({time})" if time else ""))
    for subject in _objects_of(segment.get("alive_subjects")):
        action = _present(_obj(subject.get("action")), "primary_action", "interaction", "facial_expression")
        if action:
            rows.append(f"   - action {_one(subject.get('subject_id'))}: {'; '.join(action)}")
    for thing in _objects_of(segment.get("objects")):
        if state := _present(_obj(thing.get("dynamic_state")), "state_change", "motion_detail"):
            rows.append(f"   - objects {_one(thing.get('object_id'))}: {'; '.join(state)}")
    return rows


def _references(references: Any) -> list[str]:
    return [str(item) for item in references] if isinstance(references, list) else []
