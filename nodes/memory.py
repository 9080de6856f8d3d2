"""ComfyUI's memory manager and our workers: each makes room for the other (60 §5)."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..stages.manager import PoolManager
from ..stages.values import Model
from .comfy import model_management

logger = logging.getLogger("magi2")

GIVE_UP = ("never", "when asked", "always")
# Reported instead of the true size, which no request under pressure can reach: so ComfyUI says how much it wants before
# it detaches, and an explicit unload (1e30 bytes) is told apart from pressure. With --disable-smart-memory it detaches
# every model at once and never asks.
LISTED_BYTES = 1 << 60


class MemoryBridge:
    """Lists the pool in ComfyUI's memory manager, so that /free and other models can reach it.

    `give_up` decides what happens when another model needs room: never give any, only on an explicit unload ("when
    asked"), or always.
    """

    def __init__(self, manager: PoolManager) -> None:
        self._manager = manager
        self._adapter: Any = None  # ComfyUI's list holds weak references, so this one must stay
        self._broken = False
        self.give_up = "when asked"

    def before_start(self, model: Model) -> None:
        """Move ComfyUI's own models off the GPUs that the workers are about to fill."""
        if any(device.startswith("cuda") for device in model.plan.devices):
            model_management.unload_all_models()
            model_management.soft_empty_cache()

    def before_job(self, model: Model) -> None:
        """List the running pool. A ComfyUI whose memory manager has changed only costs us the listing.

        The listing may move ComfyUI's own models, so it belongs into the thread in which nodes run.
        """
        if self._broken:
            return
        try:
            self._adapter = self._adapter or _make_adapter(self)
            model_management.load_models_gpu([self._adapter])
        except (AttributeError, TypeError, ImportError) as error:
            self._broken = True
            logger.warning(
                "This ComfyUI's memory manager is unknown (%s): its Unload Models does not reach the workers. Use the"
                " MAGI-2 panel or the MAGI-2 Unload Workers node.", error,
            )  # fmt: skip

    def asked_for(self, amount: float) -> float:
        """ComfyUI wants `amount` bytes under pressure; return how many it may count as free."""
        if self.give_up == "always":
            self._manager.stop()
        # claiming the amount keeps ComfyUI from detaching us after all
        return amount

    def unload(self) -> None:
        """An explicit unload of everything."""
        if self.give_up != "never":
            self._manager.stop()


def _make_adapter(bridge: MemoryBridge) -> Any:
    from comfy.model_patcher import ModelPatcher

    class PoolAdapter(ModelPatcher):
        """Stands for the workers in ComfyUI's list of loaded models; holds no weights itself."""

        def model_size(self) -> int:
            return LISTED_BYTES

        def loaded_size(self) -> int:
            return LISTED_BYTES

        def current_loaded_device(self) -> torch.device:
            return self.load_device

        def model_dtype(self) -> torch.dtype:
            return torch.bfloat16

        def model_patches_to(self, device: Any) -> None:
            pass

        def partially_load(self, device_to: Any, extra_memory: float = 0, *rest: Any, **options: Any) -> int:
            return 0

        def partially_unload(self, device_to: Any, memory_to_free: float = 0, *rest: Any, **options: Any) -> float:
            return bridge.asked_for(memory_to_free)

        def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
            if unpatch_all:  # False: ComfyUI only replaces one entry of its list by another
                bridge.unload()
            return self.model

    device = model_management.get_torch_device()
    return PoolAdapter(torch.nn.Module(), load_device=device, offload_device=torch.device("cpu"))
