"""Replay of the text cases: tokens, encoder features, both renderers, captions, markers (30 §11)."""

from __future__ import annotations

import base64
import inspect
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from ...magi2_core.checkpoint.index import scan_folder
from ...magi2_core.conditioning.caption_answer import caption_request, read_answer
from ...magi2_core.conditioning.captions import CAPTIONS, Task, response_schema
from ...magi2_core.conditioning.compact import normalise
from ...magi2_core.conditioning.endpoint import Answer, Endpoint
from ...magi2_core.conditioning.enhance import Enhancer
from ...magi2_core.conditioning.markdown import render_markdown
from ...magi2_core.conditioning.markers import (
    figure_number,
    insert_marker,
    marker_tokens,
    parse_pictures,
    picture_order,
    pool_markers,
)
from ...magi2_core.conditioning.parameters import SKIPPED_LAYERS
from ...magi2_core.conditioning.text_encoder import TextEncoder
from ...magi2_core.conditioning.tokenizer import PromptTokenizer, Tokens, extra_split
from ...magi2_core.errors import RequestError
from ...magi2_core.events import Silent
from .replay import Case, Measure, close, equal, rel_l2

CHECKPOINT = "tiny_qwen35"


def run(case: Case) -> list[Measure]:
    """Compare one file of text cases."""
    families: dict[str, Callable[[Case], Iterator[Measure]]] = {
        "encoder": _encoder,
        "pretokenize": _pretokenize,
        "compact_markdown": _compact,
        "pe_markdown": _markdown,
        "pe_protocol": _protocol,
        "pe_schemas": _schemas,
        "figure_marker": _figure_marker,
    }
    family = next((name for name in families if case.name.startswith(name)), None)
    if family is None:
        raise ValueError(f"{case.name} is no family of text cases; known are {', '.join(families)}")
    return list(families[family](case))


# --- compact text and Markdown -------------------------------------------------------------------------------------


def _compact(case: Case) -> Iterator[Measure]:
    for item in case.meta["cases"]:
        yield equal(item["name"], normalise(item["input"]), item["output"])
    for item in case.meta.get("object_cases", []):
        yield equal(item["name"], normalise(json.dumps(item["input_object"], ensure_ascii=False)), item["output"])


def _markdown(case: Case) -> Iterator[Measure]:
    for item in case.meta["cases"]:
        yield equal(item["name"], render_markdown(json.loads(item["input"])), item["output"])


# --- markers -------------------------------------------------------------------------------------------------------


def _figure_marker(case: Case) -> Iterator[Measure]:
    for item in case.meta["cases"]:
        marked = insert_marker(item["prompt"])
        yield equal(f"{item['name']} with marker", marked, item["with_marker"])
        yield equal(f"{item['name']} normalised", normalise(marked), item["normalised"])
    for item in case.meta.get("image_argument", []):
        pictures = parse_pictures(item["input"])
        yield equal(f"image argument {item['name']}", [list(pair) for pair in pictures.items()], item["output"])
        yield equal(f"order of {item['name']}", picture_order(pictures), item["processing_order"])
    for argument, error in case.meta.get("image_argument_errors", []):
        yield equal(f"image argument {argument}", _cause(lambda a=argument: parse_pictures(a)), error)
    for key, number in case.meta.get("figure_number", []):
        yield equal(f"figure number of {key!r}", figure_number(key), number)


def _cause(call: Callable[[], Any]) -> str | None:
    """Class name of the error below the sentence that a call raises."""
    try:
        call()
    except RequestError as error:
        return type(error.__cause__).__name__
    return None


# --- tokens and features -------------------------------------------------------------------------------------------


def _pretokenize(case: Case) -> Iterator[Measure]:
    expected = {c for a, b in case.meta["effective_ranges"] for c in range(int(a[2:], 16), int(b[2:], 16) + 1)}
    yield equal("isolated code points", _isolated(), expected)
    full = PromptTokenizer(case.folder / CHECKPOINT).pre_tokenizer
    for item in case.meta["samples"]:
        text = item["text"]
        yield equal(f"split of {text!r}", _pieces(extra_split(), text), item["split"])
        yield equal(f"pieces of {text!r}", _pieces(full, text), item["full"])


def _isolated() -> set[int]:
    """Every code point that the extra splitter makes a piece of its own."""
    points = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    pieces = extra_split().pre_tokenize_str("".join(f"zz{chr(c)}zz" for c in points))
    return {ord(piece) for piece, _ in pieces if len(piece) == 1}


def _pieces(splitter: Any, text: str) -> list[list[Any]]:
    return [[piece, list(interval)] for piece, interval in splitter.pre_tokenize_str(text)]


def _encoder(case: Case) -> Iterator[Measure]:
    items = case.meta["cases"]
    exact = TextEncoder(case.folder / CHECKPOINT, width=_width(case), dtype=torch.float32)
    coarse = TextEncoder(case.folder / CHECKPOINT, width=_width(case), dtype=torch.bfloat16)
    plain = [item for item in items if "skip_layer" not in item]
    texts = {item["name"]: normalise(_prompt(item)) for item in plain}
    tokens = {item["name"]: _tokens(exact, texts[item["name"]], item) for item in plain}
    for item in plain:
        yield from _check_tokens(case, item, texts[item["name"]], tokens[item["name"]], exact)
    for kind, encoder in (("fp32", exact), ("bf16", coarse)):
        names = [
            name for name in texts if any(f"out.{name}.hidden_{kind}{rows}" in case.tensors for rows in ("", "_rows"))
        ]
        features = dict(zip(names, encoder.encode([tokens[name].ids for name in names], Silent()), strict=True))
        yield from _check_features(case, kind, features, texts, tokens)
    for item in items:
        if "skip_layer" in item:
            yield _check_depth(case, item, exact)
    yield from _check_every_depth(case, items[0], exact)
    if "empty_prompt" in case.meta:
        yield equal("tokens of the empty prompt", len(exact.tokenizer("").ids), case.meta["empty_prompt"]["tokens"])


def _width(case: Case) -> int:
    config = json.loads((case.folder / CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    width: int = config["text_config"]["hidden_size"]
    return width


def _prompt(item: dict[str, Any]) -> str:
    return item["prompt"] if "prompt" in item else item["prompt_unit"] * item["repeat"]


def _tokens(encoder: TextEncoder, text: str, item: dict[str, Any]) -> Tokens:
    return encoder.tokenizer(text, item["max_length"]) if "max_length" in item else encoder.tokenizer(text)


def _check_tokens(
    case: Case, item: dict[str, Any], text: str, tokens: Tokens, encoder: TextEncoder
) -> Iterator[Measure]:
    name = item["name"]
    yield equal(f"{name} length", len(tokens.ids), item["length"])
    for key, got in (
        ("normalised", text),
        ("untruncated_length", tokens.untruncated),
        ("tokens", encoder.tokenizer.pieces(tokens)),
        ("target_indices", [marker_tokens(text, tokens, figure) for figure in _figures(case)]),
    ):
        if key in item:
            yield equal(f"{name} {key}", got, item[key])
    for key, values in (("input_ids", tokens.ids), ("offsets", tokens.offsets)):
        if (expected := case.tensors.get(f"in.{name}.{key}")) is not None:
            yield equal(f"{name} {key}", torch.tensor(values)[None], expected)


def _figures(case: Case) -> list[int]:
    return [figure_number(target) for target in case.meta["targets"]]


def _check_features(
    case: Case, kind: str, features: dict[str, Tensor], texts: dict[str, str], tokens: dict[str, Tokens]
) -> Iterator[Measure]:
    hidden, special = (case.meta["tolerance"][f"{what}_{kind}"] for what in ("hidden", "special"))
    errors = []
    for name, features_LD in features.items():
        if (expected := case.tensors.get(f"out.{name}.hidden_{kind}")) is not None:
            measure = _within(f"{name} {kind}", features_LD[None], expected, hidden)
            errors.append(measure.error)
            yield measure
        if (expected := case.tensors.get(f"out.{name}.hidden_{kind}_rows")) is not None:
            rows = case.tensors[f"in.{name}.rows"]
            yield _within(f"{name} {kind} rows", features_LD[rows], expected, hidden)
        if (expected := case.tensors.get(f"out.{name}.special_{kind}")) is not None:
            pooled_MD = pool_markers(features_LD, texts[name], tokens[name], _figures(case))
            yield _within(f"{name} {kind} markers", pooled_MD, expected, special)
    if "relative_l2_median" in hidden and errors:
        yield Measure(f"{kind} median relative L2", median(errors), hidden["relative_l2_median"])


def _within(what: str, got: Tensor, expected: Tensor, tolerance: dict[str, Any]) -> Measure:
    """A comparison by the kind of tolerance that the case states."""
    if "relative_l2_each_case" in tolerance:
        return rel_l2(what, got, expected, tolerance["relative_l2_each_case"])
    return close(what, got, expected, tolerance)


def _check_depth(case: Case, item: dict[str, Any], encoder: TextEncoder) -> Measure:
    """The output at another depth; at depth 0 it is the final norm's."""
    states = _states(case, item["prompt"], encoder, [item["skip_layer"]])
    expected = case.tensors[f"out.{item['name']}.hidden_fp32"]
    return _within(item["name"], states[0][None], expected, case.meta["tolerance"]["hidden_fp32"])


def _check_every_depth(case: Case, item: dict[str, Any], encoder: TextEncoder) -> Iterator[Measure]:
    """All hidden states of the first case: embeddings, each layer's output, and the norm in place of the last."""
    expected = case.tensors.get(f"mid.{item['name']}.hidden_states_fp32")
    if expected is None:
        return
    skips = [encoder.config.num_hidden_layers - depth for depth in range(encoder.config.num_hidden_layers + 1)]
    for skip, got, wanted in zip(skips, _states(case, _prompt(item), encoder, skips), expected, strict=True):
        what = f"hidden state {encoder.config.num_hidden_layers - skip} of {item['name']}"
        yield _within(what, got, wanted, case.meta["tolerance"]["hidden_fp32"])


def _states(case: Case, prompt: str, encoder: TextEncoder, skips: list[int]) -> list[Tensor]:
    """The prompt's features with `skip` layers left out; the final norm is applied where none is."""
    folder, width = case.folder / CHECKPOINT, encoder.config.hidden_size
    ids = encoder.tokenizer(normalise(prompt)).ids
    states = []
    for skip in skips:
        other = encoder
        if skip != SKIPPED_LAYERS:
            other = TextEncoder(folder, width=width, dtype=torch.float32, skipped_layers=skip)
        features_LD = other.encode([ids], Silent())[0]
        states.append(_final_norm(folder, features_LD) if skip == 0 else features_LD)
    return states


def _final_norm(folder: Path, x_LD: Tensor) -> Tensor:
    """The norm above the last layer, which the product never applies (30 §4.3: 1 + weight)."""
    key = "model.language_model.norm.weight"
    with safe_open(scan_folder(folder).entries[key].file, "pt") as file:
        weight_D = file.get_tensor(key).float()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    return x_LD * torch.rsqrt(x_LD.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * (1 + weight_D)


# --- captions ------------------------------------------------------------------------------------------------------


def _schemas(case: Case) -> Iterator[Measure]:
    tasks: tuple[Task, ...] = ("t2v", "i2v")
    for task in tasks:
        yield equal(f"{task} name", CAPTIONS[task].__name__, case.meta[task]["name"])
        yield equal(f"{task} paths", list(_paths(response_schema(task))), case.meta[task]["paths"])
        yield equal(f"{task} strictness", list(_loose(response_schema(task))), [])


def _paths(schema: dict[str, Any], prefix: str = "") -> Iterator[list[str]]:
    """Every path below an object or array with its JSON type, in declaration order."""
    inner = {f"{prefix}[]": schema["items"]} if schema["type"] == "array" else {}
    for key, value in schema.get("properties", {}).items():
        inner[f"{prefix}.{key}" if prefix else key] = value
    for path, value in inner.items():
        yield [path, value["type"]]
        yield from _paths(value, path)


def _loose(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Objects of a schema that allow other properties or do not require all of theirs, in order."""
    if schema["type"] == "array":
        yield from _loose(schema["items"])
    if schema["type"] == "object":
        if schema["additionalProperties"] is not False or schema["required"] != list(schema["properties"]):
            yield schema
        for value in schema["properties"].values():
            yield from _loose(value)


def _protocol(case: Case) -> Iterator[Measure]:
    for item in case.meta.get("requests", []):
        yield from _check_request(item)
    if note := case.meta.get("note_substitution"):
        request = caption_request("t2v", "{user_prompt}|{variation_seed}", note["prompt"])
        sent = request["messages"][0]["content"][0]["text"]
        yield equal("substitution", sent, f"{note['appears_in_request_as']}|")
    for item in case.meta.get("responses", []):
        yield _check_response(item)


def _check_request(item: dict[str, Any]) -> Iterator[Measure]:
    """Enhance with a stand-in for the endpoint, and compare what it was sent."""
    sent: list[dict[str, Any]] = []
    task: Task = "i2v" if len(item["messages"][0]["content"]) > 1 else "t2v"

    def answer(endpoint: Endpoint, request: dict[str, Any], events: Any) -> Answer:
        sent.append(request)
        return Answer(json.dumps(_filled(response_schema(task))), "stop")

    with tempfile.TemporaryDirectory() as folder:
        picture = _picture(item, Path(folder))
        Enhancer(Endpoint(), ask=answer).enhance(item["prompt"], picture, Silent())
    as_address = isinstance(picture, str) and picture.startswith(("http", "data:"))
    name, request = item["name"], sent[0]
    yield equal(f"{name} calls", len(sent), item["number_of_calls"])
    yield equal(f"{name} messages", _with_places(request["messages"], item["prompt"], as_address), item["messages"])
    parameters = {key: value for key, value in request.items() if key != "messages"}
    form = parameters["response_format"]["json_schema"]
    yield equal(f"{name} schema", form["schema"], response_schema(task))
    form["schema"] = "<SCHEMA, see pe_schemas.json>"
    yield equal(f"{name} parameters", parameters, item["parameters"])


def _filled(schema: dict[str, Any]) -> Any:
    """A value that fits a schema."""
    if schema["type"] == "object":
        return {key: _filled(value) for key, value in schema["properties"].items()}
    if schema["type"] == "array":
        return [_filled(schema["items"])]
    return {"string": "x", "integer": 1, "number": 1.0}[schema["type"]]


def _picture(item: dict[str, Any], folder: Path) -> Any:
    """The picture that a recorded request was made with: none, an address, a file, or an image."""
    content = item["messages"][0]["content"]
    if len(content) == 1:
        return None
    url = content[1]["image_url"]["url"]
    if "<" not in url:
        return url
    image = Image.new("RGBA", (6, 4), (200, 30, 30, 255))
    mime = url[len("data:image/") :].split(";")[0]
    if mime == "jpeg" and "path" not in item["name"]:
        return image
    file = folder / f"picture.{mime}"
    image.convert("RGB").save(file)
    return str(file)


def _with_places(messages: list[dict[str, Any]], prompt: str, as_address: bool) -> list[dict[str, Any]]:
    """The messages with our own instruction and the picture's bytes replaced by the names that the cases give them."""
    shown = json.loads(json.dumps(messages))
    text, *pictures = shown[0]["content"]
    if prompt in text["text"] and "{user_prompt}" not in text["text"] and "{variation_seed}" not in text["text"]:
        text["text"] = "<INSTRUCTION TEXT with the user prompt and an empty variation seed substituted>"
    for part in pictures if not as_address else []:
        head, _, data = part["image_url"]["url"].partition(";base64,")
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        if image.size == (6, 4):
            part["image_url"]["url"] = f"{head};base64,<{image.format} BYTES>"
    return shown


def _check_response(item: dict[str, Any]) -> Measure:
    try:
        got = render_markdown(read_answer(item["task"], item["response_text"]))
    except Exception as error:
        kinds = [kind.__name__ for kind in inspect.getmro(type(error))]
        return equal(item["name"], item.get("error") in kinds, True)
    return equal(item["name"], got, item.get("output"))
