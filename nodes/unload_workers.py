"""Magi2UnloadWorkers: give the memory of the workers back."""

from __future__ import annotations

from typing import Any

from ..magi2_core.errors import check_choice
from ..stages.manager import manager
from ..stages.unload import WHAT, free
from .checks import sentence_of
from .comfy import io, schema, ui


class Magi2UnloadWorkers(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2UnloadWorkers",
            display_name="MAGI-2 Unload Workers",
            category="MAGI-2",
            description=(
                "Frees what the worker processes hold, for the models of other nodes. The next MAGI-2 node loads again"
                " by itself."
            ),
            inputs=[
                io.Combo.Input(
                    "what",
                    options=list(WHAT),
                    default=WHAT[1],
                    tooltip="workers: end the processes, which frees everything. weights: keep the processes for a"
                    " quicker start.",
                ),
                io.AnyType.Input(
                    "after", optional=True, tooltip="Connect the result that should be finished first, for instance"
                    " the video of MAGI-2 Decode."
                ),
            ],
            outputs=[io.AnyType.Output(display_name="after", tooltip="What came in, unchanged.")],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, what: str | None = None) -> bool | str:
        return sentence_of(lambda value: check_choice("what", value, WHAT), what)

    @classmethod
    def fingerprint_inputs(cls, what: str, **others: Any) -> Any:
        # With a linked `after` the nodes before it say whether there was a run. A count in the key would never repeat,
        # because the nodes after it run, too.
        return None if "after" in others else manager.runs

    @classmethod
    def execute(cls, what: str, after: Any = None) -> Any:
        text = f"Freed the {what}." if free(what) else "There was nothing to free."
        return io.NodeOutput(after, ui=ui.PreviewText(text))
