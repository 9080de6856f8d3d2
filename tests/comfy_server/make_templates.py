"""Make `workflows/` in the real page: UI templates, their API twins and thumbnails.

    python -m magi2_native.tests.comfy_server.make_templates

Needs a ComfyUI checkout and Chromium, as the page tests do. Run it after a node's inputs have changed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from .page import open_page
from .server import PACK, running_server

CHECKPOINT = "MAGI-2-Preview"
PROMPT = (
    "A red fox trots along a snowy forest path at dawn, its breath visible in the cold air. The camera tracks it from"
    " the side at eye level, then slows as the fox stops, lifts its head and looks straight into the lens. Low golden"
    " light falls through the pines and the snow glitters. We hear soft paws crunching in the snow, a light wind in the"
    " branches and a distant crow; no music, no speech."
)
PICTURE_PROMPT = (
    "The scene of <Figure 1> comes alive. The camera pushes in slowly while everything in it moves gently and"
    " naturally, with steady light and no cuts. We hear a quiet room: a faint hum, small rustling movements close by"
    " and muffled street noise from outside; no music, no speech."
)
NOTES = {
    "text_to_clip": (
        "## Text to clip\n\n"
        "1. Put the MAGI-2 Preview files into `ComfyUI/models/magi2/MAGI-2-Preview/`: the folders `preview`,"
        " `text_encoder`, `turbo_vae` and `stable-audio-open-1.0`. Press R, and choose the folder in *Load"
        " Checkpoint*.\n"
        "2. Write a prompt: what is seen, how it moves, what is heard.\n"
        "3. Run. The plan in *Load Checkpoint* says whether your memory is enough, before anything is loaded.\n\n"
        "This template makes a quick clip of 448x256. For the full picture choose **540p** and **100 steps** in the"
        " sampler. The clip is saved in `output/video`."
    ),
    "picture_to_clip": (
        "## Picture to clip\n\n"
        "1. Put the MAGI-2 Preview files into `ComfyUI/models/magi2/MAGI-2-Preview/`: the folders `preview`,"
        " `text_encoder`, `turbo_vae`, `stable-audio-open-1.0` and `vae`. Press R, and choose the folder in *Load"
        " Checkpoint*.\n"
        "2. Load a picture. Its shape does not change the shape of the clip; choose portrait in the sampler for a"
        " tall one.\n"
        "3. Say in the prompt how it goes on from there. `<Figure 1>` stands for the picture.\n\n"
        "*for_picture* is on in *Encode Prompt*, so the prompt is encoded once. For the full picture choose **540p**"
        " and **100 steps**."
    ),
    "low_memory": (
        "## Text to clip with little memory\n\n"
        "`residency` is **swap**: one network at a time is on the device, and the workers end when the frames are"
        " there. The latents are saved before they are decoded: if decoding fails, load them with *MAGI-2 Load Latent*"
        " and decode again.\n\n"
        "The transformer's experts divide over all devices. If the plan in *Load Checkpoint* says that a rank needs"
        " more than there is, only more devices help.\n\n"
        "Files: as in *text_to_clip*, in `ComfyUI/models/magi2/MAGI-2-Preview/`."
    ),
}
SAMPLING = {"resolution": "272p", "orientation": "landscape", "seed": 42, "steps": 30}

Node = tuple[str, str, tuple[int, int], dict[str, Any]]


def _common(prompt: str, *, for_picture: bool = False, residency: str = "auto") -> list[Node]:
    """(id, class, position, values and links) of the nodes that all templates share; a link is (node, output name)."""
    return [
        ("load", "Magi2LoadCheckpoint", (40, 120), {"checkpoint": CHECKPOINT, "residency": residency}),
        ("prompt", "Magi2EncodePrompt", (440, 120), {"model": ("load", "model"), "prompt": prompt,
                                                     "for_picture": for_picture}),
        ("sample", "Magi2Sampler", (940, 120), {"model": ("load", "model"), "conditioning": ("prompt", "conditioning"),
                                                **SAMPLING}),
        ("decode", "Magi2Decode", (1340, 120), {"model": ("load", "model"), "latent": ("sample", "latent")}),
        ("save", "SaveVideo", (1340, 360), {"video": ("decode", "video"), "filename_prefix": "video/magi2"}),
    ]  # fmt: skip


def templates() -> dict[str, list[Node]]:
    """The nodes of each template."""
    picture = _common(PICTURE_PROMPT, for_picture=True)
    picture[2][3]["conditioning"] = ("picture", "conditioning")
    picture += [
        ("image", "LoadImage", (440, 620), {"image": "example.png"}),
        ("picture", "Magi2ImageConditioning", (940, 620), {"conditioning": ("prompt", "conditioning"),
                                                           "image": ("image", "IMAGE")}),
    ]  # fmt: skip
    small = _common(PROMPT, residency="swap")
    small += [
        ("keep", "Magi2SaveLatent", (940, 620), {"magi2_latent": ("sample", "latent")}),
        ("free", "Magi2UnloadWorkers", (1340, 900), {"after": ("decode", "frames")}),
    ]
    return {"text_to_clip": _common(PROMPT), "picture_to_clip": picture, "low_memory": small}


BUILD = """
async ([nodes, note]) => {
    const { app } = window;
    app.graph.clear();
    const made = {};
    for (const [id, type, pos, inputs] of nodes) {
        const node = LiteGraph.createNode(type);
        app.graph.add(node);
        node.pos = pos;
        for (const [name, value] of Object.entries(inputs)) {
            const widget = node.widgets?.find((each) => each.name === name);
            if (widget && !Array.isArray(value)) widget.value = value;
        }
        const seed = node.widgets?.find((each) => each.name === "control_after_generate");
        if (seed) seed.value = "fixed";
        made[id] = node;
    }
    for (const [id, , , inputs] of nodes) {
        for (const [name, value] of Object.entries(inputs)) {
            if (!Array.isArray(value)) continue;
            const [from, output] = value;
            const slot = made[from].outputs.findIndex((each) => each.name === output);
            made[from].connect(slot, made[id], made[id].inputs.findIndex((each) => each.name === name));
        }
    }
    const sizes = { Magi2EncodePrompt: [440, 440], Magi2Sampler: [340, 360], Magi2LoadCheckpoint: [340, 260] };
    for (const node of Object.values(made)) {
        const least = node.computeSize();
        const wanted = sizes[node.type] ?? [320, least[1]];
        node.size = [Math.max(least[0], wanted[0]), Math.max(least[1], wanted[1])];
    }
    const text = LiteGraph.createNode("MarkdownNote");
    app.graph.add(text);
    text.pos = [40, 460];
    text.size = [340, 420];
    text.widgets[0].value = note;
    text.title = "Read me";
}
"""

# what the page writes for itself: view, versions, translations, ids of this session
DROPPED = ("localized_name", "label", "ds", "frontendVersion", "workflowRendererVersion", "VHS_latentpreview")


def clean(workflow: dict[str, Any]) -> dict[str, Any]:
    """A saved workflow without what belongs to the user who saved it, and with the pack's name in our nodes."""
    from magi2_native import __version__

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(inner) for key, inner in value.items() if key not in DROPPED}
        return [without(inner) for inner in value] if isinstance(value, list) else value

    cleaned = without(workflow)
    for node in cleaned["nodes"]:
        if node["type"].startswith("Magi2"):
            node["properties"] = {
                "Node name for S&R": node["type"], "cnr_id": "magi2-native", "ver": __version__
            }  # fmt: skip
        else:
            node["properties"] = {
                key: value for key, value in node.get("properties", {}).items() if key == "Node name for S&R"
            }
    cleaned["extra"] = {}
    cleaned.pop("id", None)
    cleaned.pop("revision", None)
    return cleaned


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        checkpoint = base / "models" / "magi2" / CHECKPOINT / "preview"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors.index.json").write_text("{}")
        (base / "input").mkdir()
        _example_picture(base / "input" / "example.png")
        (PACK / "workflows" / "api").mkdir(parents=True, exist_ok=True)
        with running_server(base) as server, open_page(server) as page:
            for name, nodes in templates().items():
                page.run(BUILD, [nodes, NOTES[name]])
                write_json(PACK / "workflows" / f"{name}.json", clean(page.workflow()))
                write_json(PACK / "workflows" / "api" / f"{name}.json", page.prompt())
                page.tab.wait_for_timeout(500)
                page.run("() => window.app.canvas.draw(true, true)")
                page.tab.screenshot(path=str(base / f"{name}.png"))
                thumbnail(base / f"{name}.png", PACK / "workflows" / f"{name}.jpg")


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def thumbnail(source: Path, target: Path) -> None:
    """A square JPEG of 512 px from the middle of a screenshot."""
    from PIL import Image

    with Image.open(source) as picture:
        side = min(picture.size)
        left = (picture.width - side) // 2
        square = picture.convert("RGB").crop((left, 0, left + side, side)).resize((512, 512))
    square.save(target, quality=85)


def _example_picture(path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (64, 36), "gray").save(path)


if __name__ == "__main__":
    main()
