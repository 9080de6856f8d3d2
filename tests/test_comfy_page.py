"""The real page in Chromium, old and new: templates, panel, settings, help, languages (60 §8, §13 layer 4)."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from magi2_native.magi2_core.codecs.media import read_back
from magi2_native.tests.comfy_server.page import PAGES, READY, Page, need_browser, open_page, server_of
from magi2_native.tests.comfy_server.server import PACK, PACK_FOLDER, Server

need_browser()

SCRIPTS = sorted(path.relative_to(PACK / "web").as_posix() for path in (PACK / "web").rglob("*.*js"))
TEMPLATES = sorted(path.stem for path in (PACK / "workflows").glob("*.json"))


@pytest.fixture(scope="module", params=PAGES)
def page_server(request: pytest.FixtureRequest, comfy: Server, start_comfy: Callable[..., Server]) -> Server:
    """A server for each version of the page."""
    return server_of(request.param, comfy, start_comfy)


@pytest.fixture(scope="module")
def page(page_server: Server) -> Iterator[Page]:
    with open_page(page_server) as page:
        yield page


@pytest.fixture(autouse=True)
def no_problems(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of the page fails on a console error or a failed request."""
    yield
    if "page" in request.fixturenames:
        page = request.getfixturevalue("page")
        found, page.problems[:] = list(page.problems), []
        assert found == []


def drop(page: Page, template: str) -> None:
    page.run("() => window.app.graph.clear()")
    text = (PACK / "workflows" / f"{template}.json").read_text(encoding="utf-8")
    page.drop_workflow(f"{template}.json", text)
    page.wait("(count) => window.app.graph._nodes.length === count", len(json.loads(text)["nodes"]))


def what_runs(prompt: dict[str, Any]) -> dict[str, Any]:
    """A prompt without titles; the newer page adds the pack's name and version to them."""
    return {node_id: (node["class_type"], node["inputs"]) for node_id, node in prompt.items()}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_dropped_template_becomes_the_prompt_of_its_api_twin(page: Page, template: str) -> None:
    drop(page, template)
    twin = json.loads((PACK / "workflows" / "api" / f"{template}.json").read_text(encoding="utf-8"))
    assert what_runs(page.prompt()) == what_runs(twin)
    missing = page.run("() => window.app.graph._nodes.filter((node) => node.has_errors).map((node) => node.type)")
    assert missing == []


def test_a_template_runs_from_the_page_and_saves_a_clip(page: Page) -> None:
    drop(page, "text_to_clip")
    page.shrink()
    page.listen("progress", "execution_success", "execution_error", "magi2.status", "b_preview")
    before = set((page.server.base / "output" / "video").glob("*.mp4"))
    page.run("() => window.app.queuePrompt(0, 1)")
    page.wait("() => window.magi2Heard.some(([name]) => name.startsWith('execution_'))", seconds=200)
    events = page.run("() => window.magi2Heard")
    assert not [detail for name, detail in events if name == "execution_error"]
    assert [detail["value"] for name, detail in events if name == "progress" and detail["max"] == 2][-1] == 2
    assert [detail["state"] for name, detail in events if name == "magi2.status"][-1] == "ready"
    assert "b_preview" in {name for name, _ in events}, "a picture of the latents while they are sampled"
    (clip,) = set((page.server.base / "output" / "video").glob("*.mp4")) - before
    facts = read_back(clip)
    assert (facts.frames, facts.width, facts.height, facts.audio_seconds) == (125, 64, 32, 10.0)


def test_the_panel_shows_the_workers_and_stops_them(page: Page) -> None:
    page.run("() => window.app.extensionManager.command?.execute?.('Workspace.ToggleSidebarTab.magi2')")
    panel = page.tab.locator('[data-testid="magi2-panel"]')
    if not panel.count():
        page.tab.locator(".magi2-tab-button").first.click()
    panel.wait_for(timeout=10_000)
    shown = "(text) => document.querySelector('[data-testid=\"magi2-panel\"]').textContent.includes(text)"
    page.wait(shown, "MAGI-2-Preview")
    text = panel.inner_text()
    assert "sp2" in text
    assert "Rank 1: cpu" in text
    page.tab.locator('[data-testid="magi2-stop"]').click()
    page.wait(shown, "MAGI-2: stopped")
    assert page.server.workers() == []


def wait_for_settings(page: Page, wanted: dict[str, Any]) -> None:
    deadline = time.monotonic() + 10
    while (found := page.server.get("/magi2/status")["settings"]) != wanted:
        assert time.monotonic() < deadline, found
        page.tab.wait_for_timeout(50)


def test_the_settings_have_a_page_and_reach_the_server(page: Page) -> None:
    page.run("() => window.app.extensionManager.setting.set('Magi2.IdleMinutes', 7)")
    page.run("() => window.app.extensionManager.setting.set('Magi2.GiveUpMemory', 'always')")
    wait_for_settings(page, {"give_up": "always", "idle_minutes": 7.0})
    page.run("() => window.app.extensionManager.setting.set('Magi2.IdleMinutes', 0)")
    page.run("() => window.app.extensionManager.setting.set('Magi2.GiveUpMemory', 'when asked')")
    wait_for_settings(page, {"give_up": "when asked", "idle_minutes": 0.0})


def test_a_server_that_was_started_again_gets_the_settings(page: Page) -> None:
    page.run("() => window.app.extensionManager.setting.set('Magi2.IdleMinutes', 9)")
    wait_for_settings(page, {"give_up": "when asked", "idle_minutes": 9.0})
    page.server.request("/magi2/settings", {"idle_minutes": 0})
    page.run("() => { window.app.api.dispatchEvent(new CustomEvent('reconnected')); }")
    wait_for_settings(page, {"give_up": "when asked", "idle_minutes": 9.0})
    page.run("() => window.app.extensionManager.setting.set('Magi2.IdleMinutes', 0)")
    wait_for_settings(page, {"give_up": "when asked", "idle_minutes": 0.0})


def test_the_page_leaves_what_is_typed_into_texts_alone(page: Page) -> None:
    """30 §12: its dynamic prompts would choose from {a|b} and strip //, which destroys captions."""
    text = "{a|b} // c (word:1.2) [x:y] embedding:z %date% {{\n\"k\": {}}} 雨 🎬"
    kinds = ("Magi2Caption", "Magi2EncodePrompt", "Magi2EnhancePrompt")
    known = page.server.get("/object_info")
    page.run("() => window.app.graph.clear()")
    page.run(
        """([kinds, text]) => {
            for (const kind of kinds) {
                const node = LiteGraph.createNode(kind);
                window.app.graph.add(node);
                for (const widget of node.widgets) {
                    if (typeof widget.value === "string" && widget.type !== "combo") widget.value = text;
                }
            }
        }""",
        [kinds, text],
    )
    sent = {node["class_type"]: node["inputs"] for node in page.prompt().values()}
    for kind in kinds:
        slots = {**known[kind]["input"]["required"], **known[kind]["input"].get("optional", {})}
        texts = [name for name, slot in slots.items() if slot[0] == "STRING" and not slot[1].get("forceInput")]
        assert texts
        assert {name: sent[kind][name] for name in texts} == dict.fromkeys(texts, text)


def test_every_node_can_be_made(page: Page) -> None:
    found = page.run(
        """() => {
            window.app.graph.clear();
            const types = Object.keys(LiteGraph.registered_node_types).filter((type) => type.startsWith("Magi2"));
            return types.map((type) => {
                const node = LiteGraph.createNode(type);
                window.app.graph.add(node);
                return [type, node.title];
            });
        }"""
    )
    assert {name for name, _ in found} == {path.stem for path in (PACK / "web" / "docs").glob("*.md")}
    for name, title in found:
        assert title.startswith("MAGI-2"), name
    page.run("() => window.app.graph.clear()")


@pytest.mark.parametrize("path", SCRIPTS)
def test_every_import_of_a_served_script_is_there(page: Page, path: str) -> None:
    source = (PACK / "web" / path).read_text(encoding="utf-8")
    status, served = page.server.request(f"/extensions/{PACK_FOLDER}/{path}")
    assert status == 200
    assert served == source
    base = f"{page.server.url}/extensions/{PACK_FOLDER}/{path}"
    for line in source.splitlines():
        if line.startswith("import "):
            target = line.split('"')[1]
            answer = page.run("async ([t, b]) => (await fetch(new URL(t, b))).status", [target, base])
            assert answer == 200, target


def test_the_page_imports_extensions_and_not_their_modules(page: Page) -> None:
    listed = {name for name in page.server.get("/extensions") if PACK_FOLDER in name}
    assert listed == {f"/extensions/{PACK_FOLDER}/{path}" for path in SCRIPTS if path.endswith(".js")}
    registered = page.run("() => window.app.extensions.map((extension) => extension.name)")
    assert registered.count("Magi2.Native") == 1


def test_the_help_of_a_node_is_the_packs_own_page(page: Page) -> None:
    title = page.run(
        """() => {
            const { graph, canvas } = window.app;
            graph.clear();
            const node = LiteGraph.createNode("Magi2Sampler");
            graph.add(node);
            node.pos = [500, 300];
            canvas.ds.reset();
            canvas.draw(true, true);
            const frame = canvas.canvas.getBoundingClientRect();
            const [x, y] = canvas.ds.convertOffsetToCanvas([node.pos[0] + 60, node.pos[1] - 15]);
            return [frame.left + x, frame.top + y];
        }"""
    )
    page.tab.mouse.click(*title)
    page.tab.locator('button[data-testid="info-button"]').first.click(timeout=10_000)
    page.tab.locator("text=bit for bit").first.wait_for(timeout=10_000)
    page.run("() => window.app.graph.clear()")


def test_nodes_speak_chinese(page: Page) -> None:
    for locale, title in (("zh", "MAGI-2 采样器"), ("en", "MAGI-2 Sampler")):
        page.server.request("/settings", {"Comfy.Locale": locale})
        page.tab.reload()
        page.wait(READY)
        page.wait("(title) => LiteGraph.createNode('Magi2Sampler')?.title === title", title)


def test_the_template_browser_names_the_pack_and_opens_its_templates(page: Page) -> None:
    page.run("() => window.app.graph.clear()")
    page.run("() => window.app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    page.tab.get_by_text("MAGI-2 Native", exact=True).last.click()
    page.tab.get_by_text("text_to_clip", exact=True).last.click()
    nodes = json.loads((PACK / "workflows" / "text_to_clip.json").read_text(encoding="utf-8"))["nodes"]
    page.wait("(count) => window.app.graph._nodes.length === count", len(nodes))


def test_templates_and_thumbnails_are_listed_and_served(page_server: Server) -> None:
    assert set(page_server.get("/workflow_templates")[PACK_FOLDER]) == set(TEMPLATES)
    for template in TEMPLATES:
        assert page_server.request(f"/api/workflow_templates/{PACK_FOLDER}/{template}.json")[0] == 200
        assert page_server.request(f"/api/workflow_templates/{PACK_FOLDER}/{template}.jpg")[0] == 200
