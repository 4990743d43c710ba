"""The lightning indexer's scores and its selection: which compressed entries each query reads.

`index_scores` and `select_entries` serve the CPU model. `paged_scores` (decode: keys in the page pool) and
`ragged_scores` (prefill: gathered keys) take FP8 queries whose scales are folded into the head weights; DeepGEMM
computes them for 32 or 64 heads, else our Triton kernels; plain torch on the CPU. Selection on the device is
`ops.top_entries`.
"""

from typing import Any

import torch
from torch import Tensor

from worker_svc.ops import registry
from worker_svc.ops.index_scores import ref, rows_ref

LIBRARY_HEADS = (32, 64)


def index_scores(q: Tensor, keys: Tensor, weights: Tensor, *, deterministic: bool = False) -> Tensor:
    """q [T, h, e], keys [n, e], weights [T, h] (scaled) -> [T, n]: sum_h w_h relu(q_h . k_i)."""
    assert q.shape[:2] == weights.shape and q.shape[2] == keys.shape[1], (q.shape, keys.shape, weights.shape)
    return ref.blocked_scores(q, keys, weights) if deterministic else ref.index_scores(q, keys, weights)


def select_entries(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """[T, n] scores, [T] int64 count of visible entries -> [T, n] bool: the k highest visible ones.

    Among equal scores the lowest index wins, on every backend. Entries at or beyond the visible count are never chosen.
    """
    assert visible.dtype == torch.int64 and visible.shape == scores.shape[:1]
    return ref.select_entries(scores, visible, k)


def _backend(codes: Tensor) -> str:
    """Of scores with these queries: the library takes two numbers of heads."""
    if not codes.is_cuda:
        return "torch"
    chosen = registry.backend("index_scores")
    return "triton" if chosen == "deep_gemm" and codes.shape[1] not in LIBRARY_HEADS else chosen


class ScorePlan:
    """What all indexed layers share in one step: lengths, tables and schedule in the library's form.

    scored int32 [T], at least 1 each, and pages int32 [T, pages] are made here if they are not given.
    """

    def __init__(self, scored: Tensor | None = None, pages: Tensor | None = None) -> None:
        self.scored, self.pages = scored, pages
        self.made: Any = None


def paged_scores(
    codes: Tensor,
    folded: Tensor,
    keys: Tensor,
    table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    most: int,
    plan: ScorePlan | None = None,
) -> Tensor:
    """codes E4M3 [T, h, 128], folded FP32 [T, h], keys uint8 [pages, 8448], table int32 [slots, pages per slot], slots
    and lengths int32 [T] -> FP32 [T, most or more]; only the first lengths[t] columns of a row mean anything."""
    assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous() and folded.shape == codes.shape[:2]
    chosen = _backend(codes)
    if chosen == "torch":
        return rows_ref.paged_scores(codes, folded, keys, table, slots, lengths, most)
    if chosen == "deep_gemm":
        from worker_svc.ops.index_scores import deep_gemm

        return deep_gemm.paged_scores(codes, folded, keys, table, slots, lengths, most, plan or ScorePlan())
    from worker_svc.ops.index_scores import triton

    logits = torch.empty(codes.shape[0], most, device=codes.device)
    triton.paged_scores(codes, folded, keys, table, slots, lengths, logits)
    return logits


def ragged_scores(
    codes: Tensor, folded: Tensor, keys: Tensor, key_scale: Tensor, first: Tensor, last: Tensor, most: int
) -> Tensor:
    """codes E4M3 [T, h, 128], folded FP32 [T, h], keys E4M3 [S, 128] with key_scale FP32 [S]; query t meets keys
    first[t] .. last[t] - 1 (int32, at most `most`) -> FP32 [T, most or more], column 0 = key first[t]."""
    assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous() and folded.shape == codes.shape[:2]
    chosen = _backend(codes)
    if chosen == "torch":
        return rows_ref.ragged_scores(codes, folded, keys, key_scale, first, last, most)
    if chosen == "deep_gemm":
        from worker_svc.ops.index_scores import deep_gemm

        return deep_gemm.ragged_scores(codes, folded, keys, key_scale, first, last, most)
    from worker_svc.ops.index_scores import triton

    logits = torch.empty(codes.shape[0], most, device=codes.device)
    triton.ragged_scores(codes, folded, keys, key_scale, first, last, logits)
    return logits
