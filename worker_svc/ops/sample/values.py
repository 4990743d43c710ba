"""What the sampling kernels read logits through: temperature and masks, an order on bits, and what stays."""
# ruff: noqa: ANN001, ANN201, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl

GREEDY_BELOW = tl.constexpr(1e-5)
LARGEST = tl.constexpr(float("inf"))


@triton.jit
def allowed_values(
    logits_ptr,
    never_ptr,
    masks_ptr,
    row,
    ids,
    NEVER: tl.constexpr,
    MASKED: tl.constexpr,
    VOCAB: tl.constexpr,
):
    """Logits of `ids`, -inf where masked."""
    there = ids < VOCAB
    v = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + ids, mask=there, other=float("-inf"))
    words: tl.constexpr = (VOCAB + 31) // 32
    if NEVER:
        word = tl.load(never_ptr + ids // 32, mask=there, other=0)
        v = tl.where((word >> (ids % 32)) & 1 != 0, float("-inf"), v)
    if MASKED:
        word = tl.load(masks_ptr + row.to(tl.int64) * words + ids // 32, mask=there, other=0)
        v = tl.where((word >> (ids % 32)) & 1 != 0, v, float("-inf"))
    return v


@triton.jit
def scaled_values(
    logits_ptr,
    never_ptr,
    masks_ptr,
    row,
    ids,
    temperature,
    NEVER: tl.constexpr,
    MASKED: tl.constexpr,
    VOCAB: tl.constexpr,
):
    """Logits of `ids` over the temperature, -inf where masked; greedy rows are not scaled. A zero has no sign."""
    v = allowed_values(logits_ptr, never_ptr, masks_ptr, row, ids, NEVER, MASKED, VOCAB)
    if temperature >= GREEDY_BELOW:
        v = tl.div_rn(v, temperature + tl.zeros_like(v))
    return v + 0.0


@triton.jit
def keys(v):
    """Unsigned integers in the order of the values."""
    bits = v.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ -1, bits ^ -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def stays(v, ids, bound, last_tie):
    """Above the bound, or equal to it and early enough."""
    return (v > bound) | ((v == bound) & (ids <= last_tie))


@triton.jit
def ordered(v):
    """Signed integers in the order of the values."""
    bits = (v + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
