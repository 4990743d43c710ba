"""All plans of a step in one launch: a program makes some parts of one plan from a running sum over all requests."""

# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops.split_plan.ref import BLOCK, REQUEST_COST

if TYPE_CHECKING:
    from worker_svc.ops.split_plan import SplitPlans

PARTS = 16
"""Parts of one program."""


@triton.jit(do_not_specialize=["batch", "num_parts"])
def _split_plans(
    near_ptr,
    c4_ptr,
    c128_ptr,
    parts_ptr,
    splits_ptr,
    batch,
    num_parts,
    BLOCK: tl.constexpr,
    REQUEST_COST: tl.constexpr,
    BATCH: tl.constexpr,
    PARTS: tl.constexpr,
):
    kind = tl.program_id(1)
    request = tl.arange(0, BATCH)
    here = request < batch
    n = tl.cdiv(tl.maximum(tl.load(near_ptr + request, mask=here, other=0), 1), BLOCK)
    n += tl.cdiv(tl.load(c4_ptr + request, mask=here & (kind == 1), other=0), BLOCK)
    n += tl.cdiv(tl.load(c128_ptr + request, mask=here & (kind == 2), other=0), BLOCK)
    n = tl.where(here, n, 0)
    behind = tl.cumsum(n, 0)
    total = tl.sum(n, 0)
    most = tl.max(n, 0)
    least = tl.min(tl.where(here, n, most), 0)
    each = tl.cdiv(total, num_parts)
    per_part = tl.cdiv(batch, num_parts)
    equal = most == least
    aligned = equal & ((most % each == 0) | (each % most == 0))
    touched = tl.where(aligned, tl.maximum(each // most, 1), 1 + tl.cdiv(each - 1, least))
    whole = equal & ((most + REQUEST_COST) * per_part < each + REQUEST_COST * touched)
    each = tl.where(whole, most * per_part, each)

    part = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    begin = tl.minimum(part * each, total)
    end = tl.minimum(begin + each, total)
    busy = begin < total
    sums = behind[None, :]
    passed = here[None, :] & (sums <= begin[:, None])
    first = tl.sum(passed.to(tl.int32), 1)
    first_start = tl.max(tl.where(passed, sums, 0), 1)
    over = here[None, :] & (sums < end[:, None])
    last = tl.sum(over.to(tl.int32), 1)
    last_start = tl.max(tl.where(over, sums, 0), 1)
    last_end = tl.min(tl.where(here[None, :] & (sums >= end[:, None]), sums, total), 1)
    cut_first = begin > first_start
    cut_last = end < last_end
    either = (first == last) & (cut_first | cut_last)
    row = parts_ptr + (kind * num_parts + part) * 8
    inside = part < num_parts
    tl.store(row, tl.where(busy, first, batch), mask=inside)
    tl.store(row + 1, tl.where(busy, last, batch - 1), mask=inside)
    tl.store(row + 2, tl.where(busy, begin - first_start, 0), mask=inside)
    tl.store(row + 3, tl.where(busy, end - last_start, 0), mask=inside)
    tl.store(row + 4, tl.where(busy, part - first_start // each, 0), mask=inside)
    tl.store(row + 5, (busy & (cut_first | either)).to(tl.int32), mask=inside)
    tl.store(row + 6, (busy & (cut_last | either)).to(tl.int32), mask=inside)
    tl.store(row + 7, tl.zeros_like(part), mask=inside)
    if tl.program_id(0) == 0:
        shared = tl.where(here, (behind - 1) // each - (behind - n) // each + 1, 0)
        splits = splits_ptr + kind * (batch + 1)
        tl.store(splits, 0)
        tl.store(splits + 1 + request, tl.cumsum(shared, 0), mask=here)


def split_plans(near: Tensor, c4: Tensor, c128: Tensor, plans: SplitPlans) -> None:
    """See the door."""
    batch, parts = near.shape[0], plans.parts.shape[1]
    width = triton.next_power_of_2(batch)
    _split_plans[(triton.cdiv(parts, PARTS), 3)](
        near,
        c4,
        c128,
        plans.parts,
        plans.splits,
        batch,
        parts,
        BLOCK=BLOCK,
        REQUEST_COST=REQUEST_COST,
        BATCH=width,
        PARTS=PARTS,
        num_warps=4,
    )
