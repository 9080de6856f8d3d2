"""Replay of the codec cases: encoder, decoders, latent scale, resampling, pictures, frames, lengths, files (40 §10)."""

from __future__ import annotations

import io
import math
import re
import tempfile
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ...magi2_core.codecs import frames, latent_scale, media, picture
from ...magi2_core.codecs.oobleck_decoder import OOBLECK_PREFIX, OobleckConfig, OobleckDecoder
from ...magi2_core.codecs.resample import to_real_time
from ...magi2_core.codecs.turbo_decoder import TURBO_PREFIX, TurboConfig, TurboDecoder, UpBlock
from ...magi2_core.codecs.turbo_windows import decode_window, gather_blocks, plan_windows
from ...magi2_core.codecs.wan_encoder import WanEncoder, WanEncoderConfig
from ...magi2_core.errors import RequestError
from ...magi2_core.sampling.geometry import clip_lengths, decoded_frames
from ...stages.decode import image_from_frames
from .replay import Case, Measure, close, equal, rel_l2


def run(case: Case) -> list[Measure]:
    """Dispatch on the family, which is how the case's name begins; ValueError for one that is not known."""
    for family, replay in FAMILIES.items():
        if case.name.startswith(family):
            return replay(case)
    raise ValueError(f"The codec case {case.name} is of no known family; known are {', '.join(FAMILIES)}.")


def load(build: Callable[[], nn.Module], case: Case, prefix: str, dtype: torch.dtype = torch.float32) -> Any:
    """A network built on the meta device and filled strictly with the case's weights."""
    with torch.device("meta"):
        network = build()
    start = "weights." + prefix
    weights = {name[len(start):]: tensor.to(dtype) for name, tensor in case.tensors.items() if name.startswith(start)}
    network.load_state_dict(weights, strict=True, assign=True)
    return network


def run_wan_encoder(case: Case) -> list[Measure]:
    keys = ("dim", "z_dim", "dim_mult", "num_res_blocks", "temporal_downsample")
    given: dict[str, Any] = {key: case.meta["config"][key] for key in keys if key in case.meta["config"]}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    config = WanEncoderConfig(**given)
    encoder, tolerance = load(lambda: WanEncoder(config), case, ""), case.meta["tolerance"]
    measures = []
    for name, x in case.tensors.items():
        if not (found := re.fullmatch(r"in\.x(\d+)", name)):
            continue
        got = {"mu": encoder(x)}
        got["latent"] = latent_scale.normalise(got["mu"])
        for kind, tensor in got.items():
            key = f"out.{kind}{found[1]}"
            if key in case.tensors:
                measures.append(close(key, tensor, case.tensors[key], tolerance))
        recorded = {key: mid for key, mid in case.tensors.items() if key.startswith(f"mid.x{found[1]}.")}
        measures += [close(key, wan_intermediate(encoder, x, key.rsplit(".", 1)[1]), mid, tolerance)
                     for key, mid in recorded.items()]
    return measures


def wan_intermediate(encoder: WanEncoder, x: Tensor, name: str) -> Tensor:
    """What a part of the encoder gives; `name` is that of the recording."""
    trunk = encoder.encoder
    modules = {"conv_in": trunk.conv1, "encoder": trunk}
    modules |= {f"down{i}": block for i, block in enumerate(trunk.downsamples)}
    modules |= {f"middle{i}": block for i, block in enumerate(trunk.middle)}
    return record(modules[name], lambda: encoder(x))


def record(module: nn.Module, forward: Callable[[], Any]) -> Tensor:
    """The output of a module during a forward pass."""
    outputs: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.clone()))
    try:
        forward()
    finally:
        handle.remove()
    return outputs[-1]


def run_normalisation(case: Case) -> list[Measure]:
    t = case.tensors
    std = torch.tensor(latent_scale.LATENT_STD)
    measures = [
        equal("mean", torch.tensor(latent_scale.LATENT_MEAN), t["out.mean"]),
        equal("std", std, t["out.std"]),
        equal("inverse std", 1.0 / std, t["out.inv_std"]),
        either("normalised", latent_scale.normalise(t["in.mu"]), t["out.normalised"], 1e-6),
    ]
    for kind, source in (("f32", "in.z"), ("bf16", "in.z_bf16")):
        if source in t:
            got, expected = latent_scale.denormalise(t[source]), t[f"out.denormalised_{kind}"]
            exact = kind == "bf16"
            measures.append(equal(f"denormalised {kind}", got, expected) if exact
                            else either(f"denormalised {kind}", got, expected, 1e-6))
    return measures


def either(what: str, got: Tensor, expected: Tensor, tolerance: float) -> Measure:
    """The smaller of absolute and relative error, at its worst."""
    absolute = (got.double() - expected.double()).abs()
    relative = absolute / expected.double().abs().clamp_min(1e-30)
    return Measure(what, torch.minimum(absolute, relative).max().item(), tolerance)


def run_turbo(case: Case) -> list[Measure]:
    config, t = TurboConfig.from_json(case.meta["config"]), case.tensors
    decoder, tolerance = load(lambda: TurboDecoder(config), case, TURBO_PREFIX), case.meta["tolerance"]
    fp32 = tolerance["float32"]
    measures = []
    for latents, stated in case.meta.get("windows", {}).items():
        windows = plan_windows(int(latents), config)
        measures.append(equal(f"windows of {latents}", [[w.latents, w.first] for w in windows], stated["windows"]))
        measures.append(equal(f"frames of {latents}", windows[-1].end, stated["frames"]))
    for name, z in t.items():
        if name.startswith("in.z_"):
            expected = t["out.x" + name[len("in.z"):]]
            got = decode_clip(decoder, z)
            strided = z.shape[2] >= 14  # long outputs are stored thinned out
            measures.append(close(name, got[..., ::3, ::5] if strided else got, expected, fp32))
    for first in (True, False):
        if (key := f"out.dec_first_{int(first)}") in t:
            measures.append(close(key, decoder(t["in.dec_z"], first), t[key], fp32))
    measures += [close(key, turbo_intermediate(decoder, t["in.dec_z"], key.rsplit(".", 1)[1]), mid, fp32)
                 for key, mid in t.items() if key.startswith("mid.dec_first_1.")]
    if "in.zb" in t:
        rounded = load(lambda: TurboDecoder(config), case, TURBO_PREFIX, torch.bfloat16)
        measures.append(rel_l2("bfloat16 decode", decode_clip(rounded, t["in.zb"]), t["out.xb"],
                               tolerance["bfloat16"]["rel_l2"]))
    return measures


def decode_clip(decoder: TurboDecoder, z: Tensor) -> Tensor:
    """The sliding-window decode of a whole clip, [1, 3, frames, H, W] raw values."""
    windows = plan_windows(z.shape[2], decoder.config)
    blocks = (decode_window(decoder, z, window, lambda x: x[0].permute(1, 2, 3, 0)) for window in windows)
    return gather_blocks(blocks, decoded_frames(z.shape[2])).permute(3, 0, 1, 2).unsqueeze(0)


def turbo_intermediate(decoder: TurboDecoder, z: Tensor, name: str) -> Tensor:
    """What the decoder has made after one of its parts, as the first window; `name` is that of the recording."""
    parts: dict[str, Any] = {"conv_in": decoder.conv_in, "mid_block": decoder.mid_block.steps()[-1].module}
    for i, block in enumerate(decoder.up_blocks):
        assert isinstance(block, UpBlock)
        parts[f"up{i}"] = block.steps()[-1].module
    return record(parts[name], lambda: decoder(z, True))


def run_oobleck(case: Case) -> list[Measure]:
    config, tolerance = OobleckConfig.from_json(case.meta["config"]), case.meta["tolerance"]
    decoder = load(lambda: OobleckDecoder(config), case, OOBLECK_PREFIX)
    decoder.fold()
    measures = []
    for name, latent in case.tensors.items():
        if not (found := re.fullmatch(r"in\.lat_(\d+)", name)):
            continue
        z, length = latent.T.unsqueeze(0), found[1]
        wave = decoder(z)
        for key, got in ((f"out.wave_{length}", wave), (f"out.audio_{length}", to_real_time(wave)[0].T)):
            if key in case.tensors:
                measures.append(close(key, got, case.tensors[key], tolerance))
        for key, mid in case.tensors.items():
            if layer := re.fullmatch(rf"mid\.lat_{length}\.layer(\d+)", key):
                index = min(int(layer[1]), len(decoder.layers) - 1)  # the last one recorded is an identity
                got = record(decoder.layers[index], partial(decoder, z))
                measures.append(close(key, got, mid, tolerance))
    return measures


def run_resample(case: Case) -> list[Measure]:
    t, tolerance = case.tensors, case.meta["tolerance"]
    measures = []
    for name, x in t.items():
        if found := re.fullmatch(r"in\.(\w+_\d+)", name):
            got = to_real_time(x.T).T
            measures.append(close(name, got, t[f"out.{found[1]}"], tolerance))
    if "out.long" in t:
        k = torch.arange(512000, dtype=torch.float64)
        left, right = torch.zeros_like(k), torch.zeros_like(k)
        for i, hz in enumerate(case.meta["f"]):
            left += 0.15 * torch.sin(2 * math.pi * hz * k / 51200 + 0.3 * i)
            right += 0.10 * torch.cos(2 * math.pi * hz * k / 51200 + 0.1 * i)
        got = to_real_time(torch.stack([left, right]).float()).T[t["in.long_index"]]
        measures.append(close("long", got, t["out.long"], {"atol": 5e-5, "rtol": 0.0}))
    return measures


def run_image_preprocess(case: Case) -> list[Measure]:
    height, width = case.meta["generation_hw"]
    measures = []
    for name, stated in case.meta["cases"].items():
        image = recorded_picture(case.tensors, name)
        fit = picture.fit_picture(*image.size, width, height)
        canvas = picture.letterbox(image, fit)
        pixels = picture.prepare_picture(image, width, height)
        measures += geometry_measures(name, fit, stated)
        measures.append(equal(f"{name} pixels", list(pixels.shape), stated["pixels"]))
        expected = {
            f"mid.{name}.canvas": torch.from_numpy(np.array(canvas)),
            f"mid.{name}.f32": picture.to_pixels(canvas.resize(fit.final, Image.Resampling.LANCZOS)),
            f"out.{name}": pixels.to(torch.bfloat16),
        }
        measures += [equal(key, got, case.tensors[key]) for key, got in expected.items() if key in case.tensors]
        if f"out.{name}" in case.tensors:  # every value must already be one of bfloat16
            measures.append(equal(f"{name} rounding", pixels, case.tensors[f"out.{name}"].float()))
    return measures


def recorded_picture(tensors: dict[str, Tensor], name: str) -> Image.Image:
    """A case's picture, written as a file and read as the product reads one."""
    if f"in.{name}_file" in tensors:
        content = bytes(tensors[f"in.{name}_file"].numpy())
    else:
        pixels = tensors[f"in.{name}"].numpy()
        buffer = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint16) if pixels.dtype == np.int32 else pixels).save(buffer, "PNG")
        content = buffer.getvalue()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture"
        path.write_bytes(content)
        return picture.read_picture(path)


def geometry_measures(name: str, fit: picture.PictureFit, stated: dict[str, Any]) -> list[Measure]:
    """Compare the sizes that a preprocessing case states."""
    measures = [equal(f"{name} target", list(fit.canvas[::-1]), stated["target_hw"])]
    if "resizes_wh" in stated:
        made = [list(fit.resized), list(fit.canvas), list(fit.final)]
        (_, first), (second, final) = stated["resizes_wh"]
        measures.append(equal(f"{name} resizes", made, [first, second, final]))
    if "paste_xy" in stated:
        measures.append(equal(f"{name} place", [list(fit.place)], stated["paste_xy"]))
    if "latent" in stated:
        measures.append(equal(f"{name} latent", [fit.final[1] // 16, fit.final[0] // 16], stated["latent"][-2:]))
    return measures


def run_image_fullsize(case: Case) -> list[Measure]:
    found = re.search(r"generation (\d+)x(\d+)", case.meta["what"])
    if found is None:
        raise ValueError("The case does not state its generation size.")
    height, width = int(found[1]), int(found[2])
    y, x = (torch.arange(n) for n in case.meta["source_hw"])
    y, x = y.view(-1, 1, 1), x.view(1, -1, 1)
    channel = torch.arange(3).view(1, 1, 3)
    source = ((3 * x + 5 * y + ((x * y) % 17) * (channel + 1) * 7) % 256).to(torch.uint8)
    image = Image.fromarray(source.numpy())
    fit = picture.fit_picture(*image.size, width, height)
    canvas = torch.from_numpy(np.array(picture.letterbox(image, fit)))
    pixels, t = picture.prepare_picture(image, width, height), case.tensors
    resizes = [[list(image.size), list(fit.resized)], [list(fit.canvas), list(fit.final)]]
    return [
        equal("sizes", resizes, case.meta["resizes_wh"]),
        equal("pixels", list(pixels.shape), case.meta["pixels"]),
        equal("place", [list(fit.place)], case.meta["paste_xy"]),
        equal("canvas", canvas[::23, ::29], t["mid.canvas_sample"]),
        equal("sample", pixels[0, :, 0, ::23, ::29], t["out.sample"].float()),
        close("mean", pixels.double().mean(), t["out.mean"], {"atol": 0.0, "rtol": 1e-5}),
        close("standard deviation", pixels.double().std(), t["out.std"], {"atol": 0.0, "rtol": 1e-5}),
    ]


def run_image_geometry(case: Case) -> list[Measure]:
    return [geometry_row(row) for row in case.meta["rows"]]


def geometry_row(row: dict[str, Any]) -> Measure:
    """One picture size at one generation size; a row with an error must be refused in a sentence."""
    (height, width), name = row["gen_hw"], f"{row['src_wh']} for {row['gen_hw']}"
    try:
        fit = picture.fit_picture(row["src_wh"][0], row["src_wh"][1], width, height)
    except RequestError:
        return equal(f"{name} refused", True, "error" in row)
    made = {
        "target_hw": list(fit.canvas[::-1]),
        "first_resize_wh": list(fit.resized),
        "paste_xy": list(fit.place),
        "second_resize_wh": list(fit.final),
        "latent_hw": [fit.final[1] // 16, fit.final[0] // 16],
    }
    return equal(name, made, {key: value for key, value in row.items() if key not in ("gen_hw", "src_wh")})


def run_frames(case: Case) -> list[Measure]:
    t = case.tensors
    measures = []
    if "in.decoded_bf16" in t:
        made = frames.to_uint8(t["in.decoded_bf16"])
        measures.append(equal("frames", made, t["out.frames_u8"]))
        saved = (image_from_frames(made) * 255).to(torch.uint8)
        measures.append(equal("frames from IMAGE", saved, t["out.frames_u8"]))
    for key, expected in t.items():
        if size := re.fullmatch(r"out\.resize_w(\d+)_h(\d+)", key):
            got = frames.resize(t["in.resize_u8"], int(size[1]), int(size[2]))
            difference = (got.int() - expected.int()).abs()
            # the case allows one step on 1 % of the values
            measures.append(Measure(f"{key} largest step", difference.max().item(), 1.0))
            measures.append(Measure(f"{key} share off", (difference > 0).double().mean().item(), 0.01))
    return measures


def run_lengths(case: Case) -> list[Measure]:
    return [equal(f"{seconds} s", list(clip_lengths(seconds)), [video, audio])
            for seconds, video, audio in case.meta["rows"]]


def run_mux(case: Case) -> list[Measure]:
    """Write a clip of the recorded shape and compare the facts about the file that are to hold (40 §7)."""
    import av

    video, audio = case.meta["video"], case.meta["audio"]
    rate, ticks = Fraction(video["average_rate"]), audio["duration_ticks"]
    shade = torch.linspace(0, 255, video["frames"]).to(torch.uint8).view(-1, 1, 1, 1)
    tone = torch.sin(torch.arange(ticks) * (2 * math.pi * 440 / audio["rate"])) * 1.5
    with tempfile.TemporaryDirectory() as folder:
        path = media.write_video(Path(folder) / "clip.mp4", [shade.expand(-1, 32, 48, 3)], rate,
                                 media.Sound(tone.expand(2, -1), audio["rate"]))
        counted = media.read_back(path)
        with av.open(str(path)) as container:
            v, a = container.streams.video[0], container.streams.audio[0]
            context = v.codec_context
            tags = (context.colorspace, context.color_range, context.color_primaries, context.color_trc)
            made: dict[str, dict[str, Any]] = {
                "container": {
                    "format": "mp4" if "mp4" in container.format.name.split(",") else container.format.name,
                    "major_brand": container.metadata.get("major_brand"),
                    "duration_us": container.duration,
                },
                "video": {
                    "codec": context.name, "profile": context.profile, "pix_fmt": v.pix_fmt, "frames": counted.frames,
                    "average_rate": str(v.average_rate), "time_base": str(v.time_base), "duration_ticks": v.duration,
                    "start": v.start_time, "colour_tags": tags, "b_frames": context.has_b_frames,
                },
                "audio": {
                    "codec": a.codec_context.name, "profile": a.codec_context.profile, "rate": a.rate,
                    "layout": a.layout.name, "time_base": str(a.time_base), "duration_ticks": a.duration,
                    "start": a.start_time, "packets": a.frames,
                },
            }  # fmt: skip
    measures = [equal("samples", counted.samples, ticks)]
    for part, facts in made.items():
        for name, value in facts.items():
            if name in case.meta[part]:
                expected: Any = case.meta[part][name]
                if name == "colour_tags":  # 2 is "unspecified" of each, and 0 of the range
                    value, expected = tuple(value), (2, 0, 2, 2) if "unspecified" in expected else expected
                measures.append(equal(f"{part} {name}", value, expected))
    return measures


FAMILIES: dict[str, Callable[[Case], list[Measure]]] = {
    "wan22_encoder": run_wan_encoder,
    "normalisation": run_normalisation,
    "turbo": run_turbo,
    "oobleck_decoder": run_oobleck,
    "resample": run_resample,
    "image_preprocess": run_image_preprocess,
    "image_fullsize": run_image_fullsize,
    "image_geometry": run_image_geometry,
    "frames": run_frames,
    "lengths": run_lengths,
    "mux": run_mux,
}
