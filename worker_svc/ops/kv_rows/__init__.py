"""KV rows in the layout that sparse attention kernels read: 584-byte FP8 rows (or BF16 rows) in pages of 64.

A row number is flat: row r is row r % 64 of kernel page r // 64. An FP8 page holds 64 data rows of 576 bytes (448 E4M3
values, 64 BF16 rope values), then 64 scale rows of 8 bytes (7 E8M0 exponents, one per 64 values, and a zero), padded to
a multiple of 576. A BF16 page holds 64 x 512 values. An index page holds 64 x 128 E4M3 values, then 64 FP32 scales.
Who owns which row is not known here. Rows numbered -1 are skipped when written and read back as zeros.
"""

import torch
from torch import Tensor

from worker_svc.ops.kv_rows import ref
from worker_svc.ops.kv_rows.ref import (
    BF16_PAGE_BYTES,
    FP8_PAGE_BYTES,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_PAGE_BYTES,
    KERNEL_PAGE,
    ROW_BYTES,
)

__all__ = [
    "BF16_PAGE_BYTES",
    "FP8_PAGE_BYTES",
    "HEAD_DIM",
    "INDEX_DIM",
    "INDEX_PAGE_BYTES",
    "KERNEL_PAGE",
    "ROW_BYTES",
    "allocate",
    "allocate_index",
    "gather_index_rows",
    "gather_rows",
    "insert_index_rows",
    "insert_rows",
    "rows584",
]


def allocate(num_rows: int, device: torch.device | str, *, bf16: bool = False) -> Tensor:
    """Pool of KV rows, zeroed: uint8 [pages, page bytes]. The page size says the format from here on."""
    size = BF16_PAGE_BYTES if bf16 else FP8_PAGE_BYTES
    return torch.zeros(-(-num_rows // KERNEL_PAGE), size, dtype=torch.uint8, device=device)


def allocate_index(num_rows: int, device: torch.device | str) -> Tensor:
    """Pool of indexer key rows, zeroed: uint8 [pages, 8448]."""
    return torch.zeros(-(-num_rows // KERNEL_PAGE), INDEX_PAGE_BYTES, dtype=torch.uint8, device=device)


def rows584(pool: Tensor) -> Tensor:
    """The pool as the sparse attention library wants it: uint8 [pages, 64, 1, 584], pages padded apart."""
    assert pool.shape[1] == FP8_PAGE_BYTES, pool.shape
    return pool.as_strided((pool.shape[0], KERNEL_PAGE, 1, ROW_BYTES), (FP8_PAGE_BYTES, ROW_BYTES, ROW_BYTES, 1))


def insert_rows(values: Tensor, pool: Tensor, rows: Tensor) -> None:
    """values [n, 512] float (any row stride) into rows int32 [n] of `pool`, rounded to its format."""
    _check_pool(pool, rows)
    assert values.shape == (rows.shape[0], HEAD_DIM) and values.stride(1) == 1, (values.shape, values.stride())
    if values.is_cuda:
        from worker_svc.ops.kv_rows import triton

        triton.insert_rows(values, pool, rows)
    else:
        ref.insert_rows(values, pool, rows)


def gather_rows(pool: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """rows int32 [n] of `pool` -> out bf16 [n, 512] (any row stride); returns out."""
    _check_pool(pool, rows)
    assert out.shape == (rows.shape[0], HEAD_DIM) and out.dtype == torch.bfloat16 and out.stride(1) == 1, out.shape
    if pool.is_cuda:
        from worker_svc.ops.kv_rows import triton

        triton.gather_rows(pool, rows, out)
    else:
        out.copy_(ref.read_rows(pool, rows))
    return out


def insert_index_rows(values: Tensor, pool: Tensor, rows: Tensor) -> None:
    """values [n, 128] float, already rotated and transformed, into rows int32 [n] of an index pool. Reference only:
    the kernels write index rows where they make them."""
    assert pool.shape[1] == INDEX_PAGE_BYTES and not pool.is_cuda, pool.shape
    ref.insert_index_rows(values, pool, rows)


def gather_index_rows(pool: Tensor, rows: Tensor, codes: Tensor, scale: Tensor) -> None:
    """rows int32 [n] of an index pool -> codes e4m3 [n, 128], scale FP32 [n]."""
    assert pool.shape[1] == INDEX_PAGE_BYTES and pool.dtype == torch.uint8 and rows.dtype == torch.int32
    assert codes.shape == (rows.shape[0], INDEX_DIM) and codes.is_contiguous() and scale.shape == rows.shape
    if pool.is_cuda:
        from worker_svc.ops.kv_rows import triton

        triton.gather_index_rows(pool, rows, codes, scale)
    else:
        ref.gather_index_rows(pool, rows, codes, scale)


def _check_pool(pool: Tensor, rows: Tensor) -> None:
    assert pool.dtype == torch.uint8 and pool.is_contiguous() and pool.shape[1] in (FP8_PAGE_BYTES, BF16_PAGE_BYTES)
    assert rows.dtype == torch.int32 and rows.dim() == 1 and rows.is_contiguous(), (rows.dtype, rows.shape)
