"""Query heads and indexer queries of one token in one launch: programs of a few heads each, then the indexer's.

A head is read once, its rotated pairs a second time as pairs (from the first-level cache), so that no element is
exchanged between threads and the update can be in place. The Hadamard transform is a product with a +-1 matrix on the
tensor cores, exact but for FP32 accumulation.
"""

# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops.triton_hadamard import sign_matrix
from worker_svc.ops.triton_numbers import dot, pow2_scale, to_bf16
from worker_svc.ops.triton_rows import codes_of, inverse, turn_pairs

if TYPE_CHECKING:
    from worker_svc.ops.query_heads import IndexQuery

HEADS = 8
INDEX_HEADS = 16


@triton.jit
def _rounded(x, FP16: tl.constexpr):
    if FP16:
        return x.to(tl.float16)
    else:
        return to_bf16(x)


@triton.jit
def _heads(q, q_stride, out, out_stride, turn, token, first, heads, eps, HEADS: tl.constexpr, FP16: tl.constexpr):
    head = first + tl.arange(0, HEADS)
    known = head < heads
    source = q + token.to(tl.int64) * q_stride + head * 512
    target = out + token.to(tl.int64) * out_stride + head * 512
    place = tl.arange(0, 512)[None, :]
    x = tl.load(source[:, None] + place, mask=known[:, None], other=0.0).to(tl.float32)
    pair = tl.arange(0, 32)
    twin = 448 + pair[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    last = tl.load(source[:, None, None] + twin, mask=known[:, None, None], other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) * (1.0 / 512) + eps)
    cos = tl.load(turn + pair * 2)[None, :]
    sin = tl.load(turn + pair * 2 + 1)[None, :]
    turned = turn_pairs(last * factor[:, None, None], cos, sin)
    tl.store(target[:, None] + place, _rounded(x * factor[:, None], FP16), mask=known[:, None] & (place < 448))
    tl.store(target[:, None, None] + twin, _rounded(turned, FP16), mask=known[:, None, None])


@triton.jit
def _index(
    raw,
    raw_stride,
    weights,
    weights_stride,
    codes,
    folded,
    signs,
    turn,
    token,
    first,
    heads,
    padded,
    constant,
    HEADS: tl.constexpr,
):
    head = first + tl.arange(0, HEADS)
    known = (head < heads)[:, None]
    place = tl.arange(0, 128)[None, :]
    source = raw + token.to(tl.int64) * raw_stride + head[:, None] * 128
    x = tl.load(source + place, mask=known, other=0.0).to(tl.float32)
    other = tl.load(source + (place ^ 1), mask=known & (place >= 64), other=0.0).to(tl.float32)
    angle = turn + (place - 64) // 2 * 2
    cos = tl.load(angle, mask=place >= 64, other=1.0)
    sin = tl.load(angle + 1, mask=place >= 64, other=0.0)
    x = x * cos + other * tl.where(place % 2 == 0, -sin, sin)
    row = tl.arange(0, 128)[:, None]
    matrix = tl.load(signs + row * 128 + place)
    y = dot(to_bf16(x), matrix, tl.zeros((HEADS, 128), tl.float32)) * 0.08838834764831845
    scale = pow2_scale(tl.max(tl.abs(y), 1))
    target = token.to(tl.int64) * padded + head
    inside = head < padded
    tl.store(codes + target[:, None] * 128 + place, codes_of(y, inverse(scale)[:, None]), mask=inside[:, None])
    weight = tl.load(weights + token.to(tl.int64) * weights_stride + head, mask=head < heads, other=0.0)
    tl.store(folded + target, weight * constant * scale, mask=inside)


@triton.jit
def _kernel(
    q,
    q_stride,
    out,
    out_stride,
    heads,
    turns,
    positions,
    eps,
    raw,
    raw_stride,
    weights,
    weights_stride,
    codes,
    folded,
    signs,
    index_heads,
    padded,
    constant,
    QUERY_BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    FP16: tl.constexpr,
):
    token = tl.program_id(0)
    block = tl.program_id(1)
    turn = turns + tl.maximum(tl.load(positions + token), 0).to(tl.int64) * 64
    if block < QUERY_BLOCKS:
        _heads(q, q_stride, out, out_stride, turn, token, block * HEADS, heads, eps, HEADS, FP16)
    else:
        first = (block - QUERY_BLOCKS) * INDEX_HEADS
        _index(
            raw,
            raw_stride,
            weights,
            weights_stride,
            codes,
            folded,
            signs,
            turn,
            token,
            first,
            index_heads,
            padded,
            constant,
            INDEX_HEADS,
        )


def query_heads(
    q: Tensor, turns: Tensor, positions: Tensor, out: Tensor, *, eps: float, index: IndexQuery | None
) -> None:
    """See the door."""
    tokens, heads = q.shape[:2]
    blocks = triton.cdiv(heads, HEADS)
    index_blocks, extra = 0, (q, 0, q, 0, q, q, q, 0, 0, 0.0)
    if index is not None:
        index_heads, padded = index.weights.shape[1], index.codes.shape[1]
        index_blocks = triton.cdiv(padded, INDEX_HEADS)
        signs = sign_matrix(q.device)
        constant = 128**-0.5 * index_heads**-0.5
        extra = (
            index.raw,
            index.raw.stride(0),
            index.weights,
            index.weights.stride(0),
            index.codes,
            index.folded,
            signs,
            index_heads,
            padded,
            constant,
        )
    _kernel[(tokens, blocks + index_blocks)](
        q,
        q.stride(0),
        out,
        out.stride(0),
        heads,
        turns,
        positions,
        eps,
        *extra,
        QUERY_BLOCKS=blocks,
        HEADS=HEADS,
        INDEX_HEADS=INDEX_HEADS,
        FP16=out.dtype == torch.float16,
        num_warps=4,
    )
