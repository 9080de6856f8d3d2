"""A structured caption from a form, for people who would rather fill in fields than write JSON (30 §8)."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import RequestError
from ..sampling.geometry import SECONDS
from .caption_lines import Segment, Speech, read_dialogue, read_rows, read_timeline, starts_at
from .captions import AliveSubjectStatic, ObjectStatic, T2VEnhanceResult, TimelineSegment, blank
from .markdown import render_markdown

Form = Literal["compact", "markdown"]

# Where the fields that are one text each stand in a caption.
_PLACES = {
    "context": ("global_layer", "context"),
    "description": ("global_layer", "description"),
    "style": ("global_layer", "aesthetics", "style"),
    "mood": ("global_layer", "aesthetics", "mood_atmosphere"),
    "colors": ("global_layer", "aesthetics", "color_scheme"),
    "ambience": ("global_layer", "audio_baseline", "ambience"),
    "language": ("global_layer", "audio_baseline", "dialogue", "language"),
    "light": ("global_layer", "lighting_baseline", "conditions"),
    "setting": ("global_layer", "environment_baseline", "background_setting"),
    "camera": ("global_layer", "camera_cinematography", "overall_camera_style"),
    "aspect_ratio": ("global_layer", "video_metadata", "aspect_ratio"),
}
_SUBJECTS = ("global_layer", "alive_subjects_static")
_OBJECTS = ("global_layer", "objects_static")
_SPEAKERS = ("global_layer", "audio_baseline", "dialogue", "speaker_tags")
_VIDEO = ("global_layer", "video_metadata")
_TIMELINE = ("dynamic_layer", "timeline_segments")


@dataclass(frozen=True)
class CaptionForm:
    """What a person fills in; every field may be empty, but not all of them.

    subjects: one a line, `description | clothing | position`; they become <subject 1>, <subject 2>, ...
    objects: one a line, `description | shape and colour | position`; they become <object 1>, ...
    timeline: one segment a line, `0-5 what happens`; without times the ten seconds are divided evenly.
    dialogue: one line of speech a line, `3-4.5 <subject 1>: the words | how it is said`; the times may be left out.
    """

    context: str = ""
    description: str = ""
    subjects: str = ""
    objects: str = ""
    timeline: str = ""
    dialogue: str = ""
    language: str = ""
    ambience: str = ""
    style: str = ""
    mood: str = ""
    colors: str = ""
    camera: str = ""
    light: str = ""
    setting: str = ""
    aspect_ratio: str = ""

    @property
    def empty(self) -> bool:
        return not any(text.strip() for text in vars(self).values())


def compose_caption(form: CaptionForm) -> dict[str, Any]:
    """Build a text-to-video caption with all its fields; RequestError for lines that cannot be understood."""
    shown = (form.context, form.description, form.subjects, form.objects, form.timeline, form.dialogue)
    if not any(text.strip() for text in shown):
        raise RequestError("The caption is empty; fill in at least a context, a description or a timeline.")
    caption = blank(T2VEnhanceResult)
    _put(caption, _VIDEO, {"duration": SECONDS, "aspect_ratio": "16:9"})
    return lay_over(form, caption)


def lay_over(form: CaptionForm, caption: dict[str, Any]) -> dict[str, Any]:
    """Lay the fields that are filled in over a text-to-video caption, which stays as it is where they are empty.

    Subjects, objects and segments are replaced as a whole; lines of speech go to the segments in which they start,
    the caption's own ones too if only the timeline is new. RequestError for lines that cannot be understood, and for
    a caption in which an object stands where another thing should.
    """
    caption, segments = copy.deepcopy(caption), read_timeline(form.timeline)
    for name, path in _PLACES.items():
        if text := getattr(form, name).strip():
            _put(caption, path, text)
    if rows := read_rows(form.subjects):
        _put(caption, _SUBJECTS, [_subject(number, row) for number, row in enumerate(rows, 1)])
    if rows := read_rows(form.objects):
        _put(caption, _OBJECTS, [_object(number, row) for number, row in enumerate(rows, 1)])
    there = _get(caption, _SUBJECTS)
    spoken = read_dialogue(form.dialogue, len(there) if isinstance(there, list) else 0)
    if spoken:
        _put(caption, _SPEAKERS, list(dict.fromkeys(line["speaker"] for _, line in spoken)))
    if segments or spoken:
        lines = spoken or _speech(_timeline(caption))
        if segments or not _timeline(caption):
            whole = [Segment(0.0, SECONDS, "")]
            _put(caption, _TIMELINE, [_timeline_segment(segment) for segment in segments or whole])
        _lay_speech(_timeline(caption), lines)
    return caption


def caption_prompt(caption: dict[str, Any], form: Form) -> str:
    """The prompt that a caption becomes: JSON, of which the encoder sees the compact form, or Markdown (30 §1)."""
    return render_markdown(caption) if form == "markdown" else json.dumps(caption, ensure_ascii=False, indent=2)


def _subject(number: int, row: list[str]) -> dict[str, Any]:
    made = blank(AliveSubjectStatic) | {
        "subject_id": f"<subject {number}>", "description": row[0], "position": row[2]
    }  # fmt: skip
    made["visual_attributes"]["clothing"] = row[1]
    return made


def _object(number: int, row: list[str]) -> dict[str, Any]:
    return blank(ObjectStatic) | {
        "object_id": f"<object {number}>", "description": row[0], "shape_and_color": row[1], "position": row[2]
    }  # fmt: skip


def _timeline_segment(segment: Segment) -> dict[str, Any]:
    made = blank(TimelineSegment)
    made["segment_basic_info"] |= {"timestamp_range": segment.timestamp, "segment_description": segment.text}
    return made


def _get(caption: Any, path: Sequence[str]) -> Any:
    for key in path:
        caption = caption.get(key) if isinstance(caption, dict) else None
    return caption


def _put(caption: dict[str, Any], path: Sequence[str], value: Any) -> None:
    at = caption
    for depth, key in enumerate(path[:-1], 1):
        if at.get(key) is None:
            at[key] = {}
        at = at[key]
        if not isinstance(at, dict):
            raise RequestError(f"{'.'.join(path[:depth])} of the caption is not an object; correct the caption there.")
    at[path[-1]] = value


def _timeline(caption: dict[str, Any]) -> list[dict[str, Any]]:
    segments = _get(caption, _TIMELINE)
    return [segment for segment in segments if isinstance(segment, dict)] if isinstance(segments, list) else []


def _speech(segments: Sequence[dict[str, Any]]) -> list[Speech]:
    """A caption's own lines of speech, each with its start, or its segment's."""
    lines = []
    for segment in segments:
        found = _get(segment, ("audio", "dialogue_lines"))
        for line in found if isinstance(found, list) else []:
            if isinstance(line, dict):
                start = starts_at(line.get("timestamp"))
                lines.append((_segment_start(segment) if start is None else start, line))
    return lines


def _lay_speech(segments: Sequence[dict[str, Any]], lines: Sequence[Speech]) -> None:
    """Put each line into the last segment that has begun when it starts, the first for a line without a time, and
    remove what was there."""
    for segment in segments:
        _put(segment, ("audio", "dialogue_lines"), [])
    for start, line in lines:
        begun = [each for each in segments if start is not None and (_segment_start(each) or 0.0) <= start]
        (begun[-1] if begun else segments[0])["audio"]["dialogue_lines"].append(line)


def _segment_start(segment: dict[str, Any]) -> float | None:
    return starts_at(_get(segment, ("segment_basic_info", "timestamp_range")))
