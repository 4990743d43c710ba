"""Routing in Triton: scores, choice and weights of a token by one warp; a split product's parts are added on the way.

log1p is summed as a series: the GPU's fast logarithm near one would cost the small scores all their digits.
"""
# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops.launches import after_others, chained
from worker_svc.ops.partial_sums import parts_of


def select(
    logits: Tensor, bias: Tensor, experts: Tensor, weights: Tensor, factor: float, positions: Tensor | None
) -> None:
    """See the door."""
    _launch(logits, bias, bias, bias, experts, weights, factor, positions, hashed=False)


def select_hash(
    logits: Tensor,
    table: Tensor,
    ids: Tensor,
    experts: Tensor,
    weights: Tensor,
    factor: float,
    positions: Tensor | None,
) -> None:
    """See the door."""
    _launch(logits, logits, table, ids, experts, weights, factor, positions, hashed=True)


def _launch(logits, bias, table, ids, experts, weights, factor, positions, *, hashed):
    parts = parts_of(logits, 2)
    tokens, total = logits.shape[-2:]
    if tokens == 0:
        return
    _select[(tokens,)](
        logits,
        bias,
        table,
        ids,
        experts if positions is None else positions,
        experts,
        weights,
        factor,
        tokens * total,
        EXPERTS=total,
        EXPERTS_POW2=triton.next_power_of_2(total),
        K=experts.shape[1],
        K_POW2=triton.next_power_of_2(experts.shape[1]),
        PARTS=parts,
        PARTS_POW2=triton.next_power_of_2(parts),
        HASHED=hashed,
        PADDED=positions is not None,
        num_warps=1 if parts == 1 else 4,
    )


@chained
@triton.jit(do_not_specialize=["part_stride"])
def _select(
    logits_ptr,
    bias_ptr,
    table_ptr,
    ids_ptr,
    position_ptr,
    experts_ptr,
    weights_ptr,
    factor,
    part_stride,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    K: tl.constexpr,
    K_POW2: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_POW2: tl.constexpr,
    HASHED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One token. A padding token (position -1) gets expert -1 and weight 0."""
    after_others()
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS_POW2)
    there = e < EXPERTS
    if PARTS == 1:
        v = tl.load(logits_ptr + t * EXPERTS + e, mask=there, other=0.0)
    else:  # all parts at once: one after the other they would take a latency each
        part = tl.arange(0, PARTS_POW2)
        at = logits_ptr + part[:, None] * part_stride + t * EXPERTS + e[None, :]
        v = tl.sum(tl.load(at, mask=(part < PARTS)[:, None] & there[None, :], other=0.0), 0)
    scores = tl.sqrt(tl.maximum(v, 0.0) + _log1p(tl.exp(-tl.abs(v))))
    live = True
    if PADDED:
        live = tl.load(position_ptr + t) >= 0
    choice = tl.arange(0, K_POW2)
    chosen = tl.zeros((K_POW2,), tl.int32)
    weights = tl.zeros((K_POW2,), tl.float32)
    if HASHED:
        row = table_ptr + tl.load(ids_ptr + t).to(tl.int64) * K
        for k in tl.static_range(K):
            expert = tl.load(row + k).to(tl.int32)
            chosen = tl.where(choice == k, expert, chosen)
            weights = tl.where(choice == k, tl.sum(tl.where(e == expert, scores, 0.0), 0), weights)
    else:
        biased = tl.where(there, scores + tl.load(bias_ptr + e, mask=there, other=0.0), float("-inf"))
        for k in tl.static_range(K):
            best = tl.max(biased, 0)
            expert = tl.min(tl.where(biased == best, e, EXPERTS_POW2 - 1), 0)
            chosen = tl.where(choice == k, expert, chosen)
            weights = tl.where(choice == k, tl.sum(tl.where(e == expert, scores, 0.0), 0), weights)
            biased = tl.where(e == expert, float("-inf"), biased)
    weights = weights / tl.sum(weights, 0) * factor
    at = t * K + choice
    tl.store(experts_ptr + at, tl.where(live, chosen, -1), mask=choice < K)
    tl.store(weights_ptr + at, tl.where(live, weights, 0.0), mask=choice < K)


@triton.jit
def _log1p(e):
    """log(1 + e) for e in [0, 1]: 2 artanh(e / (2 + e)), to the last bit or two of FP32."""
    z = e / (2.0 + e)
    q = z * z
    series = 1.0 / 13 + q * (1.0 / 15)
    series = 1.0 / 9 + q * (1.0 / 11 + q * series)
    series = 1.0 / 5 + q * (1.0 / 7 + q * series)
    return 2.0 * z * (1.0 + q * (1.0 / 3 + q * series))
