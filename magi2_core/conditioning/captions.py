"""Structured captions: the fields that the model was trained on, as typed schemas (30 §8)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

Task = Literal["t2v", "i2v"]


class _Part(BaseModel):
    """An object of a caption. Every field is required in the JSON schema; those with a default may be left out."""

    model_config = ConfigDict(extra="forbid", strict=True)


# --- text to video -----------------------------------------------------------------------------------------------


class Aesthetics(_Part):
    style: str
    contrast: str
    saturation: str
    color_scheme: str
    visual_effects: str = ""
    mood_atmosphere: str


class Dialogue(_Part):
    language: str
    speaker_tags: list[str]


class AudioBaseline(_Part):
    ambience: str
    dialogue: Dialogue


class ObjectStatic(_Part):
    object_id: str
    description: str
    shape_and_color: str
    texture: str
    relative_size: str
    position: str
    orientation: str


class VideoMetadata(_Part):
    duration: float
    aspect_ratio: str


class LightingBaseline(_Part):
    conditions: str
    direction: str
    shadows: str
    source_consistency: str


class EnvironmentBaseline(_Part):
    background_setting: str


class VisualAttributes(_Part):
    gender: str
    ethnicity: str
    age_group: str
    facial_features: str
    clothing: str
    appearance_details: str


class AliveSubjectStatic(_Part):
    subject_id: str
    description: str
    position: str
    orientation: str
    visual_attributes: VisualAttributes


class CameraCinematography(_Part):
    overall_camera_style: str
    default_depth_of_field: str
    lens_focal_length: str = ""


class GlobalLayer(_Part):
    context: str
    description: str
    aesthetics: Aesthetics
    audio_baseline: AudioBaseline
    objects_static: list[ObjectStatic]
    video_metadata: VideoMetadata
    lighting_baseline: LightingBaseline
    environment_baseline: EnvironmentBaseline
    alive_subjects_static: list[AliveSubjectStatic]
    camera_cinematography: CameraCinematography


class CameraMovement(_Part):
    type: str
    direction: str
    intensity: str


class CameraDelta(_Part):
    focus: str
    camera_position: str
    composition: str
    camera_movement: CameraMovement


class SegmentBasicInfo(_Part):
    timestamp_range: str
    segment_description: str
    active_background: str
    lighting_delta: str = ""
    camera_delta: CameraDelta


class SpatialPosition(_Part):
    location: str
    relative_size: str
    orientation: str


class DynamicState(_Part):
    state_change: str
    motion_detail: str
    visible_condition: str = ""


class SegmentObject(_Part):
    object_id: str
    timestamp: str
    number_of_objects: int
    dynamic_state: DynamicState
    spatial_position: SpatialPosition


class Action(_Part):
    primary_action: str
    body_configuration: str
    motion_detail: str
    interaction: str
    facial_expression: str


class SegmentSubject(_Part):
    subject_id: str
    timestamp: str
    number_of_subjects: int
    spatial_position: SpatialPosition
    action: Action


class TextRender(_Part):
    text: str
    timestamp: str
    location: str
    size: str
    color: str
    font: str
    appearance_details: str


class CausalEvent(_Part):
    event_id: str
    timestamp_range: str
    trigger: str
    effect_outcome: str
    physics: str = ""


class DialogueLine(_Part):
    timestamp: str
    speaker: str
    text: str
    delivery: str


class AmbienceDelta(_Part):
    timestamp_range: str
    ambience: str


class SpecialAudioEvent(_Part):
    timestamp: str
    sound_description: str
    visual_sync: str


class SegmentAudio(_Part):
    dialogue_lines: list[DialogueLine]
    ambience_deltas: list[AmbienceDelta]
    special_audio_events: list[SpecialAudioEvent]


class TimelineSegment(_Part):
    segment_basic_info: SegmentBasicInfo
    objects: list[SegmentObject]
    alive_subjects: list[SegmentSubject]
    text_render: list[TextRender]
    causal_events: list[CausalEvent]
    audio: SegmentAudio


class DynamicLayer(_Part):
    timeline_segments: list[TimelineSegment]


class T2VEnhanceResult(_Part):
    """A text-to-video caption: what stays (`global_layer`) and what happens (`dynamic_layer`)."""

    global_layer: GlobalLayer
    dynamic_layer: DynamicLayer


# --- image to video ----------------------------------------------------------------------------------------------


class GlobalCaption(_Part):
    core_caption: str
    format_and_structure: str
    narrative_and_emotional_design: str
    visual_design: str
    audio_design: str
    continuity_requirements: list[str]


class Reference(_Part):
    reference_identifier: str
    reference_type: str
    label: str
    role: str
    description: str
    appearance_or_design: str


class Shot(_Part):
    shot_identifier: str
    time_range_seconds: list[float]
    scene_reference_identifier: str
    shot_caption: str
    camera_lighting_and_composition: str
    motion_and_physical_logic: str
    reference_identifiers: list[str]
    audio_event_identifiers: list[str]


class AudioEvent(_Part):
    audio_event_identifier: str
    event_type: str
    time_range_seconds: list[float]
    source_reference_identifier: str
    audio_caption: str
    spoken_text: str
    synchronization_note: str


class VisibleText(_Part):
    visible_text_identifier: str
    text: str
    time_range_seconds: list[float]
    position_and_role: str
    source_reference_identifier: str


class I2VEnhanceResult(_Part):
    """An image-to-video caption: the picture as it is, and the shots, sounds and text that follow from it."""

    global_caption: GlobalCaption
    reference_bank: list[Reference]
    shot_timeline: list[Shot]
    audio_event_timeline: list[AudioEvent]
    visible_text: list[VisibleText]
    generation_requirements: list[str]


CAPTIONS: dict[Task, type[BaseModel]] = {"t2v": T2VEnhanceResult, "i2v": I2VEnhanceResult}

_JSON_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number"}


def response_schema(task: Task) -> dict[str, Any]:
    """The strict JSON schema of a caption, without references: all properties required, no others allowed (30 §8)."""
    return _object_schema(CAPTIONS[task])


def caption_problems(task: Task, caption: Any) -> list[str]:
    """What is wrong with a parsed caption, one line a fault with its path; [] if it fits the schema."""
    try:
        CAPTIONS[task].model_validate(caption)
    except ValidationError as error:
        return [f"{'.'.join(map(str, fault['loc'])) or 'the answer'}: {fault['msg']}" for fault in error.errors()]
    return []


def blank(part: type[BaseModel]) -> dict[str, Any]:
    """A caption, or a part of one, with all its fields and nothing in them."""
    return {name: _nothing(field.annotation) for name, field in part.model_fields.items()}


def _nothing(annotation: Any) -> Any:
    if annotation in _JSON_TYPES:
        return annotation()
    return blank(annotation) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _object_schema(part: type[BaseModel]) -> dict[str, Any]:
    properties = {name: _schema(field.annotation) for name, field in part.model_fields.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _schema(annotation: Any) -> dict[str, Any]:
    if annotation in _JSON_TYPES:
        return {"type": _JSON_TYPES[annotation]}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _object_schema(annotation)
    (item,) = annotation.__args__
    return {"type": "array", "items": _schema(item)}
