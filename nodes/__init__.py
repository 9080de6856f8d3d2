"""The nodes. One file each; everything that they take from ComfyUI comes through `comfy.py`."""

from __future__ import annotations

from typing import Any


def extension() -> Any:
    """What ComfyUI asks the pack for: its nodes. Also makes the model folder and the routes known (60 §7, §11)."""
    from ..stages.manager import manager
    from .caption import Magi2Caption
    from .comfy import ComfyExtension, comfyui_root, register_model_folder, send, server
    from .decode import Magi2Decode
    from .encode_prompt import Magi2EncodePrompt
    from .enhance_prompt import Magi2EnhancePrompt
    from .image_conditioning import Magi2ImageConditioning
    from .join_latent import Magi2JoinLatent
    from .load_checkpoint import Magi2LoadCheckpoint
    from .load_latent import Magi2LoadLatent
    from .memory import MemoryBridge
    from .refine import Magi2Refine
    from .routes import public_status, register_routes
    from .sampler import Magi2Sampler
    from .sampler_options import Magi2SamplerOptions
    from .save_latent import Magi2SaveLatent
    from .split_latent import Magi2SplitLatent
    from .unload_workers import Magi2UnloadWorkers

    register_model_folder()
    manager.hidden_paths = comfyui_root()
    bridge = MemoryBridge(manager)
    manager.before_start, manager.before_job = bridge.before_start, bridge.before_job
    manager.changed = lambda: send("magi2.status", public_status(manager, bridge))
    register_routes(server(), manager, bridge)

    nodes = [
        Magi2LoadCheckpoint,
        Magi2EnhancePrompt,
        Magi2Caption,
        Magi2EncodePrompt,
        Magi2ImageConditioning,
        Magi2Sampler,
        Magi2SamplerOptions,
        Magi2Refine,
        Magi2Decode,
        Magi2SplitLatent,
        Magi2JoinLatent,
        Magi2SaveLatent,
        Magi2LoadLatent,
        Magi2UnloadWorkers,
    ]

    class Magi2Extension(ComfyExtension):
        async def get_node_list(self) -> list[Any]:
            return nodes

    return Magi2Extension()
