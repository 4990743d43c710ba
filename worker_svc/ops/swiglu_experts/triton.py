"""The experts' middle in Triton: a program per row and piece of the inner width, the shared expert's rows last."""
# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops.launches import after_others, chained
from worker_svc.ops.triton_numbers import pow2_scale, scaled_e4m3, to_bf16

if TYPE_CHECKING:
    from worker_svc.ops.swiglu_experts import Hidden


def middle(routed: Hidden, shared: Hidden | None, limit: float) -> None:
    """See the door."""
    rows, inner = routed.codes.shape
    other = routed if shared is None else shared
    assert (other.codes.shape[1] == inner and other.weights is None) or shared is None, (
        "the shared expert has no weight"
    )
    more = 0 if shared is None else other.codes.shape[0]
    if rows + more == 0:
        return
    piece, warps = _piece(rows + more, inner)
    _middle[(rows + more, triton.cdiv(inner, piece))](
        routed.hidden,
        routed.codes,
        routed.scale,
        *routed.scale.stride(),
        routed.scale if routed.weights is None else routed.weights,
        other.hidden,
        other.codes,
        other.scale,
        *other.scale.stride(),
        rows,
        limit,
        WIDTH=inner,
        WEIGHTED=routed.weights is not None,
        BLOCKS=piece // 128,
        num_warps=warps,
    )


def middle_bf16(hidden: Tensor, weights: Tensor, out: Tensor, limit: float) -> None:
    """See the door."""
    rows, inner = out.shape
    if rows == 0:
        return
    piece, warps = _piece(rows, inner)
    _middle_bf16[(rows, triton.cdiv(inner, piece))](
        hidden, weights, out, limit, WIDTH=inner, BLOCKS=piece // 128, num_warps=warps
    )


def _piece(rows, inner):
    """Channels and warps of a program: few rows are cut finer, to reach all of the chip."""
    piece = min(triton.next_power_of_2(inner), 256 if rows < 64 else 1024 if rows < 512 else 2048)
    return piece, max(1, piece // 512)


@chained
@triton.jit(
    do_not_specialize=["rows", "scale_row", "scale_block", "shared_scale_row", "shared_scale_block"],
)
def _middle(
    hidden_ptr,
    codes_ptr,
    scale_ptr,
    scale_row,
    scale_block,
    weights_ptr,
    shared_hidden_ptr,
    shared_codes_ptr,
    shared_scale_ptr,
    shared_scale_row,
    shared_scale_block,
    rows,
    limit,
    WIDTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    after_others()
    row = tl.program_id(0)
    if row < rows:
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(weights_ptr + row)
        _row(hidden_ptr, codes_ptr, scale_ptr, scale_row, scale_block, row, weight, limit, WIDTH, BLOCKS)
    else:
        _row(
            shared_hidden_ptr,
            shared_codes_ptr,
            shared_scale_ptr,
            shared_scale_row,
            shared_scale_block,
            row - rows,
            1.0,
            limit,
            WIDTH,
            BLOCKS,
        )


@triton.jit
def _row(
    hidden_ptr,
    codes_ptr,
    scale_ptr,
    scale_row,
    scale_block,
    row,
    weight,
    limit,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = row.to(tl.int64)
    b = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    d = b[:, None] * 128 + tl.arange(0, 128)[None, :]
    inner = to_bf16(_swiglu(hidden_ptr + row * (2 * WIDTH), d, weight, limit, WIDTH)).to(tl.float32)
    scale = pow2_scale(tl.max(tl.abs(inner), axis=1))
    tl.store(codes_ptr + row * WIDTH + d, scaled_e4m3(inner, scale[:, None]), mask=d < WIDTH)
    tl.store(scale_ptr + row * scale_row + b * scale_block, scale, mask=b * 128 < WIDTH)


@chained
@triton.jit
def _middle_bf16(hidden_ptr, weights_ptr, out_ptr, limit, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    after_others()
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, BLOCKS * 128)
    inner = _swiglu(hidden_ptr + row * (2 * WIDTH), d, tl.load(weights_ptr + row), limit, WIDTH)
    tl.store(out_ptr + row * WIDTH + d, to_bf16(inner), mask=d < WIDTH)


@triton.jit
def _swiglu(row_ptr, d, weight, limit, WIDTH: tl.constexpr):
    """weight * silu(min(gate, limit)) * clamp(up) of channels d, FP32; zeros behind the width."""
    gate = tl.load(row_ptr + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-gate)) * up * weight
