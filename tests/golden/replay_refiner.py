"""Replay of the recorded results of the second stage: operators, packing and windows, model, trajectories, delivery."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from ...distributed.exchange import ParallelContext
from ...distributed.layout import BankShare, RankShare
from ...magi2_core.codecs.frames import resize
from ...magi2_core.config import RefinerConfig
from ...magi2_core.dit.activation import swiglu7
from ...magi2_core.dit.norm import rms_norm
from ...magi2_core.dit.rope import rotary_bands, rotary_table, rotate
from ...magi2_core.dit.runs import Run
from ...magi2_core.dit.weights import Tensors
from ...magi2_core.events import Silent
from ...magi2_core.refiner.blocks import BlockPlan, WindowSettings, plan_blocks
from ...magi2_core.refiner.layer import Layer
from ...magi2_core.refiner.model import RefinerTransformer
from ...magi2_core.refiner.parameters import refiner_tensors
from ...magi2_core.refiner.prepare import RefinerPrepared, pack_refiner, prepare_refiner, row_coords, unpack_refiner
from ...magi2_core.refiner.stage import RefinerSettings, model_evaluate, noise_table, refine
from ...magi2_core.refiner.window_attention import plan_windows, window_attention_
from ...magi2_core.sampling.schedule import make_schedule
from ..refiner_models import attended_pairs
from .limits import bf16_steps
from .replay import Case, Measure, close, equal, linear_by_modality, max_abs, norm_by_modality, rel_l2
from .replay_sampling import wide_rows

CPU = torch.device("cpu")
EXACT_BACKENDS = ("mask", "gather")
EVERYTHING = RankShare(1, 0, BankShare(0, 0, 1))


def run(case: Case) -> list[Measure]:
    """Replay a case by its name; KeyError for a family that is not known here."""
    families: dict[str, Callable[[Case], list[Measure]]] = {
        "op_norm_linear": run_norm_linear,
        "op_rope": run_rope,
        "op_swiglu7": run_swiglu7,
        "op_window_attention": run_window_attention,
        "packing": run_packing,
        "plan_real_sizes": run_plan,
        "layer": run_layer,
        "model": run_model,
        "sigma_table": run_sigma_table,
        "trajectory": run_trajectory,
        "end_to_end_tiny": run_end_to_end,
        "delivery_resize": run_delivery,
    }
    for family, replay in families.items():
        if re.fullmatch(rf"{family}(_\w+)?", case.meta.get("case", case.name)):
            return replay(case)
    raise KeyError(f"no family of refiner cases has a name like {case.name!r}")


def both(what: str, got: Tensor, expected: Tensor, tolerance: Mapping[str, float]) -> list[Measure]:
    """The two limits that most cases of the refiner state."""
    return [
        max_abs(what, got, expected, tolerance["max_abs"]),
        rel_l2(f"{what} (relative)", got, expected, tolerance["rel_l2"]),
    ]


def ulps(what: str, got: Tensor, expected: Tensor) -> Measure:
    """Distance in bf16 steps of values that were rounded to bf16, whatever they are stored in; one is allowed."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return Measure(f"{what} shape or dtype", math.inf, 1.0)
    return Measure(f"{what} in bf16 steps", bf16_steps(got, expected).max().item(), 1.0)


def run_norm_linear(case: Case) -> list[Measure]:
    t, limits = case.tensors, case.meta["tolerance"]["f32"]
    bounds = [0, *t["in.group_sizes"].cumsum(0).tolist()]
    runs = [Run(modality, *rows) for modality, rows in enumerate(pairwise(bounds))]
    x32, x16 = t["in.x_f32"], t["in.x_bf16"]
    norm1, norm3, linear1, linear3 = (t[f"weights.{name}.weight"] for name in ("norm1", "norm3", "linear1", "linear3"))
    heads = norm_by_modality(t["in.q_f32"], t["weights.qnorm3.weight"], runs)
    return [
        close("norm of fp32", rms_norm(x32, norm1), t["out.norm1_f32"], limits),
        ulps("norm of bf16", rms_norm(x16, norm1), t["out.norm1_bf16"]),
        close("norm by modality of fp32", norm_by_modality(x32, norm3, runs), t["out.norm3_f32"], limits),
        ulps("norm by modality of bf16", norm_by_modality(x16, norm3, runs), t["out.norm3_bf16"]),
        close("norm of heads", heads, t["out.qnorm3_f32"], limits),
        ulps("linear", F.linear(x16, linear1), t["out.linear1_from_bf16"]),
        ulps("linear by modality", linear_by_modality(x16, linear3, runs), t["out.linear3_from_bf16"]),
        ulps("linear from fp32", linear_by_modality(x32.bfloat16(), linear3, runs).float(), t["out.linear3_from_f32"]),
    ]


def run_rope(case: Case) -> list[Measure]:
    t, limits = case.tensors, case.meta["tolerance"]
    measures = []
    for suffix in ("", "_128"):
        bands = t[f"weights.bands{suffix}"]
        measures.append(close(f"bands{suffix}", rotary_bands(8 * len(bands)), bands, limits))
        measures.append(close(f"table{suffix}", rotary_table(t["in.coords"], bands), t[f"out.rope{suffix}"], limits))
    rotated = rotate(t["in.q"][0], rotary_table(t["in.coords"], t["weights.bands"]))
    return [*measures, close("rotated", rotated, t["out.q_rotated"][0], limits)]


def run_swiglu7(case: Case) -> list[Measure]:
    t, limits = case.tensors, case.meta["tolerance"]["f32"]
    return [
        close("fp32", swiglu7(t["in.x"]), t["out.y"], limits),
        ulps("bf16", swiglu7(t["in.x_bf16"]), t["out.y_bf16"]),
        close("fp32 of bf16", swiglu7(t["in.x_bf16"].float()), t["out.y_f32_from_bf16"], limits),
    ]


def window_of(config: Mapping[str, Any]) -> WindowSettings:
    """The window settings that a case states."""
    window = config["window"]
    return WindowSettings(
        mode="frame" if window["level"] == "frame" else window["block_mode"],
        block=(config["block_t_size"], config["block_size"], config["block_size"]),
        radius=(window["block_t_radius"], window["block_h_radius"], window["block_w_radius"]),
        win_size=window["win_size"],
        frame_receptive_field=window["frame_receptive_field"],
    )


def plan_of(meta: Mapping[str, Any]) -> BlockPlan:
    tail = meta.get("audio_tokens", 0) + meta["text_tokens"]
    return plan_blocks(tuple(meta["grid"]), tail, window_of(meta["attn_config"]))


def reference_ranges(plan: BlockPlan, mode: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of row ranges in the order in which the reference lists them (50 §6)."""
    video, tokens, blocks = plan.video, plan.tokens, list(pairwise(plan.starts))
    if plan.tail:
        chunks = [(row, min(row + plan.largest, tokens)) for row in range(video, tokens, plan.largest)]
        yield from ((block, (video, tokens)) for block in blocks)
        yield from ((chunk, (0, video)) for chunk in chunks)
        yield from ((chunk, (video, tokens)) for chunk in chunks)
    if mode != "grid":
        for block, runs in zip(blocks, plan.key_runs, strict=True):
            yield from ((block, (plan.starts[first], plan.starts[last])) for first, last in runs)
        return
    counts = [len(axis) for axis in plan.windows]
    reach = [max(last - place for place, (_, last) in enumerate(axis)) for axis in plan.windows]
    index = {place: block for block, place in enumerate(product(*map(range, counts)))}
    for offset in product(*(range(-radius, radius + 1) for radius in reach)):
        for place, block in index.items():
            seen = index.get(tuple(a + b for a, b in zip(place, offset, strict=True)))
            if seen is not None:
                yield blocks[block], blocks[seen]


def compare_ranges(case: Case, plan: BlockPlan, prefix: str) -> list[Measure]:
    ranges = list(reference_ranges(plan, window_of(case.meta["attn_config"]).mode))
    return [
        equal(f"{side} ranges", torch.tensor([pair[i] for pair in ranges]), case.tensors[f"{prefix}.{side}_ranges"])
        for i, side in enumerate(("q", "k"))
    ]


def run_window_attention(case: Case) -> list[Measure]:
    t, plan = case.tensors, plan_of(case.meta)
    measures = compare_ranges(case, plan, "in")
    for backend in EXACT_BACKENDS:
        windows = plan_windows(plan, CPU, backend)
        o = window_attention_(t["in.q"].clone(), t["in.k"], t["in.v"], windows)
        measures += both(f"o by {backend}", o, t["out.o"], case.meta["tolerance"])
        measures.append(equal("dtype", o.dtype, t["out.o"].dtype))
    return measures


def prepared_of(
    case: Case, config: RefinerConfig, bands: Tensor, backend: str = "auto", window: WindowSettings | None = None
) -> RefinerPrepared:
    meta = case.meta
    return prepare_refiner(
        config, tuple(meta["grid"]), meta["audio_tokens"], meta["text_tokens"], ParallelContext.single(), bands, CPU,
        window or window_of(meta["attn_config"]), backend,
    )  # fmt: skip


def run_packing(case: Case) -> list[Measure]:
    t, meta = case.tensors, case.meta
    prepared = prepared_of(case, RefinerConfig(), rotary_bands(128), backend="gather")
    plan = prepared.windows.blocks
    tokens = pack_refiner(prepared, t["in.x_t"], t["in.audio_x_t"], t["in.txt_feat"][0])
    modality_T = torch.cat([torch.full((count,), kind) for kind, count in enumerate(prepared.counts)])
    order = torch.cat([plan.order(), torch.arange(plan.video, plan.tokens)])
    coords = row_coords(tuple(meta["grid"]), meta["audio_tokens"], meta["text_tokens"])[order]
    measures = [
        equal("features", wide_rows(tokens, modality_T), t["out.x"]),
        equal("coordinates", coords, t["out.coords"]),
        equal("modality", modality_T, t["out.modality"]),
        equal("mask", plan.mask(), t["out.mask"].bool()),
        equal("pairs", attended_pairs(plan), int(t["out.mask"].sum())),
        equal("largest block", plan.largest, meta["max_seqlen_q"]),
        equal("rows", plan.tokens, meta["max_seqlen_k"]),
        equal("boundaries", list(prepared.cu_seqlens), meta["cu_seqlens"]),
        *compare_ranges(case, plan, "out"),
    ]
    if "out.token_order" in t:
        measures.append(equal("order", order, t["out.token_order"]))
        measures.append(equal("inverse order", order.argsort(), t["out.token_restore_order"]))
        measures.append(equal("blocks", torch.tensor(list(pairwise(plan.starts))), t["out.video_block_ranges"]))
    else:
        measures.append(equal("order", order, torch.arange(plan.tokens)))
    channels = t["in.x_t"].shape[1], t["in.audio_x_t"].shape[2]
    video, audio = unpack_refiner(t["in.model_output"], prepared, *channels)
    return [*measures, equal("video", video, t["out.depacked_video"]), equal("sound", audio, t["out.depacked_audio"])]


def run_plan(case: Case) -> list[Measure]:
    measures = []
    for row in case.meta["results"]:
        settings = WindowSettings()
        plan = plan_blocks(tuple(row["grid"]), row["text_tokens"], settings)
        ranges = list(reference_ranges(plan, settings.mode))
        queries, keys = [list(pair[0]) for pair in ranges], [list(pair[1]) for pair in ranges]
        first, last = len(row["q_ranges_first"]), len(row["q_ranges_last"])
        got = {
            "video_tokens": plan.video,
            "total_tokens": plan.tokens,
            "video_blocks": plan.blocks,
            "block_grid": [len(axis) for axis in plan.windows],
            "num_ranges": len(ranges),
            "attended_pairs": attended_pairs(plan),
            "dense_pairs": plan.tokens**2,
            "max_seqlen_q": plan.largest,
            "q_ranges_sum": sum(map(sum, queries)),
            "k_ranges_sum": sum(map(sum, keys)),
            "q_ranges_first": queries[:first],
            "k_ranges_first": keys[:first],
            "q_ranges_last": queries[-last:],
            "k_ranges_last": keys[-last:],
            "last_block": list(plan.starts[-2:]),
            "block_sizes_seen": sorted({stop - start for start, stop in pairwise(plan.starts)}),
        }
        measures += [equal(f"{row['grid']}: {key}", got[key], value) for key, value in row.items() if key in got]
        tail_chunks = -(-plan.tail // plan.largest)
        block_pairs = sum(last - first for runs in plan.key_runs for first, last in runs)
        counted = block_pairs + (plan.blocks + 2 * tail_chunks if plan.tail else 0)
        measures.append(equal("ranges counted without listing", counted, row["num_ranges"]))
    return measures


def config_of(arch: Mapping[str, Any]) -> RefinerConfig:
    return RefinerConfig.from_json(arch)


def weights_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}


def run_layer(case: Case) -> list[Measure]:
    t, meta = case.tensors, case.meta
    config = config_of(meta["arch"])
    own = Tensors(refiner_tensors(config), EVERYTHING).at("block").at("layers").at(str(meta["layer_idx"]))
    layer = Layer(config, own, torch.float32)
    layer.load_state_dict(weights_of(t), strict=True)
    measures = []
    for backend in EXACT_BACKENDS:
        prepared = prepared_of(case, config, rotary_bands(config.head_dim), backend)
        measures.append(max_abs("table", prepared.rope_SR, t["in.rope"], 2e-6))
        for dtype in ("bf16", "f32"):
            measures += _compare_layer(case, layer, prepared, dtype, f" by {backend} from {dtype}")
    return [*measures, *compare_ranges(case, prepared.windows.blocks, "in")]


def _compare_layer(case: Case, layer: Layer, prepared: RefinerPrepared, dtype: str, how: str) -> list[Measure]:
    t, hidden = case.tensors, case.tensors[f"in.hidden_{dtype}"]
    pieces = prepared.pieces(layer.mlp.up_gate_proj.blocks)
    got = {
        "attention": layer.attention(hidden.clone(), prepared),
        "mlp": torch.cat([layer.mlp(hidden[piece.rows], piece.modality) for piece in pieces]),
        "layer": layer(hidden.clone(), prepared),
    }
    measures = []
    for part, value in got.items():
        expected = t[f"out.{part}_{dtype}"]
        measures += both(part + how, value, expected, case.meta["tolerance"][part])
        measures.append(equal(f"{part}{how} dtype", value.dtype, expected.dtype))
    return measures


def sibling(case: Case, name: str) -> Path:
    """A file that a case refers to: beside it, or among the project's own cases."""
    beside = case.folder / name
    return beside if beside.exists() else Path(__file__).parent / "cases" / "refiner" / name


def tiny_model(weights: Path, arch: Mapping[str, Any]) -> RefinerTransformer:
    with torch.device("meta"):
        model = RefinerTransformer(config_of(arch))
    model.load_state_dict(weights_of(load_file(weights)), strict=True, assign=True)
    return model


def run_model(case: Case) -> list[Measure]:
    meta = case.meta
    model = tiny_model(sibling(case, meta["weights_in"]), meta["arch"])
    measures = []
    for backend in EXACT_BACKENDS:
        prepared = prepared_of(case, model.config, model.pre_adapter.rope.bands, backend)
        measures += _compare_model(case, model, prepared)
    return [*measures, *compare_ranges(case, prepared.windows.blocks, "in")]


def _compare_model(case: Case, model: RefinerTransformer, prepared: RefinerPrepared) -> list[Measure]:
    t, limits = case.tensors, case.meta["tolerance"]
    tokens = pack_refiner(prepared, t["in.x_t"], t["in.audio_x_t"], t["in.txt_feat"][0])
    embedded = model.pre_adapter(tokens, prepared, torch.float32)
    after: list[Tensor] = []

    def keep(_module: torch.nn.Module, _arguments: Any, x_SD: Tensor) -> None:
        after.append(x_SD.clone())

    hooks = [layer.register_forward_hook(keep) for layer in model.block.layers]
    rows = model(prepared, tokens)
    for hook in hooks:
        hook.remove()
    video, audio = unpack_refiner(rows, prepared, t["in.x_t"].shape[1], t["in.audio_x_t"].shape[2])
    measures = [
        *both("embedded", embedded, t["mid.embed"], limits["mid.embed"]),
        *both("table", prepared.rope_SR, t["mid.rope"], limits["mid.rope"]),
        *both("rows", rows, t["out.model_rows"], limits["out.video"]),
        *both("video", video, t["out.video"], limits["out.video"]),
        *both("sound", audio, t["out.audio"], limits["out.audio"]),
    ]
    for index, x_SD in enumerate(after):
        name = f"mid.after_layer_{index}"
        measures += both(name, x_SD, t[name], limits["mid.after_layer"])
        measures.append(equal(f"{name} dtype", x_SD.dtype, t[name].dtype))
    return measures


def run_sigma_table(case: Case) -> list[Measure]:
    table, limits = noise_table(), case.meta["tolerance"]
    value, noise = (torch.tensor([case.meta[key]], dtype=torch.float64) for key in ("value_220", "noise_220"))
    return [
        close("table", table, case.tensors["out.table"], limits),
        close("signal", table[220:221], value, limits),
        close("noise", (1 - table[220:221] ** 2).sqrt(), noise, limits),
    ]


def settings_of(meta: Mapping[str, Any]) -> RefinerSettings:
    """The settings of a trajectory: the case's defaults, then its overrides by their names in the released JSON."""
    names = {
        "video_guidance": "video_txt_guidance_scale",
        "audio_guidance": "audio_txt_guidance_scale",
        "num_inference_steps": "steps",
    }
    values: dict[str, Any] = {"width": meta["refiner_width"], "height": meta["refiner_height"], "steps": meta["steps"]}
    for source in (meta["defaults"], meta["overrides"]):
        for path, value in _flat(source):
            name = path.rpartition(".")[2].removeprefix("magi2_refiner_")
            values[names.get(name, name)] = value
    return RefinerSettings(**values)


def _flat(source: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in source.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key, value


class Recorder:
    """Replays a case's noise, and keeps the calls of the model."""

    def __init__(self, case: Case) -> None:
        self.case, self.draws = case, 0
        self.calls: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        noise = self.case.tensors[f"in.noise_{self.draws}"]
        if tuple(noise.shape) != shape:
            raise ValueError(f"noise of {shape} was asked for, {tuple(noise.shape)} was recorded")
        self.draws += 1
        return noise

    def compare(self, video: Tensor, audio: Tensor, velocities: int | None = None) -> list[Measure]:
        """The results and every call against the recorded ones, but the velocities of the first calls only, if given:
        later ones of a bf16 model magnify the rounding of all earlier steps."""
        t, meta = self.case.tensors, self.case.meta
        limits, settings = meta["tolerance"], settings_of(meta)
        sampling = settings.sampling()
        schedule = make_schedule(sampling.steps, sampling.shift)
        measures = [
            equal("calls", len(self.calls), meta["model_calls"]),
            equal("draws", self.draws, meta["noise_draws"]),
            equal("sigmas", schedule.sigmas, t["out.sigmas"]),
            equal("timesteps", torch.tensor(schedule.timesteps), t["out.timesteps"]),
            *both("video", video, t["out.video"], limits),
            equal("rows of sound", audio.shape[1], t["out.audio"].shape[1]),
        ]
        if audio.numel():
            measures += both("sound", audio, t["out.audio"], limits)
        for index, call in enumerate(self.calls):
            for name, value in zip(("x", "v", "audio_x", "audio_v"), call, strict=True):
                late = velocities is not None and index >= velocities and name.endswith("v")
                if (key := f"mid.call{index:02}_{name}") in t and not late:
                    measures += both(key, value, t[key], limits)
        return measures


def run_trajectory(case: Case) -> list[Measure]:
    t, recorder = case.tensors, Recorder(case)

    def stand_in(video: Tensor, audio: Tensor, with_prompt: bool) -> tuple[Tensor, Tensor]:
        s = t["in.context" if with_prompt else "in.context_null"].float().mean()
        velocities = torch.tanh(0.9 * video + s) - 0.3 * video, torch.tanh(0.5 * audio - s) + 0.1 * audio
        recorder.calls.append((video, velocities[0], audio, velocities[1]))
        return velocities

    video, audio = refine(
        settings_of(case.meta), t["in.latent"], t["in.audio_latent"], stand_in, recorder.draw, Silent()
    )
    return recorder.compare(video, audio)


def run_end_to_end(case: Case) -> list[Measure]:
    t, meta, recorder = case.tensors, case.meta, Recorder(case)
    weights = sibling(case, re.search(r"(\w+)\.safetensors", meta["description"])[0])
    model = tiny_model(weights, json.loads(weights.with_suffix(".json").read_text(encoding="utf-8"))["arch"])
    triples = re.findall(r"\((\d+),\s*(\d+),\s*(\d+)\)", meta["description"])  # the case states its window in prose
    block, radius = (tuple(map(int, found)) for found in triples)
    settings, latent, sound = settings_of(meta), t["in.latent"], t["in.audio_latent"]
    window = WindowSettings("grid", block, radius)
    prompt, negative = t["in.context"][0], t["in.context_null"][0]
    own = model_evaluate(
        model, settings, latent.shape[2], sound.shape[1], prompt, negative, Silent(), window=window
    )

    def evaluate(video: Tensor, audio: Tensor, with_prompt: bool) -> tuple[Tensor, Tensor]:
        velocities = own(video, audio, with_prompt)
        recorder.calls.append((video, velocities[0], audio, velocities[1]))
        return velocities

    video, audio = refine(settings, latent, sound, evaluate, recorder.draw, Silent())
    return recorder.compare(video, audio, velocities=2)


def run_delivery(case: Case) -> list[Measure]:
    frames = resize(case.tensors["in.frames"], case.meta["output_width"], case.meta["output_height"])
    expected = case.tensors["out.frames"]
    off = max_abs("levels", frames, expected, 1.0)
    share = (frames != expected).double().mean().item() if frames.shape == expected.shape else math.inf
    return [off, Measure("share of levels that differ", share, 0.001)]
