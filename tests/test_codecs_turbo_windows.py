"""Sliding windows of the Turbo decode (40 §4.5, §4.6)."""

import pytest
import torch
from magi2_native.magi2_core.codecs.frames import to_uint8
from magi2_native.magi2_core.codecs.latent_scale import denormalise
from magi2_native.magi2_core.codecs.turbo_decoder import TurboConfig
from magi2_native.magi2_core.codecs.turbo_tiles import Tile
from magi2_native.magi2_core.codecs.turbo_windows import decode_window, gather_blocks, plan_windows
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.tests.codec_networks import decode, turbo

SMALL = {"block_out_channels": (4, 4, 4, 4), "layers_per_block": (1, 1, 1, 1, 1)}


def raw(x: torch.Tensor) -> torch.Tensor:
    return x[0].permute(1, 2, 3, 0)


def latent(T: int) -> torch.Tensor:
    return torch.randn(1, 48, T, 1, 2, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("latents", "windows", "frames"),
    [
        (1, [(7, True)], 1),
        (7, [(7, True)], 25),
        (8, [(8, True), (8, False)], 29),
        (15, [(8, True), (9, False), (8, False)], 57),
        (32, [(8, True), (9, False), (9, False), (9, False), (8, False)], 125),
        (63, [(8, True)] + [(9, False)] * 7 + [(8, False)], 249),
    ],
)
def test_the_published_windows(latents, windows, frames):
    plan = plan_windows(latents, TurboConfig())
    assert [(w.latents, w.first) for w in plan] == windows
    assert plan[-1].end == frames


def by_the_book(decoder, z: torch.Tensor) -> torch.Tensor:
    """The decode step by step as section 4.5 words it: pad, cut, decode, drop, concatenate, drop."""
    f, s = decoder.config.first_chunk_size, decoder.config.step_size
    z, T = denormalise(z), z.shape[2]
    p = f - T if f > T else -(T - f) % s
    z = torch.cat([z] + [z[:, :, -1:]] * p, dim=2)
    N = T + p
    if f == N:
        out = [decoder(z, True)]
    else:
        out = [decoder(z[:, :, : f + 1], True)[:, :, :-4]]
        for i in range(f, N, s):
            last = i + s >= N
            window = decoder(z[:, :, i - 1 : i + s + (0 if last else 1)], False)
            out.append(window[:, :, 4 : window.shape[2] - (0 if last else 4)])
    frames = torch.cat(out, dim=2)
    return frames[:, :, : frames.shape[2] - 4 * p]


@pytest.mark.parametrize(
    ("f", "s", "T"), [(7, 7, 3), (7, 7, 8), (7, 7, 15), (3, 5, 9), (2, 3, 6), (1, 1, 4), (4, 2, 5)]
)
def test_a_clip_decodes_as_worded(f, s, T):
    decoder = turbo(TurboConfig(**SMALL, first_chunk_size=f, step_size=s))
    with torch.inference_mode():
        expected = raw(by_the_book(decoder, latent(T)))
    assert torch.equal(decode(decoder, latent(T), raw), expected)


@pytest.mark.parametrize(("f", "s"), [(7, 7), (3, 5), (1, 1), (5, 2)])
def test_the_windows_of_any_length_follow_one_another_without_gap(f, s):
    for T in range(1, 40):
        plan = plan_windows(T, TurboConfig(first_chunk_size=f, step_size=s))
        edges = [0] + [w.end for w in plan]
        assert [w.begin for w in plan] == edges[:-1]
        assert edges[-1] == 4 * T - 3
        assert all(w.frames > 0 and w.skip + w.frames <= 4 * w.latents - 3 * w.first for w in plan)


def test_no_latents_are_refused():
    with pytest.raises(RequestError, match="0 frames"):
        plan_windows(0, TurboConfig())


def test_windows_decoded_alone_in_any_order_make_the_same_clip():
    decoder, z = turbo(), latent(15)
    whole = decode(decoder, z, to_uint8)
    plan = plan_windows(15, decoder.config)
    with torch.inference_mode():
        parts = {w.begin: decode_window(decoder, z, w, to_uint8) for w in reversed(plan)}
    assert torch.equal(torch.cat([parts[w.begin] for w in plan]), whole)


class Stop(BaseException):
    pass


class StopAtSecond(Silent):
    checks = 0

    def check(self) -> None:
        self.checks += 1
        if self.checks == 2:
            raise Stop


def test_a_cancel_stops_before_the_next_tile():
    decoder, calls = turbo(), []
    decoder.conv_in.conv.register_forward_hook(lambda *_: calls.append(1))
    window = plan_windows(8, decoder.config)[0]
    with torch.inference_mode(), pytest.raises(Stop):
        decode_window(decoder, latent(8), window, to_uint8, [Tile(0, 1, 0, 1), Tile(0, 1, 1, 2)], StopAtSecond())
    assert len(calls) == 1


def test_blocks_that_do_not_make_the_clip_are_noticed():
    blocks = [torch.zeros(2, 4, 4, 3)]
    with pytest.raises(RequestError, match="2 frames instead of 3"):
        gather_blocks(iter(blocks), 3)
