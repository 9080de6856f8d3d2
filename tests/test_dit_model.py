"""The whole transformer: row order, segments, the time overwrite, outputs, cancel, and what is done once (10 §2-§4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from magi2_native.distributed.exchange import ParallelContext
from magi2_native.distributed.layout import ParallelLayout
from magi2_native.magi2_core.dit.inputs import Modality, PackedLayout, PackedTokens
from magi2_native.magi2_core.dit.prepare import prepare
from magi2_native.magi2_core.dit.rope import rotary_bands
from magi2_native.magi2_core.dit.runs import Run
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.tests.dit_models import CONFIG, MIXED, PACKED, small_layout, small_model, small_prepared, small_tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def run(layout: PackedLayout, tokens: PackedTokens, dtype: torch.dtype = torch.float32) -> Tensor:
    model = small_model(dtype)
    return model(model.prepare(layout, "cpu"), tokens)


def distance(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


# Outputs


def test_video_and_audio_rows_fill_their_channels_and_everything_else_is_zero() -> None:
    layout = small_layout(MIXED)
    y = run(layout, small_tokens(layout))
    assert (y.shape, y.dtype) == ((layout.tokens, 7), torch.float32)
    video, audio = layout.modality_T == Modality.VIDEO, layout.modality_T == Modality.AUDIO
    assert (y[video, :5] != 0).all()
    assert (y[audio] != 0).all()
    assert (y[video, 5:] == 0).all()
    assert (y[~(video | audio)] == 0).all()


def test_both_modes_agree_up_to_bf16() -> None:
    layout = small_layout()
    exact = run(layout, small_tokens(layout))
    rounded = run(layout, small_tokens(layout), torch.bfloat16)
    rows = exact.norm(dim=1) > 0
    errors = (rounded - exact).norm(dim=1)[rows] / exact.norm(dim=1)[rows]
    assert 1e-4 < errors.median() < 0.03


def test_a_forward_is_repeatable_and_leaves_its_inputs_alone() -> None:
    layout = small_layout(MIXED)
    model, tokens = small_model(torch.bfloat16), small_tokens(layout)
    prepared = model.prepare(layout, "cpu")
    before = [t.clone() for t in (tokens.video_NC, tokens.audio_NC, tokens.text_NC, tokens.time_Tc)]
    first = model(prepared, tokens)
    assert torch.equal(model(prepared, tokens), first)
    after = (tokens.video_NC, tokens.audio_NC, tokens.text_NC, tokens.time_Tc)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


# Row order and segments


def test_rows_that_packing_orders_by_modality_are_not_moved() -> None:
    assert small_prepared().order_S is None
    assert small_prepared(layout=small_layout(MIXED)).order_S is not None


def test_inside_a_segment_rows_are_grouped_by_modality_and_keep_their_order() -> None:
    layout = small_layout(((2, 0, 1, 0), (1, 3, 0)))
    prepared = small_prepared(layout=layout)
    assert prepared.order_S.tolist() == [1, 3, 2, 0, 6, 4, 5]
    assert prepared.runs == (Run(0, 0, 2), Run(1, 2, 3), Run(2, 3, 4), Run(0, 4, 5), Run(1, 5, 6), Run(2, 6, 7))


def test_the_order_of_rows_inside_a_segment_does_not_matter() -> None:
    """Attention is full inside a segment and everything else is per row, so the result only moves along."""
    layout = small_layout()
    tokens = small_tokens(layout)
    generator = torch.Generator().manual_seed(9)
    order = torch.cat([torch.randperm(11, generator=generator), 11 + torch.randperm(10, generator=generator)])
    mixed = PackedLayout(layout.coords_T9[order], layout.modality_T[order], layout.cu_seqlens)
    place = [torch.empty(layout.tokens, dtype=torch.long) for _ in range(3)]
    features = []
    for modality, x in enumerate((tokens.video_NC, tokens.audio_NC, tokens.text_NC)):
        place[modality][layout.modality_T == modality] = torch.arange(len(x))
        features.append(x[place[modality][order[mixed.modality_T == modality]]])
    moved = PackedTokens(*features, tokens.time_Tc[order])
    assert distance(run(mixed, moved), run(layout, tokens)[order]) < 1e-6


def test_segments_do_not_see_each_other() -> None:
    both = small_layout()
    tokens = small_tokens(both)
    first = PackedLayout(both.coords_T9[:11], both.modality_T[:11], (0, 11))
    alone = PackedTokens(tokens.video_NC[:6], tokens.audio_NC[:3], tokens.text_NC[:2], tokens.time_Tc[:11])
    assert distance(run(first, alone), run(both, tokens)[:11]) < 1e-6
    joined = PackedLayout(both.coords_T9, both.modality_T, (0, 21))
    assert distance(run(joined, tokens)[:11], run(both, tokens)[:11]) > 1e-3


def test_padding_in_a_segment_of_its_own_changes_nothing() -> None:
    # 10 §11.1: the reference pads; this must be accepted and harmless.
    layout = small_layout()
    tokens = small_tokens(layout)
    grid = torch.tensor([[float(i), 0, 0, 3, 1, 1, 3, 1, 1] for i in range(3)])
    padded = PackedLayout(
        torch.cat([layout.coords_T9, grid]),
        torch.cat([layout.modality_T, torch.full((3,), 2, dtype=torch.int32)]),
        (*layout.cu_seqlens, 24),
    )
    text = torch.cat([tokens.text_NC, torch.zeros(3, 9)])
    more = replace(tokens, text_NC=text, time_Tc=torch.cat([tokens.time_Tc, torch.zeros(3, 6)]))
    assert distance(run(padded, more)[:21], run(layout, tokens)) < 1e-6


def test_a_time_row_is_a_text_row() -> None:
    layout = small_layout()
    as_time = layout.modality_T.clone()
    as_time[10] = Modality.TIME
    tokens = small_tokens(layout)
    assert torch.equal(run(replace(layout, modality_T=as_time), tokens), run(layout, tokens))


@pytest.mark.parametrize("segments", [((0, 0, 2),), ((0,),), ((2, 2), (1,)), ((0, 0), ()), ()])
def test_modalities_and_segments_may_be_absent(segments: tuple[tuple[int, ...], ...]) -> None:
    layout = small_layout(segments or ((),))
    y = run(layout, small_tokens(layout))
    assert y.shape == (layout.tokens, 7)
    assert y.isfinite().all()


# Time


def test_the_time_embedding_overwrites_the_first_channels_of_every_row() -> None:
    layout = small_layout(MIXED)
    tokens, model = small_tokens(layout), small_model()
    prepared = model.prepare(layout, "cpu")
    streams = model.pre_adapter(tokens, prepared, torch.float32)
    plain = model.pre_adapter(replace(tokens, time_Tc=None), prepared, torch.float32)
    assert torch.equal(streams[:, :6], tokens.time_Tc[prepared.order_S])
    assert torch.equal(streams[:, 6:], plain[:, 6:])
    assert streams.shape == (layout.tokens, 4 * 48)


def test_an_empty_time_embedding_and_none_overwrite_nothing() -> None:
    layout = small_layout()
    tokens = small_tokens(layout)
    empty = replace(tokens, time_Tc=torch.empty(layout.tokens, 0))
    assert torch.equal(run(layout, empty), run(layout, replace(tokens, time_Tc=None)))
    assert not torch.equal(run(layout, empty), run(layout, tokens))


def test_embeddings_are_fp32_with_a_bias_and_rounded_after_the_overwrite() -> None:
    layout = small_layout()
    tokens, model = small_tokens(layout), small_model(torch.bfloat16)
    prepared = model.prepare(layout, "cpu")
    streams = model.pre_adapter(tokens, prepared, torch.bfloat16)
    embedder = model.pre_adapter.audio_embedder
    expected = tokens.audio_NC[:3] @ embedder.weight.t() + embedder.bias
    assert embedder.weight.dtype == torch.float32
    assert torch.equal(streams[6:9, 6:], expected[:, 6:].bfloat16())
    assert torch.equal(streams[6:9, :6], tokens.time_Tc[6:9].bfloat16())


# Once per request, and between layers


class Operations(TorchDispatchMode):
    """Records the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_forward_computes_no_angles_and_reads_no_tensor_back() -> None:
    layout = small_layout(MIXED)
    model, tokens = small_model(), small_tokens(layout)
    with Operations() as preparing:
        prepared = model.prepare(layout, "cpu")
    with Operations() as running:
        model(prepared, tokens)
    assert {"sin", "cos"} <= set(preparing.names)
    assert not {"sin", "cos", "argsort", "bincount", "_local_scalar_dense", "nonzero"} & set(running.names)
    assert running.names.count("sort") == 2 * CONFIG.moe.num_heads  # routes, in each MoE layer


def test_cancelling_is_possible_between_layers_and_passes_through() -> None:
    class Stop(Exception):  # noqa: N818
        pass

    class Counting(Silent):
        def __init__(self, stop_at: int) -> None:
            self.checks, self.stop_at = 0, stop_at

        def check(self) -> None:
            self.checks += 1
            if self.checks == self.stop_at:
                raise Stop

    layout = small_layout()
    model, tokens = small_model(), small_tokens(layout)
    prepared = model.prepare(layout, "cpu")
    events = Counting(stop_at=0)
    model(prepared, tokens, events)
    assert events.checks == CONFIG.num_layers
    with pytest.raises(Stop):
        model(prepared, tokens, Counting(stop_at=3))


def test_fp32_products_are_true_fp32_whatever_the_process_allows() -> None:
    layout = small_layout()
    model, tokens = small_model(torch.bfloat16), small_tokens(layout)
    prepared = model.prepare(layout, "cpu")
    seen: list[str] = []
    for module in (model.pre_adapter, model.block.layers[1].mlp.moe_mlp, model.post_adapter):
        module.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.matmul.fp32_precision))
    try:
        torch.set_float32_matmul_precision("medium")
        model(prepared, tokens)
        assert seen == ["ieee"] * 3
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


# Bad input


def test_a_layout_that_does_not_fit_itself_is_refused() -> None:
    layout = small_layout()
    for bad, message in (
        (replace(layout, cu_seqlens=(0, 11, 20)), "must ascend from 0 to 21"),
        (replace(layout, cu_seqlens=(0, 21, 11)), "must ascend from 0 to 21"),
        (replace(layout, cu_seqlens=()), "must ascend from 0 to 21"),
        (replace(layout, coords_T9=layout.coords_T9[:, :8]), r"expected \[21, 9\]"),
        (replace(layout, modality_T=layout.modality_T + 2), "none of video"),
    ):
        with pytest.raises(RequestError, match=message):
            small_prepared(layout=bad)


def test_features_that_do_not_fit_the_layout_or_the_model_are_refused() -> None:
    layout = small_layout()
    model, tokens = small_model(), small_tokens(layout)
    prepared = model.prepare(layout, "cpu")
    for bad, message in (
        (replace(tokens, audio_NC=tokens.audio_NC[:3]), r"audio features are torch.float32 \(3, 7\)"),
        (replace(tokens, text_NC=torch.randn(3, 8)), r"expected torch.float32 \(3, 9\)"),
        (replace(tokens, video_NC=tokens.video_NC.bfloat16()), "video features are torch.bfloat16"),
        (replace(tokens, time_Tc=tokens.time_Tc[:4]), "4 rows for 21 tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            model(prepared, bad)


# A rank's part


@pytest.mark.parametrize("ranks", [2, 4, 30])
def test_the_ranks_rows_are_all_rows_in_order(ranks: int) -> None:
    layout = small_layout(PACKED)
    rows, first = [], [0, 0, 0]
    for rank in range(ranks):
        context = ParallelContext(ParallelLayout(sp=ranks), rank, None, None, None, None)
        prepared = prepare(CONFIG, layout, context, rotary_bands(8), "cpu")
        assert prepared.first_rows == tuple(first)
        for part in prepared.runs:
            first[part.modality] += part.stop - part.start
        rows.append(prepared.rope_SR)
    assert torch.equal(torch.cat(rows), small_prepared(layout=layout).rope_SR)


def test_a_rank_embeds_its_own_rows_of_the_features_that_all_ranks_have() -> None:
    layout = small_layout(PACKED)
    tokens, model = small_tokens(layout), small_model()
    whole = model.pre_adapter(tokens, small_prepared(layout=layout), torch.float32)
    for rank in range(4):
        context = ParallelContext(ParallelLayout(sp=4), rank, None, None, None, None)
        prepared = prepare(CONFIG, layout, context, rotary_bands(8), "cpu")
        rows = model.pre_adapter(tokens, prepared, torch.float32)
        assert torch.allclose(rows, whole[prepared.split.rows], atol=1e-6)


def test_pieces_are_small_on_a_cpu_and_large_on_a_gpu() -> None:
    wide = replace(CONFIG, hidden_size=3072)
    assert small_prepared().plain_pieces == (Run(0, 0, 21),)
    cpu = prepare(wide, small_layout(), ParallelContext.single(), rotary_bands(8), "cpu")
    assert cpu.piece_rows == 256
    gpu = prepare(wide, small_layout(), ParallelContext.single(), rotary_bands(8), "meta")
    assert gpu.piece_rows == (512 << 20) // (4 * 12288)
