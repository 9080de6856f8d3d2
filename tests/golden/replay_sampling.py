"""Replay of the recorded sampling results: schedule, solver, guidance, packing, noise, the loop and its geometry."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...magi2_core.codecs.picture import prepare_picture
from ...magi2_core.dit.inputs import Modality, PackedTokens
from ...magi2_core.errors import RequestError
from ...magi2_core.events import Silent
from ...magi2_core.sampling import geometry
from ...magi2_core.sampling.denoise import SamplingSettings, denoise
from ...magi2_core.sampling.guidance import GuidanceSettings, cut_scale, frame_scale, guide_pair
from ...magi2_core.sampling.noise import clip_noise, draw_noise, noise_generator
from ...magi2_core.sampling.packing import (
    Conditions,
    PackedRequest,
    PackingOptions,
    grid_coords,
    pack_request,
    pack_tokens,
    unpack,
)
from ...magi2_core.sampling.schedule import make_schedule
from ...magi2_core.sampling.unipc import UniPC, predictor_order
from .replay import Case, Measure, equal, max_abs


def run(case: Case) -> list[Measure]:
    """Replay a case by its kind; KeyError for a kind that is not known here."""
    families: dict[str, Callable[[Case], list[Measure]]] = {
        "scheduler": run_solver,
        "schedule_tables": run_tables,
        "cfg": run_guidance,
        "packing": run_packing,
        "noise": run_noise,
        "denoise_loop": run_loop,
        "geometry": run_geometry,
    }
    if case.meta.get("kind") not in families:
        raise KeyError(f"no family of sampling cases is called {case.meta.get('kind')!r}")
    return families[case.meta["kind"]](case)


def run_solver(case: Case) -> list[Measure]:
    config, tensors = case.meta["config"], case.tensors
    tolerance = case.meta["tolerance"]["samples_abs"]
    schedule = make_schedule(config["num_inference_steps"], config["shift"])
    solver = UniPC(schedule)
    sample = tensors["in.initial_sample"]
    samples, corrected, predictions = [], [], []
    for velocity in tensors["in.velocity"]:
        sample = solver.step(velocity, sample)
        samples.append(sample)
        corrected.append(solver.corrected)
        predictions.append(solver.prediction)
    orders = [predictor_order(k, schedule.steps) for k in range(schedule.steps)]
    expected = [(s["predictor_order"], s["corrector_order"]) for s in case.meta.get("orders_per_step", [])]
    measures = [
        equal("timesteps", torch.tensor(schedule.timesteps), tensors["out.timesteps"]),
        equal("sigmas", schedule.sigmas, tensors["out.sigmas"]),
        max_abs("samples", torch.stack(samples), tensors["out.samples"], tolerance),
        equal("dtype", samples[-1].dtype, tensors["out.samples"].dtype),
    ]
    if expected:
        measures.append(equal("orders", list(zip(orders, [None, *orders[:-1]], strict=True)), expected))
    for key, got in (("mid.corrected_sample", corrected), ("mid.x0", predictions)):
        if key in tensors:
            measures.append(max_abs(key, torch.stack(got), tensors[key], tolerance))
    return measures


def run_tables(case: Case) -> list[Measure]:
    measures = []
    for key, expected in case.tensors.items():
        name, _, steps = key.rpartition("_")
        schedule = make_schedule(int(steps), case.meta["shift"])
        got = torch.tensor(schedule.timesteps) if name == "out.timesteps" else schedule.sigmas
        measures.append(equal(key, got, expected))
    return measures


def guidance_of(config: dict[str, Any]) -> GuidanceSettings:
    return GuidanceSettings(**config)


def run_guidance(case: Case) -> list[Measure]:
    tensors, tolerance = case.tensors, case.meta["tolerance"]["abs"]
    settings = guidance_of(case.meta["config"])
    video, audio = tensors["in.model_video"], tensors["in.model_audio"]
    first = frame_scale(settings, video.shape[2], video.device)
    measures = []
    for index, timestep in enumerate(tensors["in.t"].tolist()):
        scale = cut_scale(first, settings, timestep)
        measures.append(max_abs(f"scale {index}", scale, tensors[f"mid.video_scale_{index}"], 0.0))
        got = {"video": guide_pair(video, scale, tensors["in.latent"], settings)}
        if audio.numel():
            audio_scale = float(settings.audio_txt_guidance_scale)
            measures.append(equal("audio scale", audio_scale, case.meta["audio_scales"][index]))
            got["audio"] = guide_pair(audio, audio_scale, tensors["in.audio_latent"], settings)
        for name, value in got.items():
            expected = tensors[f"out.cfg_{name}_{index}"]
            measures.append(max_abs(f"{name} {index}", value, expected, tolerance))
            measures.append(equal(f"{name} {index} dtype", value.dtype, expected.dtype))
    return measures


def packed_request(case: Case, proxy: dict[str, Any], use_ref_for_uncond: bool) -> PackedRequest:
    """The request of a packing or loop case."""
    tensors = case.tensors
    images, marks = tensors.get("in.ref_image_feat"), tensors.get("in.ref_image_special_token")
    pictures = {}
    # the reference takes a picture without its mark for none; the product refuses it (20 §10)
    if images is not None and marks is not None and images.shape[1]:
        pictures = {"images_MChw": images[0, :, :, 0], "markers_MD": marks[0]}
    conditional = Conditions(tensors["in.txt_feat"][0], **pictures)
    unconditional = Conditions(tensors["in.null_txt_feat"][0], **pictures)
    if not use_ref_for_uncond:
        unconditional = unconditional.without_picture_content()
    options = PackingOptions(
        time_width=proxy.get("time_channel_dim", 64),
        time_token=proxy.get("add_time_token", False),
        stretch_rope=proxy.get("spatial_rope_interpolation", "extra") == "inter",
    )
    grid = tuple(tensors["in.latent"].shape[2:])
    return pack_request(grid, tensors["in.audio_latent"].shape[1], [conditional, unconditional], options=options)


def wide_rows(tokens: PackedTokens, modality_T: Tensor) -> Tensor:
    """The reference's single matrix of all rows, each left-aligned in the widest segment's width (20 §6.2)."""
    width = max(rows.shape[1] for rows in (tokens.video_NC, tokens.audio_NC, tokens.text_NC))
    wide = torch.zeros(len(modality_T), width)
    wide[modality_T == Modality.VIDEO, : tokens.video_NC.shape[1]] = tokens.video_NC
    wide[modality_T == Modality.AUDIO, : tokens.audio_NC.shape[1]] = tokens.audio_NC
    wide[modality_T >= Modality.TEXT, : tokens.text_NC.shape[1]] = tokens.text_NC
    return wide


def padded_to_48(arguments: dict[str, Any]) -> dict[str, Any]:
    """The rows that the reference appends when it runs on several ranks, and the product does not (20 §6.6)."""
    rows = -len(arguments["modality_mapping"]) % 48
    if not rows:
        return arguments
    more = {
        "token_sequence": torch.zeros(rows, arguments["token_sequence"].shape[1]),
        "coords_mapping": grid_coords((rows, 1, 1), (rows, 1, 1)),
        "modality_mapping": torch.full((rows,), Modality.TEXT, dtype=torch.int32),
        "time_token_sequence": torch.zeros(rows, arguments["time_token_sequence"].shape[1]),
    }
    padded: dict[str, Any] = {key: torch.cat([arguments[key], rows_]) for key, rows_ in more.items()}
    boundaries = arguments["cu_seqlens"]
    padded["cu_seqlens"] = torch.cat([boundaries, boundaries[-1:] + rows])
    return padded


def model_arguments(request: PackedRequest, tokens: PackedTokens) -> dict[str, Any]:
    """What the reference hands to its transformer, in its form."""
    layout = request.layout
    time_Tc = tokens.time_Tc
    return {
        "token_sequence": wide_rows(tokens, layout.modality_T),
        "coords_mapping": layout.coords_T9,
        "modality_mapping": layout.modality_T,
        "cu_seqlens": torch.tensor(layout.cu_seqlens, dtype=torch.int32),
        "time_token_sequence": torch.zeros(layout.tokens, 0) if time_Tc is None else time_Tc,
    }


def run_packing(case: Case) -> list[Measure]:
    meta, tensors = case.meta, case.tensors
    use_ref_for_uncond = meta.get("cfg", {}).get("use_ref_for_uncond", True)
    request = packed_request(case, meta.get("data_proxy_config", {}), use_ref_for_uncond)
    time = (torch.tensor(meta["timestep"], dtype=torch.float32) / 1000).item()
    tokens = pack_tokens(request, tensors["in.latent"], tensors["in.audio_latent"], time)
    got = model_arguments(request, tokens)
    if meta.get("simulated_cp_ep_size", 1) > 1:
        got = padded_to_48(got)
    measures = [
        equal(key, got[key], tensors[f"out.{key}"])
        for key in ("token_sequence", "coords_mapping", "modality_mapping", "cu_seqlens")
    ]
    tolerance = meta["tolerance"]["time_token_sequence_abs"]
    measures.append(
        max_abs("time_token_sequence", got["time_token_sequence"], tensors["out.time_token_sequence"], tolerance)
    )
    lengths = got["cu_seqlens"].diff()
    measures.append(equal("max_seqlen", lengths.max().item(), meta["max_seqlen"]))
    measures.append(equal("padding", len(got["modality_mapping"]) - request.layout.tokens, meta.get("pad_size", 0)))
    real_rows = tensors["in.model_output"][: request.layout.tokens]
    video, audio = unpack(real_rows, request, tensors["in.latent"].shape[1], tensors["in.audio_latent"].shape[2])
    return [*measures, equal("video", video, tensors["out.video"]), equal("audio", audio, tensors["out.audio"])]


def run_noise(case: Case) -> list[Measure]:
    tolerance = case.meta["tolerance"]["abs"]
    measures = []
    for draw in case.meta["draws"]:
        _, video_channels, *grid = draw["video_shape"]
        _, audio_length, audio_channels = draw["audio_shape"]
        numbers = partial(draw_noise, generator=noise_generator(draw["seed"], "cpu"))
        video, audio = clip_noise(numbers, tuple(grid), audio_length, video_channels, audio_channels)
        for name, noise in (("video", video), ("audio", audio)):
            measures += _compare_noise(case, draw, name, noise, tolerance)
    return measures


def _compare_noise(case: Case, draw: dict[str, Any], name: str, noise: Tensor, tolerance: float) -> list[Measure]:
    what = f"{name} {draw['key']}"
    expected = case.tensors[f"out.{name}_{draw['key']}"]
    got = noise if draw[f"{name}_stored"] == "full" else torch.cat([noise.flatten()[:64], noise.flatten()[-64:]])
    measures = [max_abs(what, got, expected, tolerance)]
    if f"{name}_mean" in draw:
        mean = torch.tensor(draw[f"{name}_mean"], dtype=torch.float64)
        measures.append(max_abs(f"{what} mean", noise.double().mean(), mean, tolerance))
    # the hash holds for one torch build with wide vectors; elsewhere the values count (the case's own tolerance note)
    if case.meta.get("torch_version") == torch.__version__ and torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        digest = hashlib.sha256(noise.numpy().tobytes()).hexdigest()
        measures.append(equal(f"{what} sha256", digest, draw[f"{name}_sha256"]))
    return measures


def stand_in_model(weights: dict[str, Tensor], arguments: dict[str, Any]) -> Tensor:
    """The small model that the loop cases define in words."""
    x, coords = arguments["token_sequence"], arguments["coords_mapping"]
    modality, time = arguments["modality_mapping"], arguments["time_token_sequence"]
    video_channels, audio_channels, text_channels = (weights[key].shape[0] for key in ("Wv", "Wa", "Wt"))
    y = torch.zeros(len(x), max(video_channels, audio_channels))
    bounds = arguments["cu_seqlens"].tolist()
    for start, end in pairwise(bounds):
        rows, kinds = x[start:end], modality[start:end]
        places, times = 0.05 * coords[start:end, :3], time[start:end]
        video, audio, text = (kinds == kind for kind in (Modality.VIDEO, Modality.AUDIO, Modality.TEXT))
        shared = torch.zeros(weights["Wt"].shape[1])
        if text.any():
            shared = rows[text, :text_channels].mean(0) @ weights["Wt"]
        shared = shared + rows[video, :video_channels].mean(0) @ weights["Wg"]
        for kind, channels, name in ((video, video_channels, "v"), (audio, audio_channels, "a")):
            inner = rows[kind, :channels] @ weights[f"W{name}"] + times[kind] @ weights[f"Wq{name}"]
            inner = inner + places[kind] @ weights[f"Wc{name}"] + shared @ weights[f"G{name}"]
            y[start:end][kind, :channels] = torch.tanh(inner)  # y[start:end] is a view
    return y


def run_loop(case: Case) -> list[Measure]:
    config, tensors = case.meta["config"], case.tensors
    settings = SamplingSettings(config["num_inference_steps"], config["shift"], guidance_of(config["cfg"]))
    weights = {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}
    request = packed_request(case, config.get("data_proxy", {}), settings.guidance.use_ref_for_uncond)
    calls: list[dict[str, Any]] = []
    inputs, outputs = [], []

    def evaluate(video: Tensor, audio: Tensor, time: float) -> tuple[Tensor, Tensor]:
        arguments = model_arguments(request, pack_tokens(request, video, audio, time))
        y = stand_in_model(weights, arguments)
        calls.append({**arguments, "out": y})
        inputs.append((video, audio))
        outputs.append(unpack(y, request, video.shape[1], audio.shape[2]))
        return outputs[-1]

    video, audio = denoise(settings, tensors["in.latent"], tensors["in.audio_latent"], evaluate, Silent())
    after = [*inputs[1:], (video, audio)]
    early, late = case.meta["tolerance"]["first_step_abs"], case.meta["tolerance"]["final_abs"]
    compare_late = all_but_isolated if settings.guidance.use_skimmed_cfg_linear else max_abs
    timesteps = make_schedule(settings.steps, settings.shift).timesteps
    measures = [
        equal("timesteps", torch.tensor(timesteps), tensors["out.timesteps"]),
        *_compare_first_call(case, calls[0], early),
        compare_late("video", video, tensors["out.latent"], late),
        compare_late("audio", audio, tensors["out.audio_latent"], late),
    ]
    for index, name in enumerate(("latent", "audio_latent")):
        got, expected = torch.stack([pair[index] for pair in after]), tensors[f"mid.steps_{name}_after"]
        measures.append(max_abs(f"{name} after step 1", got[0], expected[0], early))
        measures.append(compare_late(f"{name} after every step", got, expected, late))
    for index, name in enumerate(("video", "audio")):
        got, expected = torch.stack([pair[index] for pair in outputs]), tensors[f"mid.steps_model_{name}"]
        measures.append(max_abs(f"velocities of the {name} at step 1", got[0], expected[0], early))
        measures.append(compare_late(f"velocities of the {name}", got, expected, late))
    return measures


def all_but_isolated(what: str, got: Tensor, expected: Tensor, tolerance: float) -> Measure:
    """Largest difference but for one element in a hundred: rounding may flip a sign test of the skimming (20 §12)."""
    strict = max_abs(what, got, expected, tolerance)
    if got.shape != expected.shape or not got.isfinite().all():
        return strict
    return replace(strict, error=(got - expected).abs().double().flatten().quantile(0.99).item())


def _compare_first_call(case: Case, call: dict[str, Any], tolerance: float) -> list[Measure]:
    recorded = {
        "token_sequence": "x",
        "coords_mapping": "coords",
        "modality_mapping": "modality",
        "cu_seqlens": "cu_seqlens",
        "time_token_sequence": "time",
        "out": "out",
    }
    measures = []
    for key, name in recorded.items():
        expected = case.tensors[f"mid.step0_model_{name}"]
        if key in ("time_token_sequence", "out"):
            # cosines of arguments up to 999 in fp32: 20 §12 allows 2e-4 for the rows themselves
            measures.append(max_abs(f"first call, {name}", call[key], expected, 2e-4 if name == "time" else tolerance))
        else:
            measures.append(equal(f"first call, {name}", call[key], expected))
    return measures


def run_geometry(case: Case) -> list[Measure]:
    meta = case.meta
    measures = [
        equal(f"{row['seconds']} s", geometry.clip_lengths(row["seconds"]),
              (row["video_latent_length"], row["audio_latent_length"]))
        for row in meta.get("lengths", [])
    ]
    for row in meta.get("reference_images", []):
        measures += _compare_reference(row)
    for row in meta.get("degenerate_images", []):
        try:
            got: object = geometry.reference_size(*row["image"], *row["gen"])
        except RequestError:
            got = "refused"
        measures.append(equal(f"picture {row['image']}", got, "refused"))
    return measures + _compare_pictures(case)


def _compare_reference(row: dict[str, Any]) -> list[Measure]:
    sizes = [row[key] for key in ("image_width", "image_height", "gen_width", "gen_height")]
    width, height = geometry.reference_size(*sizes)
    grid = height // geometry.SPATIAL_STRIDE, width // geometry.SPATIAL_STRIDE
    clip = geometry.latent_grid(row["gen_width"], row["gen_height"])
    video, audio, picture = clip[0] * clip[1] * clip[2], geometry.clip_lengths()[1], 1 + grid[0] * grid[1]
    got = ([height, width], list(grid), picture, video, audio, video + audio + picture)
    keys = ("vae_input", "ref_latent_hw", "ref_tokens_per_branch", "video_tokens", "audio_tokens")
    return [equal(f"picture {sizes}", got, tuple(row[key] for key in (*keys, "per_branch_without_text")))]


def _compare_pictures(case: Case) -> list[Measure]:
    """The encoder's input of small pictures, which also must be its own rounding to bfloat16 (20 §12)."""
    from PIL import Image

    measures = []
    for key, expected in case.tensors.items():
        if not key.startswith("out.vae_input_"):
            continue
        index = key.rpartition("_")[2]
        picture = Image.fromarray(case.tensors[f"in.image_{index}"].numpy())
        height, width = case.tensors[f"in.gen_hw_{index}"].tolist()
        pixels = prepare_picture(picture, width, height)
        measures.append(max_abs(f"pixels {index}", pixels, expected, case.meta["tolerance"]["vae_input_abs"]))
        measures.append(equal(f"pixels {index} rounded", pixels, pixels.bfloat16().float()))
    return measures
