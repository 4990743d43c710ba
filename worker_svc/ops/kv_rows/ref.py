"""The page layouts of KV and index rows in plain torch: byte for byte what the kernels read and write.

Scales follow `quant_fp8`: a power of two per 64 (KV) or 128 (index) values, from FP32 values, E4M3 rounded to nearest
even and saturating.
"""

import torch
from torch import Tensor

from worker_svc.ops import quant_fp8

KERNEL_PAGE = 64
HEAD_DIM, NOPE = 512, 448
ROW_BYTES, DATA_BYTES, SCALE_BYTES = 584, 576, 8
FP8_PAGE_BYTES = -(-KERNEL_PAGE * ROW_BYTES // DATA_BYTES) * DATA_BYTES
BF16_PAGE_BYTES = KERNEL_PAGE * HEAD_DIM * 2
INDEX_DIM = 128
INDEX_PAGE_BYTES = KERNEL_PAGE * (INDEX_DIM + 4)


def data_view(pool: Tensor) -> Tensor:
    """[pages, 64, 576] bytes of the data rows of an FP8 pool."""
    return _part(pool, 0, DATA_BYTES)


def scale_view(pool: Tensor) -> Tensor:
    """[pages, 64, 8] bytes of the scale rows of an FP8 pool."""
    return _part(pool, KERNEL_PAGE * DATA_BYTES, SCALE_BYTES)


def round_rows(values: Tensor, *, bf16: bool) -> Tensor:
    """FP32 [n, 512] as rows read back after they were written."""
    if bf16:
        return values.bfloat16().float()
    head = quant_fp8.fake_quant(values[:, :NOPE].float(), quant_fp8.KV_BLOCK)
    return torch.cat([head, values[:, NOPE:].bfloat16().float()], dim=1)


def insert_rows(values: Tensor, pool: Tensor, rows: Tensor) -> None:
    """See the door."""
    kept = rows >= 0
    values, page, place = values[kept].float(), _pages(rows[kept]), _places(rows[kept])
    if pool.shape[1] == BF16_PAGE_BYTES:
        pool.view(torch.bfloat16).view(-1, KERNEL_PAGE, HEAD_DIM)[page, place] = values.bfloat16()
        return
    codes, exponent = quant_fp8.quantise(values[:, :NOPE], quant_fp8.KV_BLOCK)
    tail = values[:, NOPE:].bfloat16().contiguous().view(torch.uint8)
    data_view(pool)[page, place] = torch.cat([codes.view(torch.uint8), tail], dim=1)
    scale_view(pool)[page, place] = torch.nn.functional.pad(exponent, (0, 1))


def read_rows(pool: Tensor, rows: Tensor) -> Tensor:
    """bf16 [n, 512]."""
    safe = rows.clamp(min=0)
    page, place = _pages(safe), _places(safe)
    if pool.shape[1] == BF16_PAGE_BYTES:
        out = pool.view(torch.bfloat16).view(-1, KERNEL_PAGE, HEAD_DIM)[page, place]
    else:
        data, scale = data_view(pool)[page, place], scale_view(pool)[page, place]
        codes = data[:, :NOPE].contiguous().view(torch.float8_e4m3fn)
        head = quant_fp8.dequantise(codes, scale[:, : NOPE // quant_fp8.KV_BLOCK], quant_fp8.KV_BLOCK)
        out = torch.cat([head.bfloat16(), data[:, NOPE:].contiguous().view(torch.bfloat16)], dim=1)
    return torch.where((rows >= 0).unsqueeze(1), out, torch.zeros((), dtype=out.dtype))


def insert_index_rows(values: Tensor, pool: Tensor, rows: Tensor) -> None:
    """See the door."""
    kept = rows >= 0
    codes, exponent = quant_fp8.quantise(values[kept].float(), quant_fp8.ACTIVATION_BLOCK)
    page, place = _pages(rows[kept]), _places(rows[kept])
    _index_codes(pool)[page, place] = codes.view(torch.uint8)
    _index_scale(pool)[page, place] = quant_fp8.scale_value(exponent)[:, 0].unsqueeze(1).view(torch.uint8)


def gather_index_rows(pool: Tensor, rows: Tensor, codes: Tensor, scale: Tensor) -> None:
    """See the door."""
    safe = rows.clamp(min=0)
    page, place = _pages(safe), _places(safe)
    read = (rows >= 0).unsqueeze(1)
    zero = torch.zeros((), dtype=torch.uint8)
    codes.view(torch.uint8).copy_(torch.where(read, _index_codes(pool)[page, place], zero))
    scale.copy_(torch.where(read, _index_scale(pool)[page, place], zero).contiguous().view(torch.float32)[:, 0])


def _index_codes(pool: Tensor) -> Tensor:
    return _part(pool, 0, INDEX_DIM)


def _index_scale(pool: Tensor) -> Tensor:
    return _part(pool, KERNEL_PAGE * INDEX_DIM, 4)


def _pages(rows: Tensor) -> Tensor:
    return torch.div(rows.long(), KERNEL_PAGE, rounding_mode="floor")


def _places(rows: Tensor) -> Tensor:
    return rows.long() % KERNEL_PAGE


def _part(pool: Tensor, first: int, size: int) -> Tensor:
    """[pages, 64, size]: the 64 pieces of `size` bytes of each page from byte `first` on."""
    return pool[:, first : first + KERNEL_PAGE * size].view(pool.shape[0], KERNEL_PAGE, size)
