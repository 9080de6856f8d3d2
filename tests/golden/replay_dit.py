"""Replay of the recorded transformer results: operators, whole layers, whole models, a checkpoint, the exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...distributed.exchange import (
    ParallelContext,
    combine_heads,
    dispatch_heads,
    scatter_qkv,
    scatter_tokens_gather_heads,
)
from ...distributed.layout import TokenSplit, bank_shares, split_evenly
from ...magi2_core.checkpoint.folder import preview_network
from ...magi2_core.checkpoint.loader import load_module
from ...magi2_core.config import MoeConfig, PreviewConfig
from ...magi2_core.dit.activation import swiglu7
from ...magi2_core.dit.attention import apply_sinks_
from ...magi2_core.dit.inputs import Modality, PackedLayout, PackedTokens
from ...magi2_core.dit.mhc import branch_input, coefficients, update_streams_
from ...magi2_core.dit.model import Layer, PreviewTransformer
from ...magi2_core.dit.moe import RoutedExperts
from ...magi2_core.dit.norm import rms_norm
from ...magi2_core.dit.parameters import preview_tensors
from ...magi2_core.dit.prepare import prepare
from ...magi2_core.dit.rope import rotary_bands, rotary_table, rotate
from ...magi2_core.dit.router import route
from ...magi2_core.dit.runs import Run
from ...magi2_core.dit.weights import Tensors
from ...magi2_core.kernels.attention import varlen_attention
from ...magi2_core.kernels.experts import sort_routes
from ...magi2_core.sampling.time_embedding import time_embedding
from ..ranks import run_ranks
from .limits import judge, missed
from .replay import Case, Measure, equal, linear_by_modality, max_abs, norm_by_modality, rel_l2

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def run(case: Case) -> list[Measure]:
    """Replay a case by the family that its name begins with; KeyError for a name that begins with none."""
    families: dict[str, Callable[[Case], list[Measure]]] = {
        "op_rope": run_rope,
        "op_sinusoid": run_sinusoid,
        "op_norm": run_norm,
        "op_grouped_linear": run_grouped_linear,
        "op_swiglu7": run_swiglu7,
        "op_attention": run_attention,
        "op_mhc": run_mhc,
        "op_router": run_router,
        "op_moe_core": run_moe_core,
        "layer_": run_layer,
        "model_": run_model,
        "ckpt_": run_checkpoint,
        "par_exchange": run_exchange,
    }
    for prefix, replay in families.items():
        if case.name.startswith(prefix):
            measures = replay(case)
            return measures + missed(case, measures)
    raise KeyError(f"no family of transformer cases begins like {case.name!r}")


# Operators


def run_rope(case: Case) -> list[Measure]:
    tensors = case.tensors
    bands = rotary_bands(case.meta["config"]["head_dim"])
    table = rotary_table(tensors["in.coords"], bands)
    measures = judge(case, "out.rope", table)
    if "mid.bands" in tensors:
        measures.append(equal("mid.bands", bands, tensors["mid.bands"]))
    if "in.q" in tensors:
        measures += judge(case, "out.q_rotated", rotate(tensors["in.q"], table))
    return measures


def run_sinusoid(case: Case) -> list[Measure]:
    measures = []
    for key in _keys(case, "out."):
        width = int(key.removeprefix("out.emb"))
        got = torch.stack([time_embedding(time, width).flatten() for time in case.tensors["in.position"].tolist()])
        measures += judge(case, key, got)
    return measures


def run_norm(case: Case) -> list[Measure]:
    weights = {"multi": "pre_norm", "single": "single", "heads": "q_norm"}
    runs = _runs(case.meta["config"]["group_sizes"])
    measures = []
    for key in _keys(case, "out."):
        kind, mode = key.removeprefix("out.").split("_")
        x = case.tensors["in.heads_permuted" if kind == "heads" else "in.x_permuted"]
        weight = case.tensors[f"weights.{weights[kind]}.weight"]
        single = kind == "single"
        got = rms_norm(x, weight, DTYPES[mode]) if single else norm_by_modality(x, weight, runs, DTYPES[mode])
        measures += [equal(f"{key} dtype", got.dtype, case.tensors[key].dtype), *judge(case, key, got)]
    return measures


def run_grouped_linear(case: Case) -> list[Measure]:
    runs = _runs(case.meta["config"]["group_sizes"])
    measures = []
    for key in _keys(case, "out."):
        dtype = DTYPES[key.rsplit("_", 1)[1]]
        x, weight = (case.tensors[name].to(dtype) for name in ("in.x_permuted", "weights.weight"))
        bias = case.tensors["weights.bias"].to(dtype) if "weights.bias" in case.tensors else None
        measures += judge(case, key, linear_by_modality(x, weight, runs, bias))
    return measures


def run_swiglu7(case: Case) -> list[Measure]:
    modes = [key.removeprefix("out.y_") for key in _keys(case, "out.")]
    return [m for mode in modes for m in judge(case, f"out.y_{mode}", swiglu7(case.tensors[f"in.x_{mode}"]))]


def run_attention(case: Case) -> list[Measure]:
    config, tensors = case.meta["config"], case.tensors
    softcaps = {name: cap if isinstance(cap, float | int) else -1.0 for name, cap in config["softcap"].items()}
    measures = []
    for key in _keys(case, "out."):
        cap, sink, mode = key.removeprefix("out.").split("_")
        out, lse = _attend(tensors, DTYPES[mode], config["scale"], softcaps[cap])
        if sink != "nosink":
            out = apply_sinks_(out, lse, tensors[f"in.sinks{sink.removeprefix('sink')}"])
        measures += judge(case, key, out)
    for key in _keys(case, "mid.lse_"):
        _, lse = _attend(tensors, torch.float32, config["scale"], softcaps[key.removeprefix("mid.lse_")])
        measures.append(max_abs(key, lse, tensors[key], case.meta["tolerance"]["*_f32"]["atol"]))
    return measures


def _attend(tensors: dict[str, Tensor], dtype: torch.dtype, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    q, k, v = (tensors[f"in.{name}"].to(dtype) for name in "qkv")
    return varlen_attention(q, k, v, tensors["in.cu_seqlens"].tolist(), scale=scale, softcap=softcap)


def run_mhc(case: Case) -> list[Measure]:
    config, tensors = case.meta["config"], case.tensors
    n, runs = config["n"], _runs(config["group_sizes"])
    measures = []
    for mode, dtype in DTYPES.items():
        streams = tensors["in.streams_permuted"].to(dtype, copy=True)
        normed = norm_by_modality(streams.flatten(1), tensors["weights.mhc_norm.weight"], runs, torch.float32)
        logits = normed @ tensors["weights.mhc_phi_fused"]
        alphas = [tensors[f"weights.alpha_{kind}"] for kind in ("pre", "post", "res")]
        biases = [tensors[f"weights.bias_{kind}"] for kind in ("pre", "post", "res")]
        mix = coefficients(logits, alphas, biases, (n * config["C"]) ** -0.5, dtype)
        got = {
            "mid.h_pre_logits": logits[:, :n],
            "mid.h_post_logits": logits[:, n : 2 * n],
            "mid.h_res_logits": logits[:, 2 * n :].unflatten(1, (n, n)),
            "mid.h_post": mix.post_NS.t(),
            "mid.h_res": mix.res_NNS.permute(2, 0, 1),
            "out.branch_in": branch_input(streams, mix),
        }
        update_streams_(streams, mix, tensors["in.branch_out"].to(dtype))
        got["out.streams"] = streams
        measures += [m for key, value in got.items() for m in judge(case, f"{key}_{mode}", value)]
    return measures


def run_router(case: Case) -> list[Measure]:
    config, tensors = case.meta["config"], case.tensors
    heads, tokens, experts = tensors["in.logits"].shape
    bias = tensors["in.expert_bias"][:, None]
    weights, chosen = route(tensors["in.logits"], bias, config["top_k"])
    raw, _ = route(tensors["in.logits"], bias, config["top_k"], normalize=False)
    scaled, _ = route(tensors["in.logits"], bias, config["top_k"], scale=config["route_scale"])
    bank = chosen + torch.arange(heads)[:, None, None] * experts
    order, ends = sort_routes(bank.flatten(), heads * experts)
    measures = [
        *judge(case, "out.probs_norm", weights),
        *judge(case, "out.indices", chosen),
        *judge(case, "out.gather_ids", order // config["top_k"] % tokens),
    ]
    # Without a limit of their own: that of the weights they are made from, and integers are exact.
    atol = case.meta["tolerance"]["out.probs_norm"]["atol"]
    for key, got, scale in (
        ("out.probs_raw", raw, 1.0),
        ("out.probs_sorted_scaled", scaled.flatten()[order], config["route_scale"]),
    ):
        if key in tensors:
            measures.append(max_abs(key, got, tensors[key], atol * scale))
    if (key := "out.expert_offsets") in tensors:
        measures.append(equal(key, torch.cat([torch.zeros(1), ends]), tensors[key]))
    return measures


def run_moe_core(case: Case) -> list[Measure]:
    config, tensors = case.meta["config"], case.tensors
    names = MoeConfig.__dataclass_fields__
    moe = MoeConfig(**{**{name: value for name, value in config.items() if name in names}, "moe_layers": (0,)})
    model = PreviewConfig(num_layers=1, hidden_size=config["hidden_size"], head_dim=config["hidden_size"],
                          num_query_groups=1, mm_layers=(), moe=moe)  # fmt: skip
    measures = []
    for mode, dtype in DTYPES.items():
        table = preview_tensors(replace(model, params_dtype=dtype))
        share = ParallelContext.single().share(moe.num_heads, moe.num_experts)
        experts = RoutedExperts(moe, share.banks, Tensors(table, share, "block.layers.0.mlp.moe_mlp."))
        _fill(experts, _weights(tensors))
        x = tensors["in.x"].to(dtype).unflatten(1, (moe.num_heads, -1))
        measures += judge(case, f"out.y_{mode}", experts(x).flatten(1))
        weights, chosen = zip(*(experts.choose(x[:, head], head) for head in range(moe.num_heads)), strict=True)
        if "mid.indices" in tensors:
            measures.append(equal("mid.indices", torch.stack(chosen), tensors["mid.indices"]))
        if "mid.probs" in tensors:
            measures.append(max_abs("mid.probs", torch.stack(weights), tensors["mid.probs"], 1e-5))
    return measures


# Layers and models


def run_layer(case: Case) -> list[Measure]:
    tensors, meta = case.tensors, case.meta["config"]
    config, layout, index = PreviewConfig.from_json(meta), _layout(case), meta["layer_index"]
    prepared = prepare(config, layout, ParallelContext.single(), rotary_bands(config.head_dim), "cpu")
    order = prepared.order_S
    measures = []
    if "mid.rope" in tensors:
        measures.append(max_abs("mid.rope", _packed_order(prepared.rope_SR, order), tensors["mid.rope"], 2e-6))
    for mode, dtype in DTYPES.items():
        share = ParallelContext.single().share(config.moe.num_heads, config.moe.num_experts)
        table = preview_tensors(replace(config, params_dtype=dtype))
        layer = Layer(config, index, Tensors(table, share, f"block.layers.{index}."))
        _fill(layer, _weights(tensors))
        seen: dict[str, Tensor] = {}
        for name, branch in (("attn", layer.attention), ("mlp", layer.mlp)):
            branch.register_forward_hook(_record(seen, name))
        streams = (tensors["in.x"] if order is None else tensors["in.x"][order]).to(dtype, copy=True)
        layer(streams, prepared)
        for key, value in {**seen, "out.y": streams}.items():
            measures += judge(case, f"{key}_{mode}", _packed_order(value, order))
    return measures


def _packed_order(rows: Tensor, order: Tensor | None) -> Tensor:
    """Undo the grouping by modality, which recordings do not show."""
    return rows if order is None else torch.empty_like(rows).index_copy_(0, order, rows)


def _record(seen: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen[f"mid.{name}_in"], seen[f"mid.{name}_out"] = inputs[0].clone(), output.clone()

    return hook


def run_model(case: Case) -> list[Measure]:
    config = PreviewConfig.from_json(case.meta["config"])
    measures = []
    for mode, dtype in DTYPES.items():
        model = PreviewTransformer(config, compute_dtype=dtype)
        _fill(model, _weights(case.tensors))
        seen: dict[str, Tensor] = {}
        model.post_adapter.register_forward_hook(_record(seen, "post"))
        measures += judge(case, f"out.y_{mode}", _forward(model, case))
        if mode == "f32" and "mid.layer_last_f32" in case.tensors:
            order = model.prepare(_layout(case), "cpu").order_S
            last = _packed_order(seen["mid.post_in"], order)
            measures.append(rel_l2("mid.layer_last_f32", last, case.tensors["mid.layer_last_f32"], 1e-5))
    return measures


def run_checkpoint(case: Case) -> list[Measure]:
    """A case NAME_io stands beside the folder NAME, which is what `preview/` is in a checkpoint."""
    config = PreviewConfig.from_json(case.meta["config"])
    measures = []
    for mode, dtype in DTYPES.items():
        with torch.device("meta"):
            model = PreviewTransformer(config, compute_dtype=dtype)
        load_module(model, preview_network(case.folder / case.name.removesuffix("_io"), model.config))
        measures += judge(case, f"out.y_{mode}", _forward(model, case))
    return measures


def _forward(model: PreviewTransformer, case: Case) -> Tensor:
    return model(model.prepare(_layout(case), "cpu"), _tokens(case, model.config))


def _layout(case: Case) -> PackedLayout:
    tensors = case.tensors
    coords = tensors["in.coords_mapping" if "in.coords_mapping" in tensors else "in.coords"]
    return PackedLayout(coords, tensors["in.modality_mapping"], tuple(tensors["in.cu_seqlens"].tolist()))


def _tokens(case: Case, config: PreviewConfig) -> PackedTokens:
    """Cut the recorded rows, which are as wide as the widest modality, into one tensor for each modality."""
    x, modality = case.tensors["in.x"], case.tensors["in.modality_mapping"]
    return PackedTokens(
        video_NC=x[modality == Modality.VIDEO, : config.video_in_channels],
        audio_NC=x[modality == Modality.AUDIO, : config.audio_in_channels],
        text_NC=x[modality >= Modality.TEXT, : config.text_in_channels],
        time_Tc=case.tensors.get("in.time_token_sequence"),
    )


def _weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}


def _fill(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy recorded weights into a module, whose dtype they take; the ema bias is the one in force (10 §12.2)."""
    state = dict(module.state_dict())
    if (bands := "pre_adapter.rope.bands") in state and bands not in weights:
        weights = {**weights, bands: rotary_bands(8 * len(state[bands]))}
    for key, tensor in state.items():
        tensor.copy_(weights[f"{key}_ema" if key.endswith("router.expert_bias") else key])
    if extra := weights.keys() - state.keys():
        raise KeyError(f"the case has weights that the module lacks: {sorted(extra)}")


# Exchanges


def run_exchange(case: Case) -> list[Measure]:
    meta = case.meta
    ranks = run_ranks(meta["P"], _exchange, case.tensors, tuple(meta["split_sizes"]))
    measures = []
    for rank, received in enumerate(ranks):
        for name, got in received.items():
            expected = case.tensors[f"out.rank{rank}.{name}"]
            if name == "moe":  # heads that exist on no rank travel as zeros in the recording, and here not at all
                got = torch.cat([got, got.new_zeros(len(got), expected.shape[1] - got.shape[1], got.shape[2])], 1)
            measures.append(equal(f"out.rank{rank}.{name}", got, expected))
    for ranks_, table in meta.get("moe_head_tables_for_12_heads_256_experts", {}).items():
        shares = bank_shares(12, 256, int(ranks_), "padded")
        measures += [
            equal(f"heads over {ranks_}", [[s.first_head, s.last_head] for s in shares], table["real_head_ranges"]),
            equal(f"rows over {ranks_}", [[s.first_bank, s.last_bank] for s in shares], table["checkpoint_row_ranges"]),
        ]
    for name, counts in meta.get("balanced_splits", {}).items():
        total, parts = (int(part[1:]) for part in name.split("_"))
        measures.append(equal(f"split {name}", list(split_evenly(total, parts)), counts))
    return measures


def _exchange(rank: int, tensors: dict[str, Tensor], counts: tuple[int, ...]) -> dict[str, Tensor]:
    """What one rank receives; it checks for itself that the way back gives its own rows again."""
    split, group = TokenSplit(counts, rank), dist.group.WORLD
    q, k, v, moe = (tensors[f"in.{name}"][split.rows].contiguous() for name in ("q", "k", "v", "moe"))
    q_T, k_T, v_T = scatter_qkv(q, k, v, split, group)
    for sent, received in ((q, q_T), (k, k_T), (v, v_T)):
        back = scatter_tokens_gather_heads(received.contiguous(), split, group)
        copies = back.shape[1] // sent.shape[1]  # of key heads, where there are fewer than ranks (10 §11.1)
        if not torch.equal(back, sent.repeat_interleave(copies, dim=1)):
            raise AssertionError("The way back did not give the rank's own rows.")
    shares = bank_shares(moe.shape[1], 1, len(counts), "padded")
    moe_T = dispatch_heads(moe, split, shares, group)
    if not torch.equal(combine_heads(moe_T, split, shares, group), moe):
        raise AssertionError("The way back did not give the rank's own rows of the MoE heads.")
    return {"q": q_T.clone(), "k": k_T.clone(), "v": v_T.clone(), "moe": moe_T.clone()}


def _runs(group_sizes: list[int]) -> tuple[Run, ...]:
    """Runs of rows that are sorted by modality."""
    ends = [sum(group_sizes[: i + 1]) for i in range(len(group_sizes))]
    return tuple(Run(i, end - size, end) for i, (end, size) in enumerate(zip(ends, group_sizes, strict=True)))


def _keys(case: Case, prefix: str) -> list[str]:
    return sorted(key for key in case.tensors if key.startswith(prefix))
