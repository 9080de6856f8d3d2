"""The predicted memory of the preview stage against what scaled runs hold, on every kind of layout (70 §5, §6)."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from magi2_native.distributed.exchange import ParallelContext, gather_tokens
from magi2_native.distributed.layout import ParallelLayout, TokenSplit
from magi2_native.magi2_core.config import MoeConfig, PreviewConfig
from magi2_native.magi2_core.dit import runs
from magi2_native.magi2_core.dit.inputs import PackedTokens
from magi2_native.magi2_core.dit.memory import BranchRows, preview_memory
from magi2_native.magi2_core.dit.model import PreviewTransformer
from magi2_native.magi2_core.dit.prepare import prepare
from magi2_native.magi2_core.events import Silent
from magi2_native.magi2_core.kernels import attention as attention_kernels
from magi2_native.magi2_core.kernels import experts as expert_kernels
from magi2_native.magi2_core.sampling.denoise import SamplingSettings, denoise
from magi2_native.magi2_core.sampling.geometry import clip_lengths, latent_grid, tier
from magi2_native.magi2_core.sampling.packing import (
    BranchShape,
    Conditions,
    pack_layout,
    pack_request,
    pack_tokens,
    unpack,
)
from magi2_native.tests.dit_models import fill
from magi2_native.tests.ranks import run_ranks
from magi2_native.tests.storage_peak import StoragePeak
from torch import Tensor
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

# An eighth of the released widths, so that every tensor keeps its proportion to the streams.
SCALED = PreviewConfig(
    num_layers=3,
    hidden_size=384,
    head_dim=16,
    text_in_channels=640,
    mm_layers=(0,),
    moe=MoeConfig(
        num_experts=16,
        moe_layers=(1,),
        expert_intermediate_size=160,
        shared_expert_intermediate_size=160,
        modality_specific_expert_intermediate_size=160,
    ),
)
GRID, AUDIO, TEXT = (6, 10, 10), 40, (60, 30)
BRANCHES = [BranchRows(GRID[0] * GRID[1] * GRID[2], AUDIO, text) for text in TEXT]


def measure(rank: int, config: PreviewConfig, layout: ParallelLayout) -> int:
    """Largest sum of the bytes alive on a rank, while it samples a clip in three steps as the engine does."""
    parallel = ParallelContext.create(layout, rank)
    conditions = [Conditions(torch.randn(text, config.text_in_channels)) for text in TEXT]
    with StoragePeak() as storage, torch.inference_mode():
        model = PreviewTransformer(config, parallel)
        fill(model)
        storage.peak = 0  # the model is part of what is alive, making it is not
        split = TokenSplit.even(2, layout.cfg, parallel.position.cfg)
        request = pack_request(GRID, AUDIO, conditions[split.rows])
        prepared = model.prepare(request.layout, "cpu")

        def evaluate(video: Tensor, audio: Tensor, time: float) -> tuple[Tensor, Tensor]:
            y_TC = model(prepared, pack_tokens(request, video, audio, time))
            own_video, own_audio = unpack(y_TC, request, config.video_in_channels, config.audio_in_channels)
            group = parallel.cfg_group
            return gather_tokens(own_video, split, group), gather_tokens(own_audio, split, group)

        video, audio = torch.randn(1, 48, *GRID), torch.randn(1, AUDIO, 64)
        denoise(SamplingSettings(steps=3), video, audio, evaluate, Silent())
    return storage.peak


NARROW = replace(SCALED, moe=replace(SCALED.moe, expert_intermediate_size=16))
HALVED_HEADS = replace(SCALED, moe=replace(NARROW.moe, num_heads=6))


@pytest.mark.parametrize(
    ("layout", "dtype", "config", "fullest"),
    [
        ("sp1", torch.bfloat16, SCALED, "experts"),
        ("sp1", torch.bfloat16, NARROW, "attention"),
        ("sp1", torch.float32, NARROW, "attention projection"),
        ("sp1", torch.bfloat16, replace(NARROW, attn_softcap=5.0), "attention"),
        ("sp2", torch.float32, NARROW, "exchange"),
        ("sp4", torch.bfloat16, SCALED, "experts"),
        ("sp4", torch.float32, HALVED_HEADS, "experts"),
        ("tp2", torch.bfloat16, NARROW, "stream update"),
        ("tp2sp2", torch.float32, SCALED, "experts"),
        ("cfg2", torch.bfloat16, SCALED, "experts"),
    ],
)
def test_the_prediction_is_within_five_percent_of_a_run(
    layout: str, dtype: torch.dtype, config: PreviewConfig, fullest: str
) -> None:
    parallel, config = ParallelLayout.parse(layout), replace(config, params_dtype=dtype)
    one = parallel.world == 1
    measured = [measure(0, config, parallel)] if one else run_ranks(parallel.world, measure, config, parallel)
    for rank, peak in enumerate(measured):
        memory = preview_memory(config, BRANCHES, parallel, rank, device_type="cpu")
        assert max(memory.phases, key=memory.phases.__getitem__) == fullest
        assert memory.working == pytest.approx(peak - memory.tensors["weights"], rel=0.05)


# The released widths, on shapes alone

RELEASED = PreviewConfig(num_layers=2, mm_layers=(0,), moe=MoeConfig(moe_layers=(1,)))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every choice that depends on the device falls as on a GPU, for tensors that have shapes and no content."""

    def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    monkeypatch.setattr(runs, "_PIECE_BYTES", {})
    monkeypatch.setattr(expert_kernels, "_ACTIVATION", {})
    monkeypatch.setattr(expert_kernels, "runs_on_device", lambda *_: True)
    monkeypatch.setattr(attention_kernels, "_choose", lambda q, softcap: flash)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("resolution", "layout"), [("272p", "sp1"), ("540p", "sp4"), ("540p", "sp8")])
def test_the_prediction_for_a_gpu_is_within_five_percent_of_a_forward_at_full_size(
    resolution: str, layout: str, as_on_a_gpu: None
) -> None:
    parallel, (frames, audio) = ParallelLayout.parse(layout), clip_lengths()
    grid = latent_grid(*tier(resolution).preview)
    if parallel.world > 1:
        dist.init_process_group("fake", rank=0, world_size=parallel.world, store=FakeStore())
    context = ParallelContext.create(parallel, 0)
    packed = pack_layout(grid, audio, [BranchShape(500), BranchShape(330)])
    prepared = prepare(RELEASED, packed, context, torch.ones(16), "cpu")
    rope_shape = prepared.rope_SR.shape
    with FakeTensorMode(), StoragePeak() as storage, torch.inference_mode():
        model = PreviewTransformer(RELEASED, context)
        prepared = replace(prepared, rope_SR=torch.empty(rope_shape))
        rows = zip(prepared.counts, (48, 64, 5120), strict=True)
        tokens = PackedTokens(*(torch.empty(count, width) for count, width in rows), torch.empty(packed.tokens, 64))
        latents = torch.empty(8, 48, *grid)  # of the solver, alive meanwhile
        storage.peak = 0
        model(prepared, tokens)
        del latents
    video = frames * grid[1] * grid[2]
    memory = preview_memory(RELEASED, [BranchRows(video, audio, 500), BranchRows(video, audio, 330)], parallel)
    assert memory.working == pytest.approx(storage.peak - memory.tensors["weights"], rel=0.05)
