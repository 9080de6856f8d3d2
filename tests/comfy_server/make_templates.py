"""Make `workflows/` in the real page: UI templates, their API twins and thumbnails.

    python -m magi2_native.tests.comfy_server.make_templates

Needs a ComfyUI checkout and Chromium, as the page tests do. Run it after a node's inputs have changed.
"""

from __future__ import annotations

import base64
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
    "preview_to_1080p": (
        "## Preview to 1080p\n\n"
        "1. Put the MAGI-2 Preview files into `ComfyUI/models/magi2/MAGI-2-Preview/`, this time with the folder"
        " `refiner` too. Press R, and choose the folder in *Load Checkpoint*.\n"
        "2. Run. The sampler makes a 540p preview, which is saved as a latent; *Refine* takes it to 1920x1088 and 25"
        " frames a second; *Decode* writes it straight into the video at 1920x1080.\n\n"
        "Look for a good seed at 540p first: mute *Refine*, and connect the sampler's latent to *Decode*. To refine a"
        " preview later, load its latent with *MAGI-2 Load Latent*.\n\n"
        "The frames of this clip would take 6.2 GB, so *Decode* does not make them unless *make_frames* is always."
    ),
    "caption_to_clip": (
        "## Caption to clip\n\n"
        "The model was trained on structured captions. Fill in the fields of *Caption*; empty ones are left out. It"
        " shows the text that the encoder sees, and how many tokens it has.\n\n"
        "Times are seconds of the ten: `3-4.5 <subject 1>: the words`. Two or three words fit into a second.\n\n"
        "Files: as in *text_to_clip*, in `ComfyUI/models/magi2/MAGI-2-Preview/`."
    ),
    "caption_examples": (
        "## Six example captions\n\n"
        "Run, and each *Caption* shows its text as the encoder sees it, with its count of tokens. The clip is made of"
        " the one that is connected to *Encode Prompt*; connect another, and change it in *edited_caption*.\n\n"
        "| caption | shows |\n|---|---|\n"
        "| text_harbour_storm | one continuous shot, ambience without music or speech |\n"
        "| text_night_market | one line in Mandarin, a readable sign, steam and contact |\n"
        "| text_potter | hands and clay in three steps, grip and transfer |\n"
        "| text_two_languages | a question in French and an answer in Japanese |\n"
        "| picture_host_greets | for a picture of a host at a desk: Spanish, then English |\n"
        "| picture_lighthouse | for a picture of a lighthouse: wind, surf and one gull |\n\n"
        "The last two belong to a picture: use them with the template *picture_to_clip*.\n\n"
        "Files: as in *text_to_clip*, in `ComfyUI/models/magi2/MAGI-2-Preview/`."
    ),
    "enhance_to_clip": (
        "## One line to clip\n\n"
        "1. Name a language model in ComfyUI's environment or in `user/magi2/magi2_enhance.json` (see the help of"
        " *Enhance Prompt*). The prompt is sent there, and nothing else.\n"
        "2. Write a line into *Enhance Prompt* and run. The caption appears in *Caption*, and the run stops there.\n"
        "3. Press *Edit this caption* and change what you like in *edited_caption*, or turn *stop_to_edit* off to take"
        " it as it is. Run again.\n\n"
        "Files: as in *text_to_clip*, in `ComfyUI/models/magi2/MAGI-2-Preview/`."
    ),
}
# on the thumbnail: the template browser has a name for each, and no description
SUMMARIES = {
    "text_to_clip": "A prompt becomes ten seconds of video and sound",
    "picture_to_clip": "A picture comes alive as the prompt says",
    "low_memory": "One network at a time on each device",
    "preview_to_1080p": "A 540p preview, refined to 1920x1080 at 25 fps",
    "caption_to_clip": "People, timeline, dialogue and sounds in a form",
    "caption_examples": "Six example captions to start from",
    "enhance_to_clip": "One line, and a language model writes the caption",
}
CAPTION = {
    "context": "A potter at work, quiet and close",
    "description": "In a small workshop a woman in her sixties shapes a bowl on a turning wheel. Natural documentary"
    " photograph, medium close-up, warm and calm.",
    "subjects": "a potter in her sixties with short grey hair | brown linen apron over a blue shirt | centre, behind"
    " the wheel",
    "timeline": "0-4 her wet hands centre the clay while the wheel turns\n"
    "4-7.5 her thumbs open the bowl and the wall rises between her fingers\n"
    "7.5-10 she lets go, looks up and smiles",
    "dialogue": "7.8-9.2 <subject 1>: There you are. | softly, to the bowl",
    "language": "English",
    "ambience": "the steady hum of the wheel, wet clay under the fingers, rain on the window, no music",
    "style": "natural documentary photograph",
    "light": "soft window light from the left",
    "setting": "shelves of unfired pots on a whitewashed wall",
    "camera": "slow push-in at eye level",
}
EXAMPLES = (
    "text_harbour_storm", "text_night_market", "text_potter", "text_two_languages", "picture_host_greets",
    "picture_lighthouse",
)  # fmt: skip
LINE = "A lighthouse keeper lights the lamp as a storm comes in"
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
        ("save", "SaveVideo", (1340, 440), {"video": ("decode", "video"), "filename_prefix": "video/magi2"}),
    ]  # fmt: skip


def templates() -> dict[str, list[Node]]:
    """The nodes of each template."""
    picture = _common(PICTURE_PROMPT, for_picture=True)
    picture[2][3]["conditioning"] = ("picture", "conditioning")
    picture += [
        ("image", "LoadImage", (440, 620), {"image": "example.png"}),
        ("picture", "Magi2ImageConditioning", (940, 800), {"conditioning": ("prompt", "conditioning"),
                                                           "image": ("image", "IMAGE")}),
    ]  # fmt: skip
    small = _common(PROMPT, residency="swap")
    small += [
        ("keep", "Magi2SaveLatent", (940, 800), {"magi2_latent": ("sample", "latent")}),
        ("free", "Magi2UnloadWorkers", (1340, 900), {"after": ("decode", "video")}),
    ]
    large = _common(PROMPT)
    large[2][3].update(resolution="540p", steps=50)
    large[3][3].update(latent=("refine", "latent"), output_width=1920, output_height=1080)
    large += [
        ("keep", "Magi2SaveLatent", (940, 800), {"magi2_latent": ("sample", "latent")}),
        ("refine", "Magi2Refine", (1340, 640), {"model": ("load", "model"), "latent": ("sample", "latent"),
                                                "conditioning": ("prompt", "conditioning")}),
    ]  # fmt: skip
    return {
        "text_to_clip": _common(PROMPT),
        "picture_to_clip": picture,
        "low_memory": small,
        "preview_to_1080p": large,
        "caption_to_clip": _captioned(CAPTION),
        "caption_examples": _examples(),
        "enhance_to_clip": [
            *_captioned({"caption": ("enhance", "caption"), "stop_to_edit": True}),
            ("enhance", "Magi2EnhancePrompt", (440, -280), {"prompt": LINE}),
        ],
    }


def _captioned(caption: dict[str, Any]) -> list[Node]:
    """The common nodes, moved to the right for a caption that gives the prompt."""
    nodes = [(name, kind, (x + 500 * (name != "load"), y), inputs) for name, kind, (x, y), inputs in _common("")]
    nodes[1][3]["prompt"] = ("caption", "prompt")
    return [*nodes, ("caption", "Magi2Caption", (440, 120), {"model": ("load", "model"), **caption})]


def _examples() -> list[Node]:
    """The common nodes behind the first example, and the others beside and below it."""
    nodes = _captioned({})[:-1]
    nodes[1][3]["prompt"] = (EXAMPLES[0], "prompt")
    for i, name in enumerate(EXAMPLES):
        text = (PACK / "workflows" / "captions" / f"{name}.json").read_text(encoding="utf-8")
        inputs = {"title": name, "model": ("load", "model"), "edited_caption": text.strip(),
                  "for_picture": name.startswith("picture")}  # fmt: skip
        nodes.append((name, "Magi2Caption", (440, 120) if i == 0 else (-40 + 480 * i, 1120), inputs))
    return nodes


BUILD = """
async ([nodes, note]) => {
    const { app } = window;
    app.graph.clear();
    app.nodeOutputs = {};  // pictures that nodes of the template before have shown: ids begin anew
    const made = {};
    for (const [id, type, pos, inputs] of nodes) {
        const node = LiteGraph.createNode(type);
        app.graph.add(node);
        node.pos = pos;
        node.title = inputs.title ?? node.title;
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
    const sizes = {
        Magi2Caption: [440, 900], Magi2EnhancePrompt: [440, 340], Magi2EncodePrompt: [440, 440],
        Magi2Sampler: [340, 360], Magi2LoadCheckpoint: [340, 260],
    };
    for (const node of Object.values(made)) {
        const least = node.computeSize();
        const wanted = sizes[node.type] ?? [320, least[1]];
        node.size = [Math.max(least[0], wanted[0]), Math.max(least[1], wanted[1])];
    }
    const text = LiteGraph.createNode("MarkdownNote");
    app.graph.add(text);
    text.pos = [40, 580];
    text.size = [340, 420];
    text.widgets[0].value = note;
    text.title = "Read me";
}
"""

WHOLE_GRAPH = """
async () => {
    await window.app.extensionManager.setting.set("Comfy.Minimap.Visible", false);
    Object.assign(window.app.canvas.ds, { scale: 0.85, offset: [60, 20] });
    window.app.canvas.draw(true, true);
}
"""
# the part of the page that shows the graph, without bars
GRAPH = {"x": 64, "y": 84, "width": 1536, "height": 860}
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
                page.run(WHOLE_GRAPH)
                page.tab.wait_for_timeout(500)
                graph = page.tab.screenshot(clip=GRAPH)
                thumbnail(page.tab.context.browser, name, graph, PACK / "workflows" / f"{name}.jpg")


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def thumbnail(browser: Any, name: str, graph: bytes, target: Path) -> None:
    """A card of 512 x 512 pixels: what the template makes, above a picture of its graph."""
    title = name.replace("_", " ").capitalize()
    card = browser.new_page(viewport={"width": 512, "height": 512})
    card.set_content(
        f"""<style>
        body {{ margin: 0; height: 512px; background: linear-gradient(150deg, #3b2a63, #14323f); color: white;
               font-family: sans-serif; display: flex; flex-direction: column; justify-content: space-between; }}
        h1 {{ font-size: 46px; margin: 72px 32px 0; }}
        p {{ font-size: 27px; line-height: 1.2; margin: 0 32px 8px; opacity: 0.85; }}
        img {{ width: 512px; }}
        </style>
        <h1>{title}</h1><p>{SUMMARIES[name]}</p>
        <img src="data:image/png;base64,{base64.b64encode(graph).decode()}">"""
    )
    card.screenshot(path=str(target), type="jpeg", quality=85)
    card.close()


def _example_picture(path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (64, 36), "gray").save(path)


if __name__ == "__main__":
    main()
