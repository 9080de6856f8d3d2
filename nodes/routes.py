"""HTTP routes of the pack, for the status panel: /magi2/status, and POST routes that change the pool (60 §11)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from ..distributed.pool import PoolError
from ..magi2_core.errors import Magi2Error, RequestError
from ..magi2_core.files import parse_json
from ..stages.manager import PoolManager
from .comfy import server_folders, workflows_left
from .memory import GIVE_UP, MemoryBridge

PATIENCE_S = 2.0
MAX_BODY = 4096
MAX_IDLE_MINUTES = 24 * 60
# what looks like an absolute path, without spaces, and its last part
_PATH = re.compile(r"(?<![\w.-])(?:[A-Za-z]:)?(?:[/\\][^\s/\\:'\",;]+)+[/\\]([^\s/\\:'\",;]*)")


def register_routes(server: Any, manager: PoolManager, bridge: MemoryBridge) -> None:
    """Add the routes to a ComfyUI server; without one (tests, tools) do nothing."""
    if server is None:
        return
    from aiohttp import web

    routes = server.routes

    @routes.get("/magi2/status")
    async def status(request: Any) -> Any:
        return web.json_response(public_status(manager, bridge))

    def add(path: str, action: Callable[[dict[str, Any]], Any]) -> None:
        async def handle(request: Any) -> Any:
            refused = refusal(request.headers)
            if refused is not None:
                return web.json_response({"error": refused}, status=403)
            try:
                body = await _body(request)
                await asyncio.to_thread(action, body)
            except (Magi2Error, PoolError, ValueError) as error:
                return web.json_response({"error": shorten_paths(str(error))}, status=409)
            return web.json_response(public_status(manager, bridge))

        routes.post(path)(handle)

    add("/magi2/start", lambda body: start_workers(manager))
    add("/magi2/stop", lambda body: manager.stop(PATIENCE_S))
    add("/magi2/unload", lambda body: manager.unload(PATIENCE_S))
    add("/magi2/settings", lambda body: apply_settings(body, manager, bridge))


async def _body(request: Any) -> dict[str, Any]:
    raw = b""
    async for piece in request.content.iter_any():
        raw += piece
        if len(raw) > MAX_BODY:
            raise ValueError(f"The request is larger than {MAX_BODY} bytes.")
    body = parse_json(raw or b"{}")
    if not isinstance(body, dict):
        raise ValueError("The request must be a JSON object.")
    return body


def refusal(headers: Any) -> str | None:
    """Why a request that changes state is refused, or None (60 §11).

    A JSON content type makes browsers ask first when the page is not ours; the origin, where a browser sends one, must
    be the host that was asked.
    """
    content_type = headers.get("Content-Type", "").split(";")[0].strip().lower()
    if content_type != "application/json":
        return "Send Content-Type: application/json."
    if headers.get("Sec-Fetch-Site") == "cross-site":
        return "Requests from other sites are refused."
    origin = headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc.lower() != headers.get("Host", "").lower():
        return "Requests from other sites are refused."
    return None


def start_workers(manager: PoolManager) -> None:
    """Start workers for the model that ran last; RequestError while workflows run.

    A start takes ComfyUI's own models off the GPUs, and a node that runs may be in the middle of a step with them.
    """
    if workflows_left():
        raise RequestError("ComfyUI is running a workflow; the workers start by themselves when it needs them.")
    manager.start(PATIENCE_S)


def apply_settings(body: dict[str, Any], manager: PoolManager, bridge: MemoryBridge) -> None:
    """Change what the page's settings decide; ValueError for a value that makes no sense."""
    give_up = body.get("give_up", bridge.give_up)
    if give_up not in GIVE_UP:
        raise ValueError(f"give_up is {give_up!r}; it must be one of {', '.join(GIVE_UP)}.")
    minutes = body.get("idle_minutes", manager.idle_minutes)
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not 0 <= minutes <= MAX_IDLE_MINUTES:
        raise ValueError(f"idle_minutes is {minutes!r}; it must be a number from 0 (never) to {MAX_IDLE_MINUTES}.")
    bridge.give_up = give_up
    if minutes != manager.idle_minutes:
        manager.stop_when_idle(float(minutes))


def public_status(manager: PoolManager, bridge: MemoryBridge) -> dict[str, Any]:
    """The manager's status with the settings, free of paths."""
    status = manager.status()
    status["log"] = [shorten_paths(line) for line in status["log"]]
    status["settings"] = {"give_up": bridge.give_up, "idle_minutes": manager.idle_minutes}
    return status


def shorten_paths(text: str) -> str:
    """Take out of paths how the machine is laid out (60 §11): those below a folder of ComfyUI's begin there, and of
    others only the last part stays."""
    for root in server_folders():
        found = rf"(?<![\w.-]){re.escape(str(root))}"
        text = re.sub(rf"{found}[/\\]", "", text)
        text = re.sub(rf"{found}(?![\w-]|\.\w)", root.name.replace("\\", r"\\"), text)
    return _PATH.sub(r"\1", text)
