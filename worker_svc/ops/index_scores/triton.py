"""Indexer scores in Triton: FP8 products of keys and query heads, relu, weighted sum over the heads.

Keys are the rows of the product and heads its columns, so that the sum over heads stays inside a warp. The decode form
reads keys where they lie in the page pool; programs beyond a token's length end at once.
"""

# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops.triton_numbers import dot
from worker_svc.ops.triton_rows import PAGE

KEYS = 64
PAGES = 2
QUERIES = 16


@triton.jit
def _weighted(keys, codes_t, weights, scale, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """FP32 [ROWS] from keys E4M3 [ROWS, 128], codes_t [128, HEADS], weights [HEADS], scale [ROWS]."""
    products = dot(keys, codes_t, tl.zeros((ROWS, HEADS), tl.float32))
    return tl.sum(tl.maximum(products, 0.0) * weights[None, :], 1) * scale


@triton.jit
def _query(codes, folded, token, heads, HEADS: tl.constexpr):
    """codes [128, HEADS] and weights [HEADS] of one token; zeros beyond its heads."""
    head = tl.arange(0, HEADS)
    row = token.to(tl.int64) * heads + head
    known = head < heads
    codes_t = tl.load(codes + row[None, :] * 128 + tl.arange(0, 128)[:, None], mask=known[None, :], other=0.0)
    return codes_t, tl.load(folded + row, mask=known, other=0.0)


@triton.jit
def _paged_scores(
    codes, folded, heads, pool, page_bytes, table, table_stride, slots, lengths, scores, stride, width,
    PAGES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    first = tl.program_id(1) * PAGES
    length = tl.minimum(tl.load(lengths + token), width)
    if first * PAGE < length:
        codes_t, weights = _query(codes, folded, token, heads, HEADS)
        table += tl.maximum(tl.load(slots + token), 0).to(tl.int64) * table_stride
        row = tl.arange(0, PAGE)
        for number in range(first, tl.minimum(first + PAGES, tl.cdiv(length, PAGE))):
            page = pool + tl.load(table + number).to(tl.int64) * page_bytes
            place = row[:, None] * 128 + tl.arange(0, 128)[None, :]
            keys = tl.load(page.to(tl.pointer_type(tl.float8e4nv)) + place)
            scale = tl.load((page + PAGE * 128).to(tl.pointer_type(tl.float32)) + row)
            found = _weighted(keys, codes_t, weights, scale, PAGE, HEADS)
            entry = number * PAGE + row
            tl.store(scores + token.to(tl.int64) * stride + entry, found, mask=entry < length)


@triton.jit(do_not_specialize=["tokens"])
def _ragged_scores(
    codes, folded, heads, keys, key_scale, first, last, scores, stride, width, tokens,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    for number in range(tl.program_id(0) * QUERIES, tl.minimum((tl.program_id(0) + 1) * QUERIES, tokens)):
        token = number + tl.zeros((), tl.int32)
        begin = tl.load(first + token)
        count = tl.minimum(tl.load(last + token) - begin, width)
        if tl.program_id(1) * KEYS < count:
            codes_t, weights = _query(codes, folded, token, heads, HEADS)
            known = column < count
            row = (begin + column).to(tl.int64)
            place = row[:, None] * 128 + tl.arange(0, 128)[None, :]
            tile = tl.load(keys + place, mask=known[:, None], other=0.0)
            scale = tl.load(key_scale + row, mask=known, other=0.0)
            found = _weighted(tile, codes_t, weights, scale, KEYS, HEADS)
            tl.store(scores + token.to(tl.int64) * stride + column, found, mask=known)


def paged_scores(
    codes: Tensor, folded: Tensor, keys: Tensor, table: Tensor, slots: Tensor, lengths: Tensor, scores: Tensor
) -> None:
    """See the door; fills the first min(length, width) columns of scores FP32 [T, width]."""
    tokens, heads = folded.shape
    width = scores.shape[1]
    _paged_scores[(tokens, triton.cdiv(width, KEYS * PAGES))](
        codes, folded, heads, keys, keys.stride(0), table, table.stride(0), slots, lengths, scores, scores.stride(0),
        width, PAGES=PAGES, HEADS=max(16, triton.next_power_of_2(heads)), num_warps=4,
    )  # fmt: skip


def ragged_scores(
    codes: Tensor, folded: Tensor, keys: Tensor, key_scale: Tensor, first: Tensor, last: Tensor, scores: Tensor
) -> None:
    """See the door; fills the first last[t] - first[t] columns of row t of scores FP32 [T, width]."""
    tokens, heads = folded.shape
    width = scores.shape[1]
    _ragged_scores[(triton.cdiv(tokens, QUERIES), triton.cdiv(width, KEYS))](
        codes, folded, heads, keys, key_scale, first, last, scores, scores.stride(0), width, tokens,
        QUERIES=QUERIES, KEYS=KEYS, HEADS=max(16, triton.next_power_of_2(heads)), num_warps=4,
    )  # fmt: skip
