"""Moves between KV pools and plain tensors: one program per row (insert) or per 8 rows (gather).

Gathering is what prefill does with the compressed entries of a whole context: it reads 584 bytes and writes 1,024 per
row, bound by memory.
"""

# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops.kv_rows.ref import BF16_PAGE_BYTES, INDEX_PAGE_BYTES
from worker_svc.ops.triton_rows import PAGE, load_rows, store_row

ROWS = 8


@triton.jit
def _insert_rows(values, stride, pool, page_bytes, rows, BF16: tl.constexpr):
    number = tl.program_id(0)
    row = tl.load(rows + number)
    if row >= 0:
        place = tl.arange(0, 8)[:, None] * 64 + tl.arange(0, 64)[None, :]
        y = tl.load(values + number.to(tl.int64) * stride + place).to(tl.float32)
        store_row(y, pool, row, page_bytes, BF16)


@triton.jit(do_not_specialize=["count"])
def _gather_rows(pool, page_bytes, rows, count, out, out_stride, ROWS: tl.constexpr, BF16: tl.constexpr):
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + number, mask=number < count, other=-1)
    values = load_rows(pool, row, page_bytes, BF16)
    target = out + number.to(tl.int64)[:, None] * out_stride + tl.arange(0, 512)[None, :]
    tl.store(target, values, mask=(number < count)[:, None])


@triton.jit(do_not_specialize=["count"])
def _gather_index_rows(pool, page_bytes, rows, count, codes, scale, ROWS: tl.constexpr):
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + number, mask=number < count, other=-1)
    safe = tl.maximum(row, 0)
    page = pool + (safe // PAGE).to(tl.int64) * page_bytes
    place = tl.arange(0, 128)[None, :]
    values = tl.load((page + (safe % PAGE) * 128)[:, None] + place, mask=(row >= 0)[:, None], other=0)
    tl.store(codes + number.to(tl.int64)[:, None] * 128 + place, values, mask=(number < count)[:, None])
    factor = (page + PAGE * 128).to(tl.pointer_type(tl.float32)) + safe % PAGE
    tl.store(scale + number, tl.load(factor, mask=row >= 0, other=0.0), mask=number < count)


def insert_rows(values: Tensor, pool: Tensor, rows: Tensor) -> None:
    """See the door."""
    if rows.shape[0]:
        bf16 = pool.shape[1] == BF16_PAGE_BYTES
        _insert_rows[(rows.shape[0],)](values, values.stride(0), pool, pool.stride(0), rows, BF16=bf16, num_warps=1)


def gather_rows(pool: Tensor, rows: Tensor, out: Tensor) -> None:
    """See the door."""
    count = rows.shape[0]
    if count:
        bf16 = pool.shape[1] == BF16_PAGE_BYTES
        grid = (triton.cdiv(count, ROWS),)
        _gather_rows[grid](pool, pool.stride(0), rows, count, out, out.stride(0), ROWS=ROWS, BF16=bf16, num_warps=4)


def gather_index_rows(pool: Tensor, rows: Tensor, codes: Tensor, scale: Tensor) -> None:
    """See the door."""
    count = rows.shape[0]
    assert pool.shape[1] == INDEX_PAGE_BYTES
    if count:
        grid = (triton.cdiv(count, 4 * ROWS),)
        args = (pool, pool.stride(0), rows, count, codes.view(pool.dtype), scale)
        _gather_index_rows[grid](*args, ROWS=4 * ROWS, num_warps=4)
