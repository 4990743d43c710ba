"""Exact selection of the k highest scores of a row by one program: radix search of the k-th value, then compaction.

Scores become integers of the same order. Four passes over a row find the k-th value byte by byte from histograms; a
last pass writes everything above it, and of its equals the first that fit, at places given by running sums: ascending
by construction, equal in every run. A row of few scores stays in the first-level cache between the passes.
"""

# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _ordered(score):
    """int64 in 0 .. 2^32 - 1 that orders like the FP32 score; both zeros alike."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, ~bits, bits ^ -2147483648)).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _keys(scores, entry, length):
    return _ordered(tl.load(scores + entry, mask=entry < length, other=0.0))


@triton.jit
def _next_byte(scores, length, prefix, wanted, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Fix the byte at SHIFT of the wanted-th highest among the keys that share the bytes of `prefix` above it."""
    bins = tl.arange(0, 256)
    counts = tl.zeros((256,), tl.int32)
    for begin in range(0, length, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        key = _keys(scores, entry, length)
        alike = (entry < length) & ((key >> (SHIFT + 8)) == (prefix >> (SHIFT + 8)))
        counts += tl.histogram(((key >> SHIFT) & 0xFF).to(tl.int32), 256, mask=alike)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # keys with a higher byte
    found = (above < wanted) & (above + counts >= wanted)
    byte = tl.sum(tl.where(found, bins, 0), 0)
    return prefix | (byte.to(tl.int64) << SHIFT), wanted - tl.sum(tl.where(found, above, 0), 0)


@triton.jit
def _kth(scores, length, k, BLOCK: tl.constexpr):
    """The k-th highest key of the row, and how many of its equals are among the k highest."""
    bound, equals = _next_byte(scores, length, tl.zeros((), tl.int64), k, 24, BLOCK)
    bound, equals = _next_byte(scores, length, bound, equals, 16, BLOCK)
    bound, equals = _next_byte(scores, length, bound, equals, 8, BLOCK)
    return _next_byte(scores, length, bound, equals, 0, BLOCK)


@triton.jit
def _row_of(entry, base, table, PAGED: tl.constexpr, mask):
    if PAGED:
        return tl.load(table + entry // 64, mask=mask, other=0) * 64 + entry % 64
    return base + entry


@triton.jit
def _kernel(
    scores, stride, lengths, slots, table, table_stride, base, out, out_stride, k,
    PAGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    length = tl.load(lengths + token)
    out += token.to(tl.int64) * out_stride
    scores += token.to(tl.int64) * stride
    start = 0
    if PAGED:
        table += tl.maximum(tl.load(slots + token), 0).to(tl.int64) * table_stride
    else:
        start = tl.load(base + token)
    if length <= k:
        for begin in range(0, k, BLOCK):
            entry = begin + tl.arange(0, BLOCK)
            row = _row_of(entry, start, table, PAGED, entry < length)
            tl.store(out + entry, tl.where(entry < length, row, -1), mask=entry < k)
    else:
        bound, equals = _kth(scores, length, k, BLOCK)
        written = 0
        passed = 0
        for begin in range(0, length, BLOCK):
            entry = begin + tl.arange(0, BLOCK)
            key = _keys(scores, entry, length)
            equal = (entry < length) & (key == bound)
            rank = passed + tl.cumsum(equal.to(tl.int32), 0)
            taken = (entry < length) & ((key > bound) | (equal & (rank <= equals)))
            place = written + tl.cumsum(taken.to(tl.int32), 0) - 1
            tl.store(out + place, _row_of(entry, start, table, PAGED, taken), mask=taken)
            written += tl.sum(taken.to(tl.int32), 0)
            passed += tl.sum(equal.to(tl.int32), 0)


def top_rows(scores: Tensor, lengths: Tensor, slots: Tensor, block_table: Tensor, out: Tensor) -> None:
    """See the door."""
    _kernel[(lengths.shape[0],)](
        scores, scores.stride(0), lengths, slots, block_table, block_table.stride(0), lengths, out, out.stride(0),
        out.shape[1], PAGED=True, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def top_entries(scores: Tensor, lengths: Tensor, base: Tensor, out: Tensor) -> None:
    """See the door."""
    _kernel[(lengths.shape[0],)](
        scores, scores.stride(0), lengths, lengths, lengths, 0, base, out, out.stride(0),
        out.shape[1], PAGED=False, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
