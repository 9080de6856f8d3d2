"""Packing a clip and its conditions into one sequence, and unpacking (20 §6, §7)."""

from dataclasses import replace

import pytest
import torch
from magi2_native.magi2_core.dit.inputs import Modality
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.sampling.packing import (
    BranchShape,
    Conditions,
    PackingOptions,
    pack_layout,
    pack_request,
    pack_tokens,
    unpack,
)
from magi2_native.magi2_core.sampling.time_embedding import time_embedding

GRID, LENGTH = (3, 2, 2), 20
TAU = (torch.tensor(874.0) / 1000).item()


def latents() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 48, *GRID, generator=generator), torch.randn(1, LENGTH, 64, generator=generator)


def conditions(text: int, pictures: int = 1) -> Conditions:
    generator = torch.Generator().manual_seed(text)
    features = torch.randn(text, 10, generator=generator).bfloat16()
    if not pictures:
        return Conditions(features)
    images = torch.randn(pictures, 48, 1, 2, generator=generator)
    return Conditions(features, images, torch.randn(pictures, 10, generator=generator).bfloat16())


@pytest.mark.parametrize(
    ("grid", "pictures", "picture_grid", "boundaries"),
    [
        ((32, 16, 28), 0, (0, 0), (0, 15586, 30472)),
        ((32, 16, 28), 1, (14, 28), (0, 15979, 31258)),
        ((32, 32, 56), 0, (0, 0), (0, 58594, 116488)),
        ((32, 32, 56), 1, (30, 56), (0, 60275, 119850)),
    ],
)
def test_the_row_counts_of_real_requests(
    grid: tuple[int, int, int], pictures: int, picture_grid: tuple[int, int], boundaries: tuple[int, ...]
) -> None:
    branches = [BranchShape(text, pictures, picture_grid) for text in (1000, 300)]
    layout = pack_layout(grid, 250, branches)
    assert layout.cu_seqlens == boundaries
    assert layout.tokens == boundaries[-1] == len(layout.coords_T9)


def test_the_segments_of_a_branch_come_in_order() -> None:
    layout = pack_layout(GRID, LENGTH, [BranchShape(3, 2, (1, 2))])
    kinds = layout.modality_T.tolist()
    expected = [Modality.VIDEO] * 12 + [Modality.AUDIO] * 20 + [Modality.TEXT] * 3
    expected += ([Modality.TEXT] + [Modality.VIDEO] * 2) * 2
    assert kinds == expected
    assert layout.modality_T.dtype == torch.int32


def test_coordinates_follow_the_table() -> None:
    coords = pack_layout(GRID, LENGTH, [BranchShape(3, 1, (1, 2))]).coords_T9.tolist()
    assert coords[5] == [1, 0, 1, 3, 2, 2, 3, 2, 2]
    assert coords[12 + 7] == [7, 0, 0, 20, 1, 1, 3, 1, 1]  # sound: reference floor(19/8) + 1
    assert coords[32] == [-3, 0, 0, 3, 1, 1, 1, 1, 1]
    assert coords[35] == [5, -1, -1, 1, 1, 2, 1, 1, 2]  # a mark stands two frames after the last
    assert coords[37] == [5, 0, 1, 1, 1, 2, 1, 1, 2]


def test_text_positions_use_the_length_of_their_own_branch() -> None:
    layout = pack_layout(GRID, LENGTH, [BranchShape(3), BranchShape(5)])
    text = layout.coords_T9[layout.modality_T == Modality.TEXT][:, 0].tolist()
    assert text == [-3, -2, -1, -5, -4, -3, -2, -1]


def test_each_modality_has_its_rows_in_sequence_order() -> None:
    video, audio = latents()
    c, u = conditions(3), conditions(5)
    tokens = pack_tokens(pack_request(GRID, LENGTH, [c, u]), video, audio, TAU)
    clip = video[0].permute(1, 2, 3, 0).reshape(-1, 48)
    pictures = [branch.images_MChw[0].permute(1, 2, 0).reshape(-1, 48) for branch in (c, u)]
    assert torch.equal(tokens.video_NC, torch.cat([clip, pictures[0], clip, pictures[1]]))
    assert torch.equal(tokens.audio_NC, torch.cat([audio[0], audio[0]]))
    assert torch.equal(tokens.text_NC, torch.cat([c.text_LD, c.markers_MD, u.text_LD, u.markers_MD]).float())


def test_only_the_clips_own_rows_carry_the_time_of_the_step() -> None:
    video, audio = latents()
    request = pack_request(GRID, LENGTH, [conditions(3), conditions(5)])
    time_Tc = pack_tokens(request, video, audio, TAU).time_Tc
    clean = torch.cat([torch.ones(32), torch.zeros(32)])
    for start, end in zip(request.layout.cu_seqlens[:-1], request.layout.cu_seqlens[1:], strict=True):
        assert torch.equal(time_Tc[start : start + 32], time_embedding(TAU).expand(32, 64))
        assert torch.equal(time_Tc[start + 32 : end], clean.expand(end - start - 32, 64))


def test_a_branch_packed_alone_is_its_part_of_the_pair() -> None:
    video, audio = latents()
    branches = [conditions(3), conditions(5, pictures=0)]
    both = pack_request(GRID, LENGTH, branches)
    whole = pack_tokens(both, video, audio, TAU)
    alone = [pack_request(GRID, LENGTH, [branch]) for branch in branches]
    apart = [pack_tokens(request, video, audio, TAU) for request in alone]
    assert torch.equal(torch.cat([r.layout.coords_T9 for r in alone]), both.layout.coords_T9)
    for name in ("video_NC", "audio_NC", "text_NC", "time_Tc"):
        assert torch.equal(torch.cat([getattr(tokens, name) for tokens in apart]), getattr(whole, name))


def test_dropping_the_picture_keeps_its_rows_and_its_mark() -> None:
    branch = conditions(4)
    dropped = branch.without_picture_content()
    assert dropped.shape == branch.shape
    assert not dropped.images_MChw.any()
    assert torch.equal(dropped.markers_MD, branch.markers_MD)
    assert conditions(4, pictures=0).without_picture_content().images_MChw is None


def test_an_empty_text_adds_no_row() -> None:
    request = pack_request(GRID, LENGTH, [conditions(2, 0), conditions(0, 0)])
    assert request.layout.cu_seqlens == (0, 34, 66)
    assert request.text_NC.shape == (2, 10)


def test_unpacking_returns_the_clips_rows_and_ignores_the_others() -> None:
    video, audio = latents()
    request = pack_request(GRID, LENGTH, [conditions(3), conditions(5)])
    y_TC = torch.full((request.layout.tokens, 64), torch.nan)
    for branch, start in enumerate(request.layout.cu_seqlens[:-1]):
        y_TC[start : start + 12, :48] = video[0].flatten(1).T + branch
        y_TC[start + 12 : start + 32] = audio[0] + branch
    got_video, got_audio = unpack(y_TC, request, 48, 64)
    assert torch.equal(got_video, torch.cat([video, video + 1]))
    assert torch.equal(got_audio, torch.cat([audio, audio + 1]))


def test_a_result_with_another_row_count_is_refused() -> None:
    request = pack_request(GRID, LENGTH, [conditions(3)])
    with pytest.raises(ValueError, match="rows"):
        unpack(torch.zeros(request.layout.tokens + 1, 64), request, 48, 64)


def test_latents_of_another_size_are_refused() -> None:
    request = pack_request(GRID, LENGTH, [conditions(3)])
    video, audio = latents()
    with pytest.raises(RequestError, match="packed for a video"):
        pack_tokens(request, video[:, :, :2], audio, TAU)
    with pytest.raises(RequestError, match="packed for a video"):
        pack_tokens(request, video, audio[:, :3], TAU)


def test_an_incomplete_picture_is_refused_instead_of_being_dropped() -> None:
    whole = conditions(3)
    with pytest.raises(RequestError, match="missing"):
        replace(whole, markers_MD=None)
    with pytest.raises(RequestError, match="missing"):
        replace(whole, images_MChw=None)
    with pytest.raises(RequestError, match="one marker for each"):
        replace(whole, markers_MD=torch.zeros(2, 10))
    with pytest.raises(RequestError, match="pictures, 48"):
        replace(whole, images_MChw=torch.zeros(1, 48, 1, 2, 2))
    with pytest.raises(RequestError, match="text features"):
        Conditions(torch.zeros(1, 3, 10))


def test_the_time_token_is_the_last_row_and_holds_the_time() -> None:
    video, audio = latents()
    options = PackingOptions(time_token=True)
    request = pack_request(GRID, LENGTH, [conditions(3, 0), conditions(2, 0)], options=options)
    tokens = pack_tokens(request, video, audio, TAU)
    last = [end - 1 for end in request.layout.cu_seqlens[1:]]
    assert request.layout.modality_T[last].tolist() == [Modality.TIME] * 2
    assert tokens.text_NC[[3, 6], 0].tolist() == [TAU, TAU]
    assert not request.text_NC[[3, 6]].any()
    assert torch.equal(tokens.time_Tc[last], time_embedding(TAU).expand(2, 64))


def test_the_time_embedding_is_cosines_then_sines_of_a_thousand_times_the_time() -> None:
    row = time_embedding(TAU).double()
    angles = 874 * torch.exp(-torch.log(torch.tensor(10000.0).double()) * torch.arange(32) / 32)
    assert torch.allclose(row, torch.cat([angles.cos(), angles.sin()]), atol=2e-4)


def test_odd_and_tiny_time_widths() -> None:
    assert time_embedding(TAU, 0).shape == (0,)
    assert time_embedding(TAU, 1).tolist() == [TAU]
    odd = time_embedding(TAU, 7)
    assert odd.shape == (7,)
    assert odd[-1] == 0
