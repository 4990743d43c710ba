"""Device functions of the attention-side Triton kernels: rotation of pairs, E4M3 blocks, KV rows in their pools.

A KV row is a tile [8, 64]: seven blocks with a scale each and the rotated block, kept in BF16. Page layouts are those
of `ops.kv_rows`. Import only where triton is installed.
"""

# ruff: noqa: ANN001, ANN201, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl

from worker_svc.ops.triton_numbers import pow2_scale, to_bf16, to_e4m3

PAGE = tl.constexpr(64)
DATA_BYTES = tl.constexpr(576)


@triton.jit
def added(x, part_stride, mask, PARTS: tl.constexpr):
    """FP32: what the pointers x hold, over all parts of a split product (`partial_sums`)."""
    total = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * part_stride, mask=mask, other=0.0)
    return total


@triton.jit
def inverse(scale):
    """1 / scale of a power of two, exact, without a division."""
    return (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def codes_of(x, inverse_scale):
    """E4M3 of x * inverse_scale, saturating."""
    return to_e4m3(tl.minimum(tl.maximum(x * inverse_scale, -448.0), 448.0))


@triton.jit
def turn_pairs(x, cos, sin):
    """x [..., 2] of adjacent pairs times cos + i sin [...]."""
    even, odd = tl.split(x)
    return tl.join(even * cos - odd * sin, even * sin + odd * cos)


@triton.jit
def pair_turns(turn, pair, FIRST: tl.constexpr):
    """cos and sin of pairs [n] (leading dims of 1 allowed) of a vector whose pairs FIRST .. FIRST + 31 turn; 1 and 0 of
    the others. `turn`: the position's 32 (cos, sin)."""
    both = tl.arange(0, 2)
    angle = turn + (pair - FIRST)[:, None] * 2 + both[None, :]
    turning = (pair >= FIRST)[:, None] & (both >= 0)[None, :]
    still = tl.where(both == 0, 1.0, 0.0)[None, :]
    return tl.split(tl.load(angle, mask=turning, other=0.0) + tl.where(turning, 0.0, still))


@triton.jit
def store_row(y, pool, row, page_bytes, BF16: tl.constexpr):
    """y FP32 [8, 64] into row `row` of the pool, in its format."""
    block = tl.arange(0, 8)[:, None]
    place = tl.arange(0, 64)[None, :]
    page = pool + (row // PAGE).to(tl.int64) * page_bytes
    if BF16:
        target = (page + (row % PAGE) * 1024).to(tl.pointer_type(tl.bfloat16))
        tl.store(target + block * 64 + place, to_bf16(y))
    else:
        scale = pow2_scale(tl.max(tl.abs(y), 1))
        data = page + (row % PAGE) * DATA_BYTES
        codes = codes_of(y, inverse(scale)[:, None])
        tl.store(data.to(tl.pointer_type(tl.float8e4nv)) + block * 64 + place, codes, mask=block < 7)
        rope = data.to(tl.pointer_type(tl.bfloat16)) + 224 + place + block * 0
        tl.store(rope, to_bf16(y), mask=block == 7)
        group = tl.arange(0, 8)
        exponent = tl.where(group < 7, scale.to(tl.int32, bitcast=True) >> 23, 0)
        tl.store(page + PAGE * DATA_BYTES + (row % PAGE) * 8 + group, exponent.to(tl.uint8))


@triton.jit
def rounded_row(y, BF16: tl.constexpr):
    """y FP32 [8, 64] as BF16, as it reads back after `store_row`."""
    if BF16:
        return to_bf16(y)
    scale = pow2_scale(tl.max(tl.abs(y), 1))[:, None]
    block = tl.arange(0, 8)[:, None]
    return to_bf16(tl.where(block < 7, codes_of(y, inverse(scale)).to(tl.float32) * scale, y))


@triton.jit
def load_rows(pool, rows, page_bytes, BF16: tl.constexpr):
    """BF16 [n, 512] of rows [n] of the pool; zeros where a row is negative."""
    known = (rows >= 0)[:, None]
    safe = tl.maximum(rows, 0)
    page = pool + (safe // PAGE).to(tl.int64) * page_bytes
    place = tl.arange(0, 512)[None, :]
    if BF16:
        source = (page + (safe % PAGE) * 1024).to(tl.pointer_type(tl.bfloat16))
        return tl.load(source[:, None] + place, mask=known & (place >= 0), other=0.0)
    data = page + (safe % PAGE) * DATA_BYTES
    nope = known & (place < 448)
    codes = tl.load(data.to(tl.pointer_type(tl.float8e4nv))[:, None] + place, mask=nope, other=0.0)
    scales = page + PAGE * DATA_BYTES + (safe % PAGE) * 8
    exponent = tl.load(scales[:, None] + place // 64, mask=nope, other=127).to(tl.int32)
    value = codes.to(tl.float32) * (exponent << 23).to(tl.float32, bitcast=True)
    rope = data.to(tl.pointer_type(tl.bfloat16))[:, None] + (place - 224)
    tail = tl.load(rope, mask=known & (place >= 448), other=0.0)
    return tl.where(place < 448, to_bf16(value), tail)
