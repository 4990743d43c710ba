"""Skinny products in Triton: a program owns a few output columns and streams their weight rows through deep pipelines.

What matters is bytes in flight: small column tiles, so that every SM has one or more programs, and as many pipeline
stages as fill 40 to 60 KB of shared memory. FP8 is summed in FP32 after every 128 of K, where the scales change.
"""
# ruff: noqa: ANN001, ANN202, N803, N806
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops.launches import after_others, chained
from worker_svc.ops.partial_sums import parts_of
from worker_svc.ops.triton_numbers import dot, to_bf16

TILED_ROWS = 64
"""Of a program where any number of rows is cut into such tiles."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Output columns and K of one step of a program, pipeline stages, warps."""

    columns: int
    inner: int
    stages: int
    warps: int


def tile_fp8(rows: int, columns: int, inner: int) -> Tile:
    """Enough programs for 132 SMs, else as wide as they come."""
    if columns >= 16384:
        return Tile(64, 128 if rows <= 16 or inner % 256 else 256, 4, 4)
    if columns >= 4096:
        return Tile(32, 256 if inner % 256 == 0 else 128, 6 if rows <= 16 else 4, 4)
    return Tile(16, 256 if inner % 256 == 0 else 128, 6 if rows <= 16 else 4, 2 if rows <= 16 else 4)


PARTS_TILE = Tile(64, 128, 4, 4)
"""Of an FP8 product whose K is cut into parts: columns alone need not fill the chip any more."""


def tile_bf16(rows: int, columns: int, inner: int) -> Tile:
    """As `tile_fp8`, for twice the bytes."""
    step = 256 if inner % 256 == 0 else 128 if inner % 128 == 0 else 64
    if columns >= 16384:
        return Tile(64, min(step, 128), 4, 4)
    return Tile(16, step, 4 if rows <= 16 else 3, 2 if rows <= 16 else 4)


def fp8_grouped(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out: Tensor,
    tile: Tile | None = None,
    *,
    tiled: bool = False,
) -> None:
    """See the door; `tile` is for tuning."""
    rows, groups, inner = codes.shape
    columns, parts = weight.shape[1], parts_of(out, 3)
    if rows == 0:
        return
    row_tile = TILED_ROWS if tiled else _row_tile(rows)
    whole = tile_fp8(row_tile if tiled else rows, columns * groups, inner)
    tile = tile or (whole if parts == 1 else PARTS_TILE)
    _skinny_fp8[(triton.cdiv(columns, tile.columns), groups * parts, triton.cdiv(rows, row_tile))](
        codes,
        scale,
        weight,
        weight_scale,
        out,
        rows,
        codes.stride(0),
        codes.stride(1),
        *scale.stride(),
        out.stride(-3),
        out.stride(-2),
        out.stride(0),
        COLUMNS=columns,
        INNER=inner,
        SPLITS=parts,
        ROWS=row_tile,
        TILE=tile.columns,
        STEP=tile.inner,
        TO_BF16=out.element_size() == 2,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def bf16(x: Tensor, weight: Tensor, out: Tensor, tile: Tile | None = None, *, tiled: bool = False) -> None:
    """See the door; `tile` is for tuning."""
    rows, inner = x.shape
    parts = parts_of(out, 2)
    columns = weight.shape[0]
    if rows == 0:
        return
    row_tile = TILED_ROWS if tiled else _row_tile(rows)
    tile = tile or tile_bf16(row_tile if tiled else rows, columns, inner)
    steps = triton.cdiv(triton.cdiv(inner, tile.inner), parts)
    _skinny_bf16[(triton.cdiv(columns, tile.columns), parts, triton.cdiv(rows, row_tile))](
        x,
        weight,
        out,
        rows,
        x.stride(0),
        COLUMNS=columns,
        INNER=inner,
        STEPS=steps,
        EVEN=steps * parts * tile.inner == inner,
        ROWS=row_tile,
        TILE=tile.columns,
        STEP=tile.inner,
        TO_BF16=out.element_size() == 2,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _row_tile(rows):
    return max(8, triton.next_power_of_2(rows))


@chained
@triton.jit(do_not_specialize=["rows", "sx_row", "sx_group", "sx_block"])
def _skinny_fp8(
    x_ptr,
    sx_ptr,
    w_ptr,
    sw_ptr,
    out_ptr,
    rows,
    x_row,
    x_group,
    sx_row,
    sx_group,
    sx_block,
    out_row,
    out_group,
    out_part,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    TO_BF16: tl.constexpr,
):
    """TILE columns of one group, as rows of the product: weights are its left operand. TILE divides 128, so all share
    the weight's scales. The scales of a step are loaded a step ahead: nothing else would hide that latency. With SPLITS
    a program takes one piece of K and writes one of so many partial sums."""
    PARTS: tl.constexpr = STEP // 128
    BLOCKS: tl.constexpr = INNER // 128
    SPAN: tl.constexpr = INNER // SPLITS
    group = (tl.program_id(1) // SPLITS).to(tl.int64)
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, 128)
    p = tl.arange(0, PARTS)
    first = tl.program_id(2) * ROWS
    here = m < rows - first
    x_ptr += first.to(tl.int64) * x_row
    sx_ptr += first.to(tl.int64) * sx_row
    out_ptr += first.to(tl.int64) * out_row
    if SPLITS > 1:
        split = tl.program_id(1) % SPLITS
        x_ptr += split * SPAN
        w_ptr += split * SPAN
        sx_ptr += split * (SPAN // 128) * sx_block
        sw_ptr += split * (SPAN // 128)
        out_ptr += split.to(tl.int64) * out_part
    inside = n < COLUMNS
    x = x_ptr + m[None, :] * x_row + group * x_group + k[:, None]
    sx = sx_ptr + m[None, :] * sx_row + group * sx_group
    w = w_ptr + (group * COLUMNS + n)[:, None] * INNER + k[None, :]
    sw = sw_ptr + (group * tl.cdiv(COLUMNS, 128) + tl.program_id(0) * TILE // 128) * BLOCKS
    acc = tl.zeros((TILE, ROWS), tl.float32)
    after_others()
    factors = tl.load(sx + p[:, None] * sx_block, mask=here[None, :], other=0.0) * tl.load(sw + p)[:, None]
    for step in range(0, SPAN, STEP):
        b = tl.minimum(step // 128 + PARTS + p, SPAN // 128 - 1)
        ahead = tl.load(sx + b[:, None] * sx_block, mask=here[None, :], other=0.0)
        ahead_w = tl.load(sw + b)
        for part in tl.static_range(PARTS):
            at = step + part * 128
            weight = tl.load(w + at, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
            codes = tl.load(x + at, mask=here[None, :], other=0.0)
            factor = tl.sum(tl.where(p[:, None] == part, factors, 0.0), 0)
            acc += dot(weight, codes, tl.zeros((TILE, ROWS), tl.float32)) * factor[None, :]
        factors = ahead * ahead_w[:, None]
    out = out_ptr + m[None, :] * out_row + group * out_group + n[:, None]
    value = to_bf16(acc) if TO_BF16 else acc
    tl.store(out, value, mask=here[None, :] & inside[:, None])


@chained
@triton.jit(do_not_specialize=["rows"])
def _skinny_bf16(
    x_ptr,
    w_ptr,
    out_ptr,
    rows,
    x_row,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    TO_BF16: tl.constexpr,
):
    """TILE columns over one part of K, the weights as left operand."""
    part = tl.program_id(1)
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m = tl.arange(0, ROWS)
    k = part * (STEPS * STEP) + tl.arange(0, STEP)
    first = tl.program_id(2) * ROWS
    here = m < rows - first
    x_ptr += first.to(tl.int64) * x_row
    out_ptr += first.to(tl.int64) * COLUMNS
    inside = n < COLUMNS
    x = x_ptr + m[None, :] * x_row + k[:, None]
    w = w_ptr + n[:, None].to(tl.int64) * INNER + k[None, :]
    acc = tl.zeros((TILE, ROWS), tl.float32)
    after_others()
    for step in range(STEPS):
        if EVEN:  # a mask along K would break the loads into pairs of bytes
            weight = tl.load(w, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
            acc = dot(weight, tl.load(x, mask=here[None, :], other=0.0), acc)
        else:
            left = INNER - step * STEP
            weight = tl.load(w, mask=inside[:, None] & (k < left)[None, :], other=0.0, eviction_policy="evict_first")
            acc = dot(weight, tl.load(x, mask=here[None, :] & (k < left)[:, None], other=0.0), acc)
        x += STEP
        w += STEP
    out = out_ptr + (part * rows + m)[None, :].to(tl.int64) * COLUMNS + n[:, None]
    value = to_bf16(acc) if TO_BF16 else acc
    tl.store(out, value, mask=here[None, :] & inside[:, None])
