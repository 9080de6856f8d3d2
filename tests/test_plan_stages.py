"""The memory of the stages beside the transformers, counted and as scaled runs hold it, and what a plan makes of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.magi2_core.checkpoint.folder import TURBO, CheckpointFolder
from magi2_native.magi2_core.checkpoint.shard import local_bytes
from magi2_native.magi2_core.codecs.oobleck_decoder import OobleckConfig
from magi2_native.magi2_core.codecs.turbo_decoder import TurboConfig
from magi2_native.magi2_core.codecs.wan_encoder import WanEncoderConfig, encode_picture
from magi2_native.magi2_core.conditioning.parameters import TextEncoderConfig
from magi2_native.magi2_core.conditioning.text_encoder import _Qwen
from magi2_native.magi2_core.memory import plan as plan_module
from magi2_native.magi2_core.memory.plan import HEADROOM, Plan, RankPlan, make_plan
from magi2_native.magi2_core.memory.stages import (
    audio_decoder_memory,
    image_encoder_memory,
    side_stages,
    text_encoder_memory,
    video_decoder_memory,
)
from magi2_native.magi2_core.memory.table import plan_table
from magi2_native.magi2_core.refiner.parameters import refiner_tensors
from magi2_native.tests.codec_networks import oobleck, wan
from magi2_native.tests.storage_peak import StoragePeak
from torch import nn

GB = 10**9
# An eighth of the released widths; the heads of the linear attention keep theirs, because its chunks have a fixed size.
TEXT = TextEncoderConfig(
    num_hidden_layers=4,
    hidden_size=640,
    intermediate_size=2176,
    num_attention_heads=3,
    num_key_value_heads=1,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
)
ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}  # fmt: skip


def held(make: Callable[[], nn.Module], run: Callable[[Any], object]) -> int:
    """Most bytes alive at once while `run` works with the network that `make` makes, without the network's own."""
    with StoragePeak() as storage, torch.inference_mode():
        network = make()
        storage.peak = 0  # making it is no part of running it
        run(network)
    return storage.peak - sum(parameter.nbytes for parameter in network.parameters())


def test_the_text_encoders_working_memory_is_within_ten_percent_of_a_run() -> None:
    tokens, qwen = 512, _Qwen({**asdict(TEXT), "layer_types": list(TEXT.types), "rope_parameters": ROPE})

    def make() -> nn.Module:
        layer = qwen.layer(0)
        weights = {name: torch.empty(spec.shape, dtype=torch.bfloat16) for name, spec in layer.state_dict().items()}
        layer.load_state_dict({name: weight.normal_(std=0.02) for name, weight in weights.items()}, assign=True)
        return layer

    def run(layer: nn.Module) -> None:
        prompts = [torch.randn(1, tokens, TEXT.hidden_size, dtype=torch.bfloat16) for _ in range(2)]
        layer(prompts[0], position_embeddings=qwen.rope(prompts[0]), attention_mask=None)

    assert TEXT.types[0] == "linear_attention", "the kind that holds the most"
    activations = text_encoder_memory(TEXT, 2 * tokens).working - text_encoder_memory(TEXT, 0).working
    assert activations == pytest.approx(held(make, run), rel=0.10)


def test_the_picture_encoders_working_memory_is_within_ten_percent_of_a_run() -> None:
    def make() -> nn.Module:
        encoder = wan(dim=16)
        encoder.keep_one_frame()
        return encoder

    measured = held(make, lambda encoder: encode_picture(encoder, torch.zeros(1, 3, 1, 128, 128)))
    assert image_encoder_memory(WanEncoderConfig(dim=16), 128).working == pytest.approx(measured, rel=0.10)


def test_the_sound_decoders_working_memory_is_within_ten_percent_of_a_run() -> None:
    def make() -> nn.Module:
        decoder = oobleck(channels=8)
        decoder.fold()
        return decoder

    measured = held(make, lambda decoder: decoder(torch.zeros(1, 64, 30)))
    assert audio_decoder_memory(OobleckConfig(channels=8), 30).working == pytest.approx(measured, rel=0.10)


def test_the_released_stages_have_the_stated_sizes() -> None:
    text, sound = text_encoder_memory(TextEncoderConfig(), 0), audio_decoder_memory(OobleckConfig(), 250)
    assert text.working / GB == pytest.approx(0.77, abs=0.01)  # 30 §12: the largest layer
    assert sound.working == 4 * (256_000 * 128 + 3 * 512_000 * 128)
    assert image_encoder_memory(WanEncoderConfig(), 896).weights / 1e6 == pytest.approx(598.5, abs=0.1)  # 40 §3.5
    video = video_decoder_memory(TurboConfig(), 1920, 1088)
    assert video.least < 0.1 * GB < 10 * GB < video.working < 32 * 2**30  # 40 §4.5: 30.3 GiB in the reference
    assert video_decoder_memory(TurboConfig(), 896, 512).working < video.working / 4


def test_stages_that_are_absent_or_broken_are_left_out(tiny: Path, tmp_path: Path) -> None:
    names = {"text_encoder", "image_encoder", "video_decoder", "audio_decoder"}
    assert set(side_stages(CheckpointFolder(tiny), "540p")) == names
    assert side_stages(CheckpointFolder(tmp_path), "540p") == {}
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    for file in (copy / TURBO).glob("*.json"):
        file.write_text("{")
    assert set(side_stages(CheckpointFolder(copy), "540p")) == names - {"video_decoder"}


def test_the_table_has_a_row_for_each_stage_of_the_checkpoint(tiny: Path) -> None:
    rows = {row.stage: row for row in plan_table(tiny, "540p") if row.layout == "any"}
    assert list(rows) == [
        "text_encoder", "image_encoder", "video_decoder", "video_decoder in tiles", "audio_decoder",
    ]  # fmt: skip
    assert rows["video_decoder in tiles"].peak < rows["video_decoder"].peak
    assert all(" GB peak" in row.describe() for row in rows.values())
    larger = {row.stage: row.peak for row in plan_table(tiny, "1080p")}
    assert larger["video_decoder"] > rows["video_decoder"].peak


def test_a_rank_needs_what_its_largest_stage_needs_alone() -> None:
    assert RankPlan("cpu", 5, 7, 100, others=11).needed == 12 + HEADROOM
    assert RankPlan("cpu", 5, 7, 100, others=13).needed == 13 + HEADROOM


def test_a_stage_beside_the_transformer_that_does_not_fit_is_a_shortage() -> None:
    rank = RankPlan("cuda:0", 1 * GB, 1 * GB, 4 * GB, others=5 * GB)
    shortage = Plan("checkpoint", "sp1", "bfloat16", "swap", "float32", (rank,)).shortage
    assert shortage is not None
    assert shortage.startswith("Rank 0 needs 6.1 GB on cuda:0 and 4.0 GB are there. A stage beside the transformer")


def test_a_refiner_that_does_not_fit_is_said_and_no_shortage() -> None:
    rank = RankPlan("cuda:0", 1 * GB, 1 * GB, 8 * GB, refiner=9 * GB)
    plan = Plan("checkpoint", "sp1", "bfloat16", "swap", "float32", (rank,))
    assert plan.shortage is None
    assert plan.refiner_shortage == (
        "At 1080p: Rank 0 needs 10.1 GB on cuda:0 and 8.0 GB are there. Use more devices, or 540p."
    )
    assert plan.refiner_shortage in plan.describe()
    without = Plan("checkpoint", "sp1", "bfloat16", "swap", "float32", (RankPlan("cpu", 1, 1, 8),))
    assert without.refiner_shortage is None


def test_a_plan_counts_the_other_stages_of_its_checkpoint(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tiny)
    sides = side_stages(folder, "540p").values()
    (rank,) = make_plan(tiny, devices=["cpu"]).ranks
    assert rank.others == max(side.weights + side.least for side in sides)
    refiner = local_bytes(refiner_tensors(folder.refiner_config()), None)
    assert rank.refiner > refiner
    working = max(rank.working, rank.refiner - refiner, *(side.working for side in sides))
    together = rank.weights + refiner + sum(side.weights for side in sides) + working + HEADROOM
    for memory, residency in ((together, "keep"), (together - 1, "swap")):
        monkeypatch.setattr(plan_module, "device_memory", lambda _, memory=memory: memory)
        assert make_plan(tiny, devices=["cpu"]).residency == residency


def test_a_bf16_residual_makes_the_planned_refiner_smaller(tiny: Path) -> None:
    sizes = [make_plan(tiny, devices=["cpu"], refiner_residual=dtype).ranks[0].refiner for dtype in plan_module.DTYPES]
    assert sizes[0] < sizes[1]
