"""Decoding in tiles: the same values in bounded memory (40 §4.6)."""

import math

import pytest
import torch
from magi2_native.magi2_core.codecs.frames import to_uint8
from magi2_native.magi2_core.codecs.turbo_decoder import TurboConfig, TurboDecoder
from magi2_native.magi2_core.codecs.turbo_tiles import Tile, plan_tiles, run_tile, split_span, step_spans, tile_bytes
from magi2_native.magi2_core.errors import RequestError
from magi2_native.tests.codec_networks import SMALL_TURBO, decode, turbo
from magi2_native.tests.storage_peak import StoragePeak

H, W = 26, 41
GRID = [Tile(*row, *column) for row in split_span(H, 13) for column in split_span(W, 14)]


def latent(T: int = 2, h: int = H, w: int = W) -> torch.Tensor:
    return torch.randn(1, 48, T, h, w, generator=torch.Generator().manual_seed(5))


def pixels(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    return x[..., 16 * tile.top : 16 * tile.bottom, 16 * tile.left : 16 * tile.right]


@pytest.fixture(scope="module", params=[True, False], ids=["first window", "later window"])
def whole(request):
    """A bfloat16 decoder, a latent and its window decoded at once."""
    decoder, z = turbo(dtype=torch.bfloat16), latent().to(torch.bfloat16)
    with torch.inference_mode():
        return decoder, z, request.param, decoder(z, request.param)


@pytest.mark.parametrize("tile", [*GRID, Tile(12, 13, 20, 21), Tile(0, H, 0, W)], ids=str)
def test_a_tile_equals_its_place_in_the_whole_frame_bit_for_bit(whole, tile):
    decoder, z, first, expected = whole
    with torch.inference_mode():
        assert torch.equal(run_tile(decoder, z, first, tile), pixels(expected, tile))


def test_in_fp32_a_tile_differs_by_the_order_of_summation_at_most():
    decoder, z, tile = turbo(), latent(1), GRID[1]
    with torch.inference_mode():
        expected = pixels(decoder(z, True), tile)
        assert (run_tile(decoder, z, True, tile) - expected).norm() <= 2e-6 * expected.norm()


def test_a_clip_in_tiles_equals_the_clip_at_once():
    decoder = turbo(dtype=torch.bfloat16)
    z = latent(8, 5, 9).to(torch.bfloat16)
    tiles = [Tile(*row, *column) for row in split_span(5, 3) for column in split_span(9, 5)]
    assert torch.equal(decode(decoder, z, to_uint8), decode(decoder, z, to_uint8, tiles))


def test_a_tile_depends_on_its_margin_and_on_nothing_beyond():
    decoder, z, tile = turbo(), latent(1, 3, 60), Tile(0, 3, 28, 32)
    begin, end = step_spans((28, 32), 60, decoder.steps(True))[0]

    def with_changed_column(column: int) -> torch.Tensor:
        changed = z.clone()
        changed[..., column] += 100
        with torch.inference_mode():
            return pixels(decoder(changed, True), tile)

    with torch.inference_mode():
        expected = pixels(decoder(z, True), tile)
    assert torch.equal(with_changed_column(begin - 1), expected)
    assert torch.equal(with_changed_column(end), expected)
    assert not torch.equal(with_changed_column(begin), expected)
    assert not torch.equal(with_changed_column(end - 1), expected)


def test_the_released_decoder_needs_a_margin_of_fifteen_latents():
    with torch.device("meta"):
        steps = TurboDecoder(TurboConfig()).steps(False)
    spans = step_spans((40, 60), 120, steps)
    assert spans[0] == (25, 75)
    assert spans[-1] == (640, 960)
    assert step_spans((0, 120), 120, steps)[0] == (0, 120)


@pytest.mark.parametrize(
    ("widths", "layers", "side", "dtype"),
    [
        ((8, 16, 16, 32), (2, 2, 2, 3, 3), 12, torch.bfloat16),
        ((8, 16, 16, 32), (2, 2, 2, 3, 3), 5, torch.bfloat16),
        ((8, 16, 16, 32), (2, 2, 2, 3, 3), 12, torch.float32),
        ((8, 8, 8, 8), (0, 0, 0, 0, 0), 12, torch.bfloat16),  # the most is held right after an enlargement
        ((1, 1, 1, 1), (0, 0, 0, 0, 0), 12, torch.bfloat16),  # the most is held at the end
    ],
)
def test_the_stated_bytes_are_what_the_decode_holds(widths, layers, side, dtype):
    config = TurboConfig(block_out_channels=widths, layers_per_block=layers, step_size=2)
    decoder, z = turbo(config, dtype), latent(4, 12, 12).to(dtype)
    tiles = [Tile(*row, *column) for row in split_span(12, side) for column in split_span(12, side)]
    with torch.inference_mode(), StoragePeak() as measured:
        for tile in tiles:
            run_tile(decoder, z, False, tile)
    assert measured.peak == pytest.approx(tile_bytes(config, 12, 12, side, dtype), rel=0.05)


@pytest.mark.parametrize("budget_gib", [16, 8, 4, 2, 1])
def test_a_1080p_frame_is_divided_to_stay_within_the_budget(budget_gib):
    config, budget = TurboConfig(), budget_gib * 2**30
    tiles = plan_tiles(config, 68, 120, budget, torch.bfloat16)
    side = max(max(t.bottom - t.top, t.right - t.left) for t in tiles)
    assert tile_bytes(config, 68, 120, side, torch.bfloat16) <= budget
    cover = torch.zeros(68, 120, dtype=torch.int)
    for t in tiles:
        cover[t.top : t.bottom, t.left : t.right] += 1
    assert (cover == 1).all()
    assert len(tiles) <= math.ceil(30 / budget_gib)


def test_a_frame_that_fits_is_not_divided():
    assert plan_tiles(SMALL_TURBO, 16, 28, 2**30, torch.bfloat16) == [Tile(0, 16, 0, 28)]


def test_decoding_at_once_needs_half_of_the_eager_peak():
    """40 §4.6 gives 30.3 GiB for a 1088x1920 window of the reference."""
    assert tile_bytes(TurboConfig(), 68, 120, 120, torch.bfloat16) < 15 * 2**30


def test_a_budget_that_is_too_small_is_refused_with_what_is_needed():
    with pytest.raises(RequestError, match=r"1920x1088 needs at least \d+ MiB of working memory, but only 1 MiB"):
        plan_tiles(TurboConfig(), 68, 120, 2**20, torch.bfloat16)
