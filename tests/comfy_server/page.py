"""The real page in headless Chromium (60 §13, layer 4)."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .server import Server

READY = """() => window.app && window.app.graph && window.app.extensionManager
    && window.LiteGraph.registered_node_types.Magi2Sampler"""
# no tour at the first visit; and the page of 1.27 stumbles over its own canvas settings unless they have values
QUIET = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Canvas.LeftMouseClickBehavior": "panning",
    "Comfy.Canvas.MouseWheelScroll": "zoom",
}
# answers that every page gets without anything being wrong; a newer page asks the older server for its list of jobs
EXPECTED_404 = ("/api/jobs", "user.css", "userdata", "/docs/", "favicon", "subgraphs", "index_logo")
PAGES = ("installed", "newer")
SHRINK = """() => {
    const graph = window.app.graph;
    const options = LiteGraph.createNode("Magi2SamplerOptions");
    graph.add(options);
    const set = (node, name, value) => { node.widgets.find((each) => each.name === name).value = value; };
    set(options, "width", 64);
    set(options, "height", 32);
    const sampler = graph._nodes.find((node) => node.type === "Magi2Sampler");
    set(sampler, "steps", 2);
    options.connect(0, sampler, sampler.inputs.findIndex((input) => input.name === "options"));
}"""


def chromium() -> str | None:
    """The browser to use: CHROMIUM, else what is on the path."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def newer_page() -> Path | None:
    """The unpacked newer front-end package that COMFYUI_NEW_PAGE names, None if it is not set."""
    if not (named := os.environ.get("COMFYUI_NEW_PAGE")):
        return None
    folder = Path(named) / "comfyui_frontend_package"
    if (folder / "static").is_dir():
        return folder
    raise FileNotFoundError(f"COMFYUI_NEW_PAGE is {named!r}, but there is no comfyui_frontend_package/static in it.")


def need_browser() -> None:
    """Skip the test, or the module that is being imported, where there is no browser."""
    pytest.importorskip("playwright", reason="the page tests need playwright and Chromium")
    if chromium() is None:
        pytest.skip("the page tests need Chromium (set CHROMIUM)", allow_module_level=True)


def server_of(page: str, comfy: Server, start_comfy: Callable[..., Server]) -> Server:
    """The server of one of PAGES: the shared one, or one of its own for the newer page. Skips if there is none."""
    if page == "installed":
        return comfy
    if (newer := newer_page()) is None:
        pytest.skip("no newer page (set COMFYUI_NEW_PAGE to the folder of an unpacked comfyui-frontend-package)")
    return start_comfy(page=newer)


@dataclass
class Page:
    """A page that has loaded; `problems` collects console errors and failed requests."""

    tab: Any
    server: Server
    problems: list[str] = field(default_factory=list)

    def run(self, function: str, argument: Any = None) -> Any:
        """Evaluate a JavaScript function in the page and return its result."""
        return self.tab.evaluate(function, argument)

    def wait(self, function: str, argument: Any = None, seconds: float = 30) -> None:
        """Wait until a JavaScript function returns something true."""
        self.tab.wait_for_function(function, arg=argument, timeout=seconds * 1000)

    def drop_workflow(self, name: str, text: str) -> None:
        """Drop a file on the canvas as a user does."""
        self.run(
            """([name, text]) => {
                const data = new DataTransfer();
                data.items.add(new File([text], name, { type: "application/json" }));
                const canvas = document.querySelector("canvas#graph-canvas");
                canvas.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
            }""",
            [name, text],
        )

    def shrink(self) -> None:
        """Make the template on the canvas small enough for a miniature on a CPU: 64x32 pixels, two steps."""
        self.run(SHRINK)

    def listen(self, *names: str) -> None:
        """Collect the server's messages of these names from now on, as [name, what it says], in window.magi2Heard."""
        self.run(
            """(names) => {
                const heard = window.magi2Heard = [];
                for (const name of names)
                    window.app.api.addEventListener(name, (event) => heard.push([name, event.detail]));
            }""",
            names,
        )

    def prompt(self) -> dict[str, Any]:
        """The API prompt that the page makes of its graph."""
        return self.run("async () => (await window.app.graphToPrompt()).output")

    def workflow(self) -> dict[str, Any]:
        """The graph as the page would save it."""
        return self.run("() => JSON.parse(JSON.stringify(window.app.graph.serialize()))")


@contextlib.contextmanager
def open_page(server: Server, locale: str = "en") -> Iterator[Page]:
    """Open the server's page and wait until it is usable."""
    from playwright.sync_api import sync_playwright

    server.request("/settings", {**QUIET, "Comfy.Locale": locale})
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        try:
            tab = browser.new_page(viewport={"width": 1600, "height": 1000})
            page = Page(tab, server)
            tab.on("console", lambda message: _note_console(page, message))
            tab.on("pageerror", lambda error: page.problems.append(f"page error: {error.stack or error}"))
            tab.on("response", lambda response: _note_response(page, response))
            tab.goto(server.url, timeout=90_000)
            tab.wait_for_function(READY, timeout=90_000)
            yield page
        finally:
            browser.close()


def _note_console(page: Page, message: Any) -> None:
    expected = message.text.startswith("Failed to load resource") or "JobsApiError" in message.text
    if message.type == "error" and not expected:
        page.problems.append(f"console: {message.text}")


def _note_response(page: Page, response: Any) -> None:
    ours = response.url.startswith(page.server.url)
    if ours and response.status >= 400 and not any(part in response.url for part in EXPECTED_404):
        page.problems.append(f"HTTP {response.status}: {response.url}")
