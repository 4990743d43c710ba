"""Number conversions that all Triton kernels share: BF16 and E4M3 rounding, the power-of-two scale, matrix products.

Triton's interpreter (CPU tests) truncates where the GPU rounds to nearest even, and multiplies BF16 operands as raw
bits; INTERPRETED takes the long way there, with the results of the GPU. Import only where triton is installed.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disable-error-code="import-untyped"

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
E4M3_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-4)


@triton.jit
def to_bf16(x):
    """FP32 -> BF16, to nearest even."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return kept.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(tl.bfloat16)


@triton.jit
def to_e4m3(x):
    """FP32 within +-448 -> E4M3, to nearest even."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
        small = ((x + 24576.0) - 24576.0).to(
            tl.int32, bitcast=True
        )  # 1.5 * 2^14: multiples of 2^-9, the subnormal step
        small = (small | (bits & -2147483648)).to(tl.float32, bitcast=True)  # a zero keeps its sign
        return tl.where(tl.abs(x) < 0.015625, small, normal).to(tl.float8e4nv)
    return x.to(tl.float8e4nv)


@triton.jit
def pow2_scale(amax):
    """FP32 block maximum -> the FP32 power of two 2^ceil(log2(max(amax, floor) / 448)), from its bits."""
    bits = (tl.maximum(amax, AMAX_FLOOR) * (1.0 / E4M3_MAX)).to(tl.int32, bitcast=True)
    bits = tl.minimum(bits, 0x7F000000) + 0x7FFFFF
    return (bits & -8388608).to(tl.float32, bitcast=True)


@triton.jit
def scaled_e4m3(x, scale):
    """x / scale, saturating, as E4M3; scale a power of two."""
    return to_e4m3(tl.minimum(tl.maximum(x / scale, -E4M3_MAX), E4M3_MAX))


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with FP32 accumulation, for BF16, FP16 and FP8 operands."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def pinned(x):
    """A 16-bit x itself, in the layout it was computed in: a product of it does not pull the computation into the
    layout of its operand, where every warp would repeat it (Triton moves such conversions up to the loads)."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
