"""Hyper-connection mixing in plain torch.

comb is applied transposed: new stream k gathers old streams j with comb[j, k]. The Sinkhorn loop starts and ends on
columns: `iterations` column normalisations, `iterations - 1` row normalisations.
"""

import torch
from torch import Tensor


def mix_weights(mixes: Tensor, streams: int, iterations: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See the door. The oracle of the numpy version that CPU runs."""
    pre, post = mixes[:, :streams], mixes[:, streams : 2 * streams]
    comb = mixes[:, 2 * streams :].reshape(-1, streams, streams).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre.sigmoid() + eps, 2 * post.sigmoid(), comb


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    """sum_j pre[j] x[j]."""
    return (x * pre.unsqueeze(-1)).sum(1)


def expand(out: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post[k] out + sum_j comb[j, k] x[j], as one batched product."""
    return torch.baddbmm(post.unsqueeze(-1) * out.unsqueeze(1), comb.transpose(1, 2), x)


def expand_exact_order(out: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The same sum, one stream after the other: no BLAS kernel can reorder it with the batch."""
    mixed = post.unsqueeze(-1) * out.unsqueeze(1)
    for stream in range(x.shape[1]):
        mixed += comb[:, stream, :, None] * x[:, stream, None, :]
    return mixed
