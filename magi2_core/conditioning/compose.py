"""A structured caption from plain lines, for people who would rather fill in a form than write JSON (30 §8)."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import RequestError
from ..sampling.geometry import SECONDS
from .captions import (
    Aesthetics,
    AliveSubjectStatic,
    AudioBaseline,
    CameraCinematography,
    CameraDelta,
    CameraMovement,
    Dialogue,
    DialogueLine,
    DynamicLayer,
    EnvironmentBaseline,
    GlobalLayer,
    LightingBaseline,
    ObjectStatic,
    SegmentAudio,
    SegmentBasicInfo,
    T2VEnhanceResult,
    TimelineSegment,
    VideoMetadata,
    VisualAttributes,
)
from .markdown import render_markdown

ASPECT_RATIO = "16:9"
Form = Literal["compact", "markdown"]

_TIME = r"(?:\d+:)?\d+(?:\.\d+)?"
_TIMED = re.compile(rf"^({_TIME})\s*(?:s\s*)?[-–]\s*({_TIME})\s*(?:s\b)?\s*:?\s+(.*)$")
_SPOKEN = re.compile(r"^(.{1,40}?)\s*[:：]\s*(.*)$")
_SUBJECT = re.compile(r"^<?\s*subject\s+(\d+)\s*>?$", re.IGNORECASE)

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


# A line of speech in a caption, and when it starts; None without a time.
_Line = tuple[float | None, dict[str, Any]]


@dataclass(frozen=True)
class _Segment:
    start: float
    end: float
    text: str


def compose_caption(form: CaptionForm) -> dict[str, Any]:
    """Build a text-to-video caption with all its fields; RequestError for lines that cannot be understood."""
    subjects, objects = _rows(form.subjects), _rows(form.objects)
    segments = _segments(form.timeline)
    spoken = [_spoken(line, len(subjects)) for line in _lines(form.dialogue)]
    if not any((form.context.strip(), form.description.strip(), subjects, objects, segments, spoken)):
        raise RequestError("The caption is empty; fill in at least a context, a description or a timeline.")
    return _compose(form, subjects, objects, segments, spoken)


def lay_over(form: CaptionForm, caption: dict[str, Any]) -> dict[str, Any]:
    """Lay the fields that are filled in over a text-to-video caption, which stays as it is where they are empty.

    Subjects, objects and segments are replaced as a whole; lines of speech go to the segments in which they start,
    the caption's own ones too if only the timeline is new. RequestError for lines that cannot be understood, and for
    a caption in which an object stands where another thing should.
    """
    caption = copy.deepcopy(caption)
    subjects, objects = _rows(form.subjects), _rows(form.objects)
    there = _get(caption, _SUBJECTS)
    known = len(subjects) if subjects else len(there) if isinstance(there, list) else 0
    segments = _segments(form.timeline)
    spoken = [_spoken(line, known) for line in _lines(form.dialogue)]
    made = _compose(form, subjects, objects, segments, spoken)
    filled = [path for name, path in _PLACES.items() if getattr(form, name).strip()]
    filled += [path for path, rows in ((_SUBJECTS, subjects), (_OBJECTS, objects), (_SPEAKERS, spoken)) if rows]
    if segments or spoken:
        lines = spoken or _speech(_timeline(caption))
        if segments or not _timeline(caption):
            _put(caption, _TIMELINE, _get(made, _TIMELINE))
        _lay_speech(_timeline(caption), lines)
    for path in filled:
        _put(caption, path, _get(made, path))
    return caption


def _compose(
    form: CaptionForm,
    subjects: Sequence[list[str]],
    objects: Sequence[list[str]],
    segments: Sequence[_Segment],
    spoken: Sequence[_Line],
) -> dict[str, Any]:
    if spoken and not segments:
        segments = [_Segment(0.0, SECONDS, "")]
    layer = GlobalLayer(
        context=form.context.strip(),
        description=form.description.strip(),
        aesthetics=Aesthetics(
            style=form.style.strip(),
            contrast="",
            saturation="",
            color_scheme=form.colors.strip(),
            mood_atmosphere=form.mood.strip(),
        ),
        audio_baseline=AudioBaseline(
            ambience=form.ambience.strip(),
            dialogue=Dialogue(
                language=form.language.strip(), speaker_tags=list(dict.fromkeys(line["speaker"] for _, line in spoken))
            ),
        ),
        objects_static=[_object(number, row) for number, row in enumerate(objects, 1)],
        video_metadata=VideoMetadata(duration=SECONDS, aspect_ratio=form.aspect_ratio.strip() or ASPECT_RATIO),
        lighting_baseline=LightingBaseline(
            conditions=form.light.strip(), direction="", shadows="", source_consistency=""
        ),
        environment_baseline=EnvironmentBaseline(background_setting=form.setting.strip()),
        alive_subjects_static=[_subject(number, row) for number, row in enumerate(subjects, 1)],
        camera_cinematography=CameraCinematography(overall_camera_style=form.camera.strip(), default_depth_of_field=""),
    )
    dynamic = DynamicLayer(timeline_segments=[_timeline_segment(segment) for segment in segments])
    caption = T2VEnhanceResult(global_layer=layer, dynamic_layer=dynamic).model_dump()
    _lay_speech(_timeline(caption), spoken)
    return caption


def caption_prompt(caption: dict[str, Any], form: Form) -> str:
    """The prompt that a caption becomes: JSON, of which the encoder sees the compact form, or Markdown (30 §1)."""
    return render_markdown(caption) if form == "markdown" else json.dumps(caption, ensure_ascii=False, indent=2)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _rows(text: str) -> list[list[str]]:
    """Each line's three parts between bars, missing ones empty."""
    return [([part.strip() for part in line.split("|")] + ["", ""])[:3] for line in _lines(text)]


def _subject(number: int, row: list[str]) -> AliveSubjectStatic:
    looks = VisualAttributes(
        gender="", ethnicity="", age_group="", facial_features="", clothing=row[1], appearance_details=""
    )
    return AliveSubjectStatic(
        subject_id=f"<subject {number}>", description=row[0], position=row[2], orientation="", visual_attributes=looks
    )


def _object(number: int, row: list[str]) -> ObjectStatic:
    return ObjectStatic(
        object_id=f"<object {number}>",
        description=row[0],
        shape_and_color=row[1],
        texture="",
        relative_size="",
        position=row[2],
        orientation="",
    )


def _segments(text: str) -> list[_Segment]:
    lines = _lines(text)
    timed = [_TIMED.match(line) for line in lines]
    if not any(timed):
        return [
            _Segment(round(SECONDS * i / len(lines), 1), round(SECONDS * (i + 1) / len(lines), 1), line)
            for i, line in enumerate(lines)
        ]
    segments: list[_Segment] = []
    for line, match in zip(lines, timed, strict=True):
        if match is None:
            raise RequestError(
                f"The timeline line {line!r} has no time while others have one; write it like '2.5-5 what happens'."
            )
        start, end = _interval(match, line)
        if segments and start < segments[-1].end:
            raise RequestError(
                f"The timeline line {line!r} starts before the line above it ends ({_clock(segments[-1].end)});"
                " the lines follow each other."
            )
        segments.append(_Segment(start, end, match[3].strip()))
    return segments


def _spoken(line: str, subjects: int) -> _Line:
    timed = _TIMED.match(line)
    interval = _interval(timed, line) if timed else None
    match = _SPOKEN.match(timed[3] if timed else line)
    if match is None:
        raise RequestError(f"The dialogue line {line!r} names no speaker; write it like '<subject 1>: the words'.")
    speaker = match[1].strip()
    if subject := _SUBJECT.match(speaker):
        if not 1 <= int(subject[1]) <= subjects:
            raise RequestError(f"The dialogue line {line!r} is spoken by {speaker}, but there are {subjects} subjects.")
        speaker = f"<subject {int(subject[1])}>"
    text, _, delivery = match[2].partition("|")
    when = f"{_clock(interval[0])}-{_clock(interval[1])}" if interval else ""
    spoken = DialogueLine(timestamp=when, speaker=speaker, text=text.strip(), delivery=delivery.strip())
    return _start(when), spoken.model_dump()


def _interval(match: re.Match[str], line: str) -> tuple[float, float]:
    start, end = _seconds(match[1]), _seconds(match[2])
    if not 0 <= start < end <= SECONDS:
        raise RequestError(f"The time of the line {line!r} must lie between 0 and {SECONDS:g} seconds and go forward.")
    return start, end


def _seconds(time: str) -> float:
    minutes, _, seconds = time.rpartition(":")
    return 60 * float(minutes or 0) + float(seconds)


def _clock(seconds: float) -> str:
    """Seconds in the captions' spelling, MM:SS.s (30 §10.1)."""
    tenths = round(seconds * 10)
    return f"{tenths // 600:02d}:{tenths // 10 % 60:02d}.{tenths % 10}"


def _timeline_segment(segment: _Segment) -> TimelineSegment:
    still = CameraMovement(type="", direction="", intensity="")
    return TimelineSegment(
        segment_basic_info=SegmentBasicInfo(
            timestamp_range=f"{_clock(segment.start)}-{_clock(segment.end)}",
            segment_description=segment.text,
            active_background="",
            camera_delta=CameraDelta(focus="", camera_position="", composition="", camera_movement=still),
        ),
        objects=[],
        alive_subjects=[],
        text_render=[],
        causal_events=[],
        audio=SegmentAudio(dialogue_lines=[], ambience_deltas=[], special_audio_events=[]),
    )


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


def _speech(segments: Sequence[dict[str, Any]]) -> list[_Line]:
    """A caption's own lines of speech, each with its start, or its segment's."""
    lines = []
    for segment in segments:
        found = _get(segment, ("audio", "dialogue_lines"))
        for line in found if isinstance(found, list) else []:
            if isinstance(line, dict):
                start = _start(line.get("timestamp"))
                lines.append((_segment_start(segment) if start is None else start, line))
    return lines


def _lay_speech(segments: Sequence[dict[str, Any]], lines: Sequence[_Line]) -> None:
    """Put each line into the last segment that has begun when it starts, the first for a line without a time, and
    remove what was there."""
    for segment in segments:
        _put(segment, ("audio", "dialogue_lines"), [])
    for start, line in lines:
        begun = [each for each in segments if start is not None and (_segment_start(each) or 0.0) <= start]
        (begun[-1] if begun else segments[0])["audio"]["dialogue_lines"].append(line)


def _segment_start(segment: dict[str, Any]) -> float | None:
    return _start(_get(segment, ("segment_basic_info", "timestamp_range")))


def _start(timestamp: Any) -> float | None:
    """The first time in a time stamp, in seconds; None if there is none."""
    found = re.search(_TIME, timestamp) if isinstance(timestamp, str) else None
    return _seconds(found.group()) if found else None
