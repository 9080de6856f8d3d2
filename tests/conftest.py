"""Fixtures that several test files share: a miniature checkpoint, and a real ComfyUI with the pack in it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from magi2_native.tests.comfy_server.server import Server, comfyui_root, start_server

if TYPE_CHECKING:
    from magi2_native.tests.miniatures import Encoded


# a job started in the background by a shell has Ctrl-C ignored, and hands that on; the tests press it
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature checkpoint, written once."""
    from magi2_native.magi2_core.checkpoint.miniature import write_miniature

    folder = tmp_path_factory.mktemp("checkpoint") / "MAGI-2-Preview"
    write_miniature(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest checkpoint that goes every way, written once."""
    from magi2_native.magi2_core.checkpoint.miniature import write_miniature
    from magi2_native.tests.miniatures import TINY

    return write_miniature(tmp_path_factory.mktemp("checkpoint") / "tiny", size=TINY)


@pytest.fixture(scope="session")
def encoded(tiny: Path) -> Encoded:
    """A prompt and a picture, encoded once by the tiny checkpoint."""
    from magi2_native.tests.miniatures import encode, tiny_engine

    return encode(tiny_engine(tiny).run)


@pytest.fixture(scope="session")
def comfy_base(tmp_path_factory: pytest.TempPathFactory, miniature: Path) -> Callable[[], Path]:
    """Makes base directories for a server: the miniature in its models, a picture in its input."""

    def make() -> Path:
        from PIL import Image

        base = tmp_path_factory.mktemp("comfyui")
        (base / "models" / "magi2").mkdir(parents=True)
        (base / "models" / "magi2" / miniature.name).symlink_to(miniature, target_is_directory=True)
        (base / "input").mkdir()
        Image.linear_gradient("L").convert("RGB").resize((160, 90)).save(base / "input" / "example.png")
        return base

    return make


@pytest.fixture(scope="session")
def start_comfy(comfy_base: Callable[[], Path]) -> Iterator[Callable[..., Server]]:
    """Starts further servers, with two workers on the CPU for the nodes; all are ended at the end of the session."""
    if comfyui_root() is None:
        pytest.skip("no ComfyUI checkout (set COMFYUI_ROOT)")
    servers: list[Server] = []

    def start(environment: dict[str, str] | None = None, base: Path | None = None, **options: Any) -> Server:
        variables = {"MAGI2_DEVICES": "2xcpu", **(environment or {})}
        servers.append(start_server(base or comfy_base(), environment=variables, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture(scope="session")
def comfy(start_comfy: Callable[..., Server]) -> Server:
    """The server that tests share."""
    return start_comfy()
