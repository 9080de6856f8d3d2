"""Magi2LoadCheckpoint: choose a checkpoint and how it runs on this machine."""

from __future__ import annotations

from typing import Any

from ..magi2_core.errors import RequestError, check_choice
from ..magi2_core.memory.plan import DTYPES, RESIDENCIES
from ..stages.checkpoint import checkpoint_identity, load_checkpoint, parse_devices
from ..stages.folders import resolve_checkpoint
from .checks import first_sentence, sentence_of
from .comfy import ModelType, advanced, checkpoints, folders, io, schema, show_text, ui


class Magi2LoadCheckpoint(io.ComfyNode):
    """Plans; loads nothing. The workers start, and read the weights, when a later node first needs them."""

    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2LoadCheckpoint",
            display_name="MAGI-2 Load Checkpoint",
            category="MAGI-2",
            description=(
                "Chooses a MAGI-2 Preview checkpoint and plans how it divides over your devices. Shows how much memory"
                " each rank needs and has, before anything is loaded."
            ),
            search_aliases=["magi", "magi2", "sand ai"],
            inputs=[
                io.Combo.Input(
                    "checkpoint",
                    options=checkpoints(),
                    tooltip="A folder in models/magi2 that holds preview/, text_encoder/, turbo_vae/ and the others.",
                ),
                io.String.Input(
                    "devices",
                    default="auto",
                    optional=True,
                    tooltip="auto: every GPU (or what the server's MAGI2_DEVICES names). Or a list such as 0,1 or cpu"
                    " or 2xcpu. One worker process runs on each.",
                ),
                advanced(
                    io.String.Input,
                    "layout",
                    default="auto",
                    optional=True,
                    tooltip="How the model divides over the devices: auto, or for instance sp4, tp2sp2, cfg2.",
                ),
                advanced(
                    io.Combo.Input,
                    "dtype",
                    options=list(DTYPES),
                    default=DTYPES[0],
                    optional=True,
                    tooltip="Number format of the transformer. bfloat16 is what it was made for; float32 needs twice"
                    " the memory.",
                ),
                io.Combo.Input(
                    "residency",
                    options=list(RESIDENCIES),
                    default=RESIDENCIES[0],
                    optional=True,
                    tooltip="keep: encoders and decoders stay on the device beside the transformer. swap: one network"
                    " at a time, slower but smaller. auto: keep where there is room.",
                ),
                advanced(
                    io.Boolean.Input,
                    "start_anyway",
                    default=False,
                    optional=True,
                    tooltip="Go on even if the plan says that the memory is too small.",
                ),
                advanced(
                    io.Combo.Input,
                    "refiner_residual",
                    options=list(DTYPES),
                    default="float32",
                    optional=True,
                    tooltip="Number format between the layers of the second stage. bfloat16 saves memory at 1080p and"
                    " loses some precision.",
                ),
            ],
            outputs=[
                ModelType.Output(display_name="model", tooltip="Which checkpoint runs how, for all other nodes."),
                io.String.Output(display_name="plan", tooltip="The plan in words: ranks, layout, bytes per rank."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls,
        checkpoint: str | None = None,
        devices: str | None = None,
        layout: str | None = None,
        dtype: str | None = None,
        residency: str | None = None,
        refiner_residual: str | None = None,
    ) -> bool | str:
        return first_sentence(
            sentence_of(_check_checkpoint, checkpoint),
            sentence_of(parse_devices, devices),
            sentence_of(_check_layout, layout),
            sentence_of(lambda value: check_choice("dtype", value, DTYPES), dtype),
            sentence_of(lambda value: check_choice("residency", value, RESIDENCIES), residency),
            sentence_of(lambda value: check_choice("refiner_residual", value, DTYPES), refiner_residual),
        )

    @classmethod
    def fingerprint_inputs(cls, checkpoint: str | None = None, **others: Any) -> Any:
        if checkpoint is None:  # linked: the node that gives it is part of the key
            return None
        try:
            return checkpoint_identity(resolve_checkpoint(checkpoint, folders()))
        except RequestError:
            return checkpoint

    @classmethod
    def execute(
        cls,
        checkpoint: str,
        devices: str = "auto",
        layout: str = "auto",
        dtype: str = "bfloat16",
        residency: str = "auto",
        start_anyway: bool = False,
        refiner_residual: str = "float32",
    ) -> Any:
        model = load_checkpoint(
            checkpoint, devices, layout, dtype, residency, start_anyway, refiner_residual, folders=folders()
        )
        text = model.plan.describe()
        show_text(text, cls.hidden.unique_id)
        return io.NodeOutput(model, text, ui=ui.PreviewText(text))


def _check_checkpoint(name: str) -> None:
    resolve_checkpoint(name, folders())


def _check_layout(layout: str) -> None:
    from ..distributed.layout import ParallelLayout

    if layout.strip() != "auto":
        ParallelLayout.parse(layout.strip())
