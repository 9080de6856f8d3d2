"""The second stage's transformer: dtypes, chunks, layouts (50 §3, §7, §8)."""

from dataclasses import replace

import pytest
import torch
from magi2_native.distributed.exchange import ParallelContext
from magi2_native.distributed.layout import ParallelLayout
from magi2_native.magi2_core.config import RefinerConfig
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.magi2_core.refiner.model import RefinerTransformer, refiner_parallel
from magi2_native.magi2_core.refiner.prepare import pack_refiner, row_coords, unpack_refiner
from magi2_native.tests.ranks import run_ranks
from magi2_native.tests.refiner_models import CONFIG, GRID, WINDOW, deep, make_inputs, make_refiner
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32


def rows_of(
    model: RefinerTransformer, text: int = 11, audio: int = 0, backend: str = "gather", **changes: int
) -> Tensor:
    video, sound, features = make_inputs(text, audio)
    prepared = model.prepare(GRID, text, "cpu", audio=audio, window=WINDOW, backend=backend)
    prepared = replace(prepared, **changes) if changes else prepared
    return model(prepared, pack_refiner(prepared, video, sound, features))


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@torch.no_grad()
def residuals(model: RefinerTransformer) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    for layer in model.block.layers:
        layer.register_forward_hook(lambda _module, inputs, output: seen.extend([inputs[0].dtype, output.dtype]))
    rows_of(model)
    return seen


def test_the_residual_is_bf16_into_the_first_layer_and_fp32_from_its_end() -> None:
    assert residuals(make_refiner(dtype=BF16)) == [BF16, FP32, FP32, FP32, FP32, FP32]


def test_a_bf16_residual_stays_bf16_and_costs_the_stated_error() -> None:
    assert residuals(make_refiner(dtype=BF16, residual=BF16)) == [BF16] * 6
    config = deep(30)
    exact = rows_of(make_refiner(config))
    reference = relative(rows_of(make_refiner(config, dtype=BF16)), exact)
    short = relative(rows_of(make_refiner(config, dtype=BF16, residual=BF16)), exact)
    assert reference < 0.02
    assert reference < short < 2 * reference


def test_other_dtypes_are_refused() -> None:
    with torch.device("meta"), pytest.raises(RequestError, match="compute dtype"):
        RefinerTransformer(CONFIG, compute_dtype=torch.float16)
    with torch.device("meta"), pytest.raises(RequestError, match="residual dtype"):
        RefinerTransformer(CONFIG, residual=torch.float16)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_pieces_of_rows_change_nothing_but_rounding(dtype: torch.dtype) -> None:
    model = make_refiner(dtype=dtype)
    whole, cut = rows_of(model), rows_of(model, piece_rows=17)
    assert relative(cut, whole) < (1e-6 if dtype == FP32 else 5e-3)


def test_backends_agree() -> None:
    model = make_refiner()
    assert relative(rows_of(model, backend="mask"), rows_of(model, backend="gather")) < 1e-5


def test_text_rows_give_zero_and_narrow_modalities_leave_the_rest_zero() -> None:
    rows = rows_of(make_refiner(), text=5, audio=4)
    assert rows.shape == (5 * 6 * 7 + 9, 16)
    assert rows[:210, :12].all()
    assert not rows[:210, 12:].any()
    assert rows[210:214].all()
    assert not rows[214:].any()


def test_each_modality_uses_its_own_weights() -> None:
    model = make_refiner()
    before = rows_of(model, text=5, audio=4)
    up = model.block.layers[0].mlp.up_gate_proj
    with torch.no_grad():
        up.of(1).zero_()  # the sound's
    after = rows_of(model, text=5, audio=4)
    assert relative(after[210:214], before[210:214]) > 0.05
    with torch.no_grad():
        for layer in model.block.layers:
            for weight in (layer.attention.linear_proj, layer.mlp.down_proj):
                weight.of(0).zero_()
    # with nothing added to it, each video row is its own embedding
    video, sound, text = make_inputs(5, 4)
    mine = rows_of(model, text=5, audio=4)
    prepared = model.prepare(GRID, 5, "cpu", audio=4, window=WINDOW)
    plain = model.post_adapter(model.pre_adapter(pack_refiner(prepared, video, sound, text), prepared, FP32), prepared)
    assert torch.allclose(mine[:210], plain[:210], atol=1e-5)


def test_text_without_neighbours_is_not_rotated_but_a_single_token_is() -> None:
    coords = row_coords((1, 1, 1), 0, 3)
    assert coords[1:, 0].tolist() == [-3, -2, -1]
    model = make_refiner()
    half = model.prepare(GRID, 3, "cpu", window=WINDOW).rope_SR[-3:].chunk(2, dim=1)
    assert not half[0].any()
    assert (half[1] == 1).all()
    assert model.prepare(GRID, 1, "cpu", window=WINDOW).rope_SR[-1, 0] == torch.tensor(-1.0).sin()


def test_unpacking_restores_the_raster_order() -> None:
    model = make_refiner()
    video, sound, text = make_inputs(5, 4)
    prepared = model.prepare(GRID, 5, "cpu", audio=4, window=WINDOW)
    tokens = pack_refiner(prepared, video, sound, text)
    rows = torch.zeros(219, 16)
    rows[:210, :12], rows[210:214] = tokens.video_NC, tokens.audio_NC
    got_video, got_sound = unpack_refiner(rows, prepared, 12, 16)
    assert torch.equal(got_video, video)
    assert torch.equal(got_sound, sound)


def test_a_video_of_another_size_is_refused() -> None:
    prepared = make_refiner().prepare((5, 6, 8), 5, "cpu", window=WINDOW)
    with pytest.raises(RequestError, match="5, 6, 8"):
        pack_refiner(prepared, *make_inputs(5))
    video, sound, text = make_inputs(5)
    prepared = make_refiner().prepare(GRID, 5, "cpu", window=WINDOW)
    with pytest.raises(RequestError, match="video latent"):
        pack_refiner(prepared, video.expand(2, -1, -1, -1, -1), sound, text)


def test_cancelling_is_possible_before_every_layer() -> None:
    class Cancelled(Silent):
        calls = 0

        def check(self) -> None:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt

    model, events = make_refiner(), Cancelled()
    prepared = model.prepare(GRID, 11, "cpu", window=WINDOW)
    with pytest.raises(KeyboardInterrupt):
        model(prepared, pack_refiner(prepared, *make_inputs()), events)
    assert events.calls == 3


def on_ranks(rank: int, world: int, config: RefinerConfig, dtype: torch.dtype) -> Tensor:
    parallel = ParallelContext.create(ParallelLayout(sp=world), rank)
    return rows_of(make_refiner(config, parallel, dtype), text=5, audio=4)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_together_give_what_one_gives(world: int, dtype: torch.dtype) -> None:
    """Eight query heads and two key heads: on 4 and 8 ranks the key heads are repeated. 219 rows divide unevenly."""
    alone = rows_of(make_refiner(dtype=dtype), text=5, audio=4)
    together = run_ranks(world, on_ranks, world, CONFIG, dtype)
    assert all(torch.equal(rows, together[0]) for rows in together)
    assert relative(together[0], alone) < (1e-6 if dtype == FP32 else 5e-3)


@pytest.mark.parametrize(
    ("layout", "rank", "ranks", "own"),
    [
        ("sp4", 3, 4, 3),
        ("cfg2sp2", 3, 4, 3),  # all ranks of the replica share the refiner, whatever they do in the preview
        ("tp2sp2", 2, 4, 2),
        ("dp2sp2", 3, 2, 1),
        ("cfg2sp3", 4, 1, 0),  # neither 6 nor 3 divides 32 heads: every rank works alone
    ],
)
def test_the_ranks_of_a_replica_share_the_refiner(layout: str, rank: int, ranks: int, own: int) -> None:
    preview = ParallelContext(ParallelLayout.parse(layout), rank, None, None, None, None)
    mine = refiner_parallel(preview, RefinerConfig())
    assert (mine.layout.sp, mine.position.sp) == (ranks, own)
    assert mine.layout.world == ranks
