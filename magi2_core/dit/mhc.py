"""Manifold-constrained hyper-connections: how a branch reads from and writes to the residual streams (10 §6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SINKHORN_ROUNDS = 20
SINKHORN_EPS = 1e-12


class Mix(NamedTuple):
    """A branch's coefficients for some rows, rounded to the compute dtype.

    pre_NS weighs the streams into the branch input, post_NS the branch output into each stream, res_NNS[i, j] stream j
    into stream i. Rows come last, so that sums over the few streams run along whole vectors.
    """

    pre_NS: Tensor
    post_NS: Tensor
    res_NNS: Tensor

    def rows(self, rows: slice) -> Mix:
        return Mix(self.pre_NS[:, rows], self.post_NS[:, rows], self.res_NNS[..., rows])


def coefficients(
    logits_SG: Tensor, alphas: Sequence[Tensor], biases: Sequence[Tensor], kappa: float, dtype: torch.dtype
) -> Mix:
    """Turn projected streams into coefficients; fp32 up to one rounding to `dtype` (10 §6 steps 2, 5, 6).

    logits_SG: fp32 [rows, 2N + N²], the normed streams times phi: columns pre | post | res, res row-major (i, j).
    alphas: three [1]; biases: [N], [N], [N, N]; each in the order pre, post, res. kappa = (N·D)^-1/2.
    """
    n = biases[0].shape[0]
    pre_NS, post_NS, res_GS = logits_SG.t().contiguous().split([n, n, n * n])
    pre_NS = torch.sigmoid(alphas[0] * kappa * pre_NS + biases[0][:, None])
    post_NS = 2 * torch.sigmoid(alphas[1] * kappa * post_NS + biases[1][:, None])
    res_NNS = sinkhorn(alphas[2] * kappa * res_GS.unflatten(0, (n, n)) + biases[2][..., None])
    return Mix(pre_NS.to(dtype), post_NS.to(dtype), res_NNS.to(dtype))


def sinkhorn(logits_NNS: Tensor) -> Tensor:
    """exp of fp32 logits [N, N, rows], made nearly doubly stochastic by 20 rounds, columns first and rows last."""
    a_NNS = torch.exp(logits_NNS - logits_NNS.amax((0, 1)))
    for _ in range(SINKHORN_ROUNDS):
        a_NNS = a_NNS / (a_NNS.sum(0, keepdim=True) + SINKHORN_EPS)
        a_NNS = a_NNS / (a_NNS.sum(1, keepdim=True) + SINKHORN_EPS)
    return a_NNS


def branch_input(streams_SND: Tensor, mix: Mix) -> Tensor:
    """Σ_j pre_j · stream_j -> [rows, D]: accumulated in fp32, rounded once to the streams' dtype (10 §6 step 3)."""
    _check_streams(streams_SND, mix)
    total_SD = streams_SND[:, 0].float() * mix.pre_NS[0, :, None].float()
    for j in range(1, streams_SND.shape[1]):
        total_SD.addcmul_(streams_SND[:, j].float(), mix.pre_NS[j, :, None].float())
    return total_SD.to(streams_SND.dtype)


def update_streams_(streams_SND: Tensor, mix: Mix, out_SD: Tensor) -> None:
    """stream_i := Σ_j res[i, j] · stream_j + post_i · out, in place: fp32 sum, j ascending, the branch last, rounded
    once (10 §6 step 7)."""
    _check_streams(streams_SND, mix)
    if out_SD.shape != (streams_SND.shape[0], streams_SND.shape[2]):
        raise ValueError(
            f"The branch output has shape {tuple(out_SD.shape)}, but the streams are {tuple(streams_SND.shape)}; it "
            "must have their rows and their width."
        )
    old_SND = streams_SND.float()
    res_SNN, post_SN = mix.res_NNS.permute(2, 0, 1).float(), mix.post_NS.t().float()
    new_SND = res_SNN[:, :, 0, None] * old_SND[:, 0, None]
    for j in range(1, streams_SND.shape[1]):
        new_SND.addcmul_(res_SNN[:, :, j, None], old_SND[:, j, None])
    new_SND.addcmul_(post_SN[..., None], out_SD[:, None].float())
    streams_SND.copy_(new_SND)


def _check_streams(streams_SND: Tensor, mix: Mix) -> None:
    n, rows = mix.pre_NS.shape
    if streams_SND.ndim != 3 or streams_SND.shape[:2] != (rows, n):
        raise ValueError(f"The streams have shape {tuple(streams_SND.shape)}; expected [{rows}, {n}, width].")
