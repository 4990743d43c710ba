"""Rows with one scale each in Triton: a program per row, all of its channels at once. See `row_scales`."""
# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops.swiglu_experts.triton import _swiglu
from worker_svc.ops.triton_numbers import pow2_scale, scaled_e4m3, to_bf16, to_e4m3


def fold(codes: Tensor, scale: Tensor, out: Tensor, out_scale: Tensor) -> None:
    """See `row_scales.fold`."""
    rows, width = codes.shape
    if rows:
        blocks = triton.next_power_of_2(width // 128)
        _fold_rows[(rows,)](
            codes, scale, out, out_scale, WIDTH=width, BLOCKS=blocks, num_warps=min(8, max(1, blocks // 4))
        )


def folded_middle(hidden: Tensor, weights: Tensor, limit: float, codes: Tensor, scale: Tensor) -> None:
    """See `row_scales.folded_middle`."""
    rows, inner = codes.shape
    if rows:
        blocks = triton.next_power_of_2(inner // 128)
        _folded_middle[(rows,)](
            hidden, weights, limit, codes, scale, WIDTH=inner, BLOCKS=blocks, num_warps=min(8, max(1, blocks // 4))
        )


@triton.jit
def _fold_rows(codes_ptr, scale_ptr, out_ptr, out_scale_ptr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    d = b[:, None] * 128 + tl.arange(0, 128)[None, :]
    scale = tl.load(scale_ptr + row * (WIDTH // 128) + b, mask=b * 128 < WIDTH, other=0.0)
    values = tl.load(codes_ptr + row * WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    _store_folded(values, scale, row, d, out_ptr, out_scale_ptr, WIDTH)


@triton.jit(do_not_specialize=["limit"])
def _folded_middle(hidden_ptr, weights_ptr, limit, codes_ptr, scale_ptr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    d = b[:, None] * 128 + tl.arange(0, 128)[None, :]
    inner = _swiglu(hidden_ptr + row * (2 * WIDTH), d, tl.load(weights_ptr + row), limit, WIDTH)
    inner = to_bf16(inner).to(tl.float32)
    scale = pow2_scale(tl.max(tl.abs(inner), axis=1))
    values = scaled_e4m3(inner, scale[:, None]).to(tl.float32)
    _store_folded(values, tl.where(b * 128 < WIDTH, scale, 0.0), row, d, codes_ptr, scale_ptr, WIDTH)


@triton.jit
def _store_folded(values, scale, row, d, out_ptr, out_scale_ptr, WIDTH: tl.constexpr):
    """Values in units of their block's scale -> codes in units of the largest."""
    largest = tl.max(scale, axis=0)
    codes = to_e4m3(values * (scale / largest)[:, None])
    tl.store(out_ptr + row * WIDTH + d, codes, mask=d < WIDTH)
    tl.store(out_scale_ptr + row, largest)
