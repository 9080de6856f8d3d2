"""Node types of `comfy_api.latest`: the arguments that 0.3.64 knows, and its checks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from types import SimpleNamespace
from typing import Any


class Input:
    io_type = "*"

    def __init__(
        self,
        id: str,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        extra_dict: dict[str, Any] | None = None,
    ) -> None:
        self.id, self.display_name, self.optional = id, display_name, optional
        self.tooltip, self.lazy = tooltip, lazy
        self.extra: dict[str, Any] = dict(extra_dict or {})


class Output:
    io_type = "*"

    def __init__(
        self,
        id: str | None = None,
        display_name: str | None = None,
        tooltip: str | None = None,
        is_output_list: bool = False,
    ) -> None:
        self.id, self.display_name, self.tooltip, self.is_output_list = id, display_name, tooltip, is_output_list


class BooleanInput(Input):
    io_type = "BOOLEAN"

    def __init__(
        self, id, display_name=None, optional=False, tooltip=None, lazy=None, default=None, label_on=None,
        label_off=None, socketless=None, force_input=None,
    ):  # fmt: skip
        extra = {"default": default, "label_on": label_on, "label_off": label_off, "socketless": socketless}
        super().__init__(id, display_name, optional, tooltip, lazy, extra | {"forceInput": force_input})


class IntInput(Input):
    io_type = "INT"

    def __init__(
        self, id, display_name=None, optional=False, tooltip=None, lazy=None, default=None, min=None, max=None,
        step=None, control_after_generate=None, display_mode=None, socketless=None, force_input=None,
    ):  # fmt: skip
        extra = {"default": default, "min": min, "max": max, "step": step, "socketless": socketless}
        extra |= {"control_after_generate": control_after_generate, "display": display_mode, "forceInput": force_input}
        super().__init__(id, display_name, optional, tooltip, lazy, extra)


class FloatInput(Input):
    io_type = "FLOAT"

    def __init__(
        self, id, display_name=None, optional=False, tooltip=None, lazy=None, default=None, min=None, max=None,
        step=None, round=None, display_mode=None, socketless=None, force_input=None,
    ):  # fmt: skip
        extra = {"default": default, "min": min, "max": max, "step": step, "round": round, "display": display_mode}
        extra |= {"socketless": socketless, "forceInput": force_input}
        super().__init__(id, display_name, optional, tooltip, lazy, extra)


class StringInput(Input):
    io_type = "STRING"

    def __init__(
        self, id, display_name=None, optional=False, tooltip=None, lazy=None, multiline=False, placeholder=None,
        default=None, dynamic_prompts=None, socketless=None, force_input=None,
    ):  # fmt: skip
        extra = {"default": default, "multiline": multiline, "placeholder": placeholder, "socketless": socketless}
        extra |= {"dynamicPrompts": dynamic_prompts, "forceInput": force_input}
        super().__init__(id, display_name, optional, tooltip, lazy, extra)


class ComboInput(Input):
    io_type = "COMBO"

    def __init__(
        self, id, options=None, display_name=None, optional=False, tooltip=None, lazy=None, default=None,
        control_after_generate=None, upload=None, image_folder=None, remote=None, socketless=None,
    ):  # fmt: skip
        extra = {"default": default, "options": options, "control_after_generate": control_after_generate}
        extra |= {"upload": upload, "image_folder": image_folder, "remote": remote, "socketless": socketless}
        super().__init__(id, display_name, optional, tooltip, lazy, extra)


def custom(io_type: str) -> Any:
    """`io.Custom`: a type of its own with an Input and an Output."""
    made_input = type(f"{io_type}Input", (Input,), {"io_type": io_type})
    made_output = type(f"{io_type}Output", (Output,), {"io_type": io_type})
    return SimpleNamespace(Input=made_input, Output=made_output, io_type=io_type)


def _widget(io_type: str, made_input: type[Input]) -> Any:
    return SimpleNamespace(Input=made_input, Output=type(f"{io_type}Output", (Output,), {"io_type": io_type}))


class Hidden(str, Enum):  # noqa: UP042  (as in ComfyUI: its str() differs from StrEnum)
    unique_id = "UNIQUE_ID"
    prompt = "PROMPT"
    extra_pnginfo = "EXTRA_PNGINFO"


@dataclass
class Schema:
    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: list[Input] | None = None
    outputs: list[Output] | None = None
    hidden: list[Hidden] | None = None
    description: str = ""
    is_input_list: bool = False
    is_output_node: bool = False
    is_deprecated: bool = False
    is_experimental: bool = False
    is_api_node: bool = False
    not_idempotent: bool = False
    enable_expand: bool = False

    def check(self) -> None:
        """0.3.64 wants all input and output ids distinct, also between the two lists (60 §2)."""
        for index, output in enumerate(self.outputs or []):
            output.id = output.id or f"_{index}_{output.io_type}_"
        ids = Counter(slot.id for slot in [*(self.inputs or []), *(self.outputs or [])])
        double = [name for name, count in ids.items() if count > 1]
        if double:
            raise ValueError(f"ids of {self.node_id} are not unique: {double}")


class NodeOutput:
    def __init__(self, *args: Any, ui: Any = None, expand: Any = None, block_execution: str | None = None) -> None:
        self.args, self.ui, self.expand, self.block_execution = args, ui, expand, block_execution


class _Locked(type):
    """0.3.64 runs nodes on a clone of the class that refuses assignments."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if cls.__dict__.get("_locked"):
            raise AttributeError(f"Cannot set attribute {name!r} on a node class while it runs")
        super().__setattr__(name, value)


class ComfyNode(metaclass=_Locked):
    hidden: Any = None

    @classmethod
    def GET_SCHEMA(cls) -> Schema:
        for name in ("define_schema", "execute"):
            if not isinstance(cls.__dict__.get(name), classmethod):
                raise TypeError(f"{cls.__name__}.{name} must be a class method of its own")
        schema = cls.define_schema()
        if not isinstance(schema, Schema):
            raise TypeError(f"define_schema of {cls.__name__} must return a Schema")
        schema.check()
        return schema

    @classmethod
    def PREPARE_CLASS_CLONE(cls, hidden: dict[str, Any]) -> Any:
        asked = {entry.name: hidden.get(entry.value) for entry in _hidden_of(cls.GET_SCHEMA())}
        clone = type(cls.__name__, (cls,), {"hidden": _Hidden(asked)})
        type.__setattr__(clone, "_locked", True)
        return clone

    @classmethod
    def EXECUTE_NORMALIZED(cls, **inputs: Any) -> NodeOutput:
        returned = cls.execute(**inputs)
        if returned is None:
            return NodeOutput()
        if isinstance(returned, tuple):
            return NodeOutput(*returned)
        if not isinstance(returned, NodeOutput):
            raise TypeError(f"Invalid return type from node: {type(returned)}")
        return returned


class _Hidden(SimpleNamespace):
    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(**values)

    def __getattr__(self, name: str) -> None:
        return None


def _hidden_of(schema: Schema) -> list[Hidden]:
    asked = list(schema.hidden or [])
    if schema.is_output_node:
        asked += [Hidden.prompt, Hidden.extra_pnginfo]
    return asked


class ComfyExtension:
    async def get_node_list(self) -> list[type[ComfyNode]]:
        raise NotImplementedError


class PreviewText:
    def __init__(self, value: str) -> None:
        self.value = value

    def as_dict(self) -> dict[str, Any]:
        return {"text": (self.value,)}


@dataclass
class VideoComponents:
    images: Any
    frame_rate: Fraction
    audio: Any = None
    metadata: Any = field(default=None)


class VideoFromComponents:
    def __init__(self, components: VideoComponents) -> None:
        assert isinstance(components.frame_rate, Fraction), "frame_rate must be a Fraction (60 §3)"
        self._components = components

    def get_components(self) -> VideoComponents:
        return self._components

    def save_to(self, path: Any, format: Any = "auto", codec: Any = "auto", metadata: Any = None) -> None:
        self.saved = (path, format, codec, metadata)


class VideoFromFile:
    def __init__(self, file: str) -> None:
        self._file = file

    def get_stream_source(self) -> str:
        return self._file


ui = SimpleNamespace(PreviewText=PreviewText)
io = SimpleNamespace(
    Schema=Schema,
    ComfyNode=ComfyNode,
    NodeOutput=NodeOutput,
    Hidden=Hidden,
    Custom=custom,
    Boolean=_widget("BOOLEAN", BooleanInput),
    Int=_widget("INT", IntInput),
    Float=_widget("FLOAT", FloatInput),
    String=_widget("STRING", StringInput),
    Combo=_widget("COMBO", ComboInput),
    Image=custom("IMAGE"),
    Audio=custom("AUDIO"),
    Video=custom("VIDEO"),
    Latent=custom("LATENT"),
    AnyType=custom("*"),
)
