"""Expert sort in Triton: a program per (expert, chunk of slots) finds its own slots and where they go.

One launch while all slots fit one chunk (every program counts them for itself); above, a first launch counts chunks.
"""
# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops.expert_sort.ref import CHUNK
from worker_svc.ops.launches import after_others_alone, chained


def sort_slots(
    ids: Tensor, slots: Tensor, experts: Tensor, num_padded: Tensor, layout: Tensor, counts: Tensor, block: int
) -> None:
    """See the door."""
    total, num_experts = ids.numel(), layout.numel() - 1
    chunks = max(1, triton.cdiv(total, CHUNK))
    size = CHUNK if chunks > 1 else max(32, triton.next_power_of_2(total))
    width = triton.next_power_of_2(num_experts)
    if chunks > 1:
        _count[(chunks,)](ids, counts, total, EXPERTS=num_experts, WIDTH=width, SIZE=size, num_warps=8)
    _place[(num_experts, chunks)](
        ids,
        counts,
        slots,
        experts,
        num_padded,
        layout,
        total,
        chunks,
        EXPERTS=num_experts,
        WIDTH=width,
        SIZE=size,
        COUNTED=chunks > 1,
        CHUNKS_POW2=triton.next_power_of_2(chunks),
        BLOCK=block,
        BLOCK_POW2=triton.next_power_of_2(block),
        num_warps=8 if size >= 2048 else 4 if size >= 256 else 1,
    )


@triton.jit
def _histogram(ids_ptr, first, total, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Slots of each expert among SIZE ids: int32 [WIDTH]."""
    i = first + tl.arange(0, SIZE)
    ids = tl.load(ids_ptr + i, mask=i < total, other=-1)
    return tl.histogram(tl.where(ids >= 0, ids, 0), WIDTH, mask=ids >= 0)


@triton.jit(do_not_specialize=["total"])
def _count(ids_ptr, counts_ptr, total, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    chunk = tl.program_id(0)
    e = tl.arange(0, WIDTH)
    tl.store(counts_ptr + chunk * EXPERTS + e, _histogram(ids_ptr, chunk * SIZE, total, WIDTH, SIZE), mask=e < EXPERTS)


@chained
@triton.jit(do_not_specialize=["total", "chunks"])
def _place(
    ids_ptr,
    counts_ptr,
    slots_ptr,
    experts_ptr,
    num_padded_ptr,
    layout_ptr,
    total,
    chunks,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    COUNTED: tl.constexpr,
    CHUNKS_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_POW2: tl.constexpr,
):
    """The slots of one expert in one chunk; chunk 0 also fills the expert's padding and block numbers."""
    after_others_alone()
    expert = tl.program_id(0)
    chunk = tl.program_id(1)
    e = tl.arange(0, WIDTH)
    before = 0
    if not COUNTED:
        counts = _histogram(ids_ptr, 0, total, WIDTH, SIZE)
    else:
        c = tl.arange(0, CHUNKS_POW2)
        at = counts_ptr + c[:, None] * EXPERTS + e[None, :]
        counts = tl.sum(tl.load(at, mask=(c < chunks)[:, None] & (e < EXPERTS)[None, :], other=0), 0)
        own = tl.load(counts_ptr + c * EXPERTS + expert, mask=c < chunk, other=0)
        before = tl.sum(own, 0)
    blocks = (counts + BLOCK - 1) // BLOCK
    first_block = tl.sum(tl.where(e < expert, blocks, 0), 0)
    count = tl.sum(tl.where(e == expert, counts, 0), 0)
    first = first_block * BLOCK
    i = chunk * SIZE + tl.arange(0, SIZE)
    mine = tl.load(ids_ptr + i, mask=i < total, other=-1) == expert
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(slots_ptr + first + before + rank, i, mask=mine)
    if chunk == 0:
        num_blocks = (count + BLOCK - 1) // BLOCK
        pad = tl.arange(0, BLOCK_POW2)
        tl.store(slots_ptr + first + count + pad, total + pad * 0, mask=count + pad < num_blocks * BLOCK)
        for b in range(num_blocks):
            tl.store(experts_ptr + first_block + b, expert)
        tl.store(layout_ptr + expert + 1, tl.sum(tl.where(e <= expert, counts, 0), 0))
        if expert == 0:
            tl.store(layout_ptr, 0)
            tl.store(num_padded_ptr, tl.sum(blocks, 0) * BLOCK)
