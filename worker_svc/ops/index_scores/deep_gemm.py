"""Indexer scores by DeepGEMM (Hopper): FP8 products, relu, weighted sum over heads, FP32 logits."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker_svc.ops.fp8_gemm.deep_gemm import package

if TYPE_CHECKING:
    from worker_svc.ops.index_scores import ScorePlan

PAGE_ROWS = 64
ROW_BYTES = 132


def paged_scores(
    codes: Tensor,
    folded: Tensor,
    keys: Tensor,
    table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    most: int,
    plan: "ScorePlan",
) -> Tensor:
    """See the door. The library refuses empty rows: those are scored as if they had one entry, which nobody reads."""
    library = package()
    if plan.made is None:
        counted = (lengths.clamp(min=1) if plan.scored is None else plan.scored).unsqueeze(1)
        schedule = library.get_paged_mqa_logits_metadata(counted, PAGE_ROWS, library.get_num_sms())
        plan.made = counted, table.index_select(0, slots) if plan.pages is None else plan.pages, schedule
    counted, pages, schedule = plan.made
    scores: Tensor = library.fp8_fp4_paged_mqa_logits(
        (codes.unsqueeze(1), None),
        keys.view(-1, PAGE_ROWS, 1, ROW_BYTES),
        folded,
        counted,
        pages,
        schedule,
        most,
        clean_logits=False,
    )
    return scores


def ragged_scores(
    codes: Tensor, folded: Tensor, keys: Tensor, key_scale: Tensor, first: Tensor, last: Tensor, most: int
) -> Tensor:
    """See the door."""
    scores: Tensor = package().fp8_fp4_mqa_logits(
        (codes, None),
        (keys, key_scale),
        folded,
        first,
        last,
        clean_logits=False,
        max_seqlen_k=max(1, most),
        logits_dtype=torch.float32,
    )
    return scores
