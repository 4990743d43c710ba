"""Query heads and indexer queries of one token in one launch: programs of a few heads each, then the indexer's.

All pairs of a head turn, the unrotated ones by nothing: pairs stay inside a thread, so that no element is exchanged and
the update can be in place. The Hadamard transform is a product with a +-1 matrix on the
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

from worker_svc.ops import invariant
from worker_svc.ops.launches import after_others, chained
from worker_svc.ops.triton_hadamard import sign_matrix
from worker_svc.ops.triton_numbers import dot, pow2_scale, to_bf16
from worker_svc.ops.triton_rows import codes_of, inverse, pair_turns, turn_pairs

if TYPE_CHECKING:
    from worker_svc.ops.query_heads import IndexQuery

HEADS = 4
FEW_TOKENS = 64
"""Up to here the indexer's heads spread over programs; beyond, reading the +-1 matrix once per token matters more."""


@triton.jit
def _rounded(x, FP16: tl.constexpr):
    if FP16:
        return x.to(tl.float16)
    else:
        return to_bf16(x)


@triton.jit
def _heads(q, q_stride, out, out_stride, turn, token, first, heads, eps, HEADS: tl.constexpr, FP16: tl.constexpr):
    head = first + tl.arange(0, HEADS)
    known = (head < heads)[:, None]
    place = head[:, None] * 512 + tl.arange(0, 512)[None, :]
    x = tl.load(q + token.to(tl.int64) * q_stride + place, mask=known, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) * (1.0 / 512) + eps)[:, None]
    cos, sin = pair_turns(turn, tl.arange(0, 256), 224)
    pairs = turn_pairs(tl.reshape(x, (HEADS, 256, 2)), cos[None, :], sin[None, :])
    y = _rounded(tl.reshape(pairs, (HEADS, 512)), FP16)
    tl.store(out + token.to(tl.int64) * out_stride + place, y, mask=known)


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
    cos, sin = pair_turns(turn, tl.arange(0, 64), 32)
    x = tl.reshape(turn_pairs(tl.reshape(x, (HEADS, 64, 2)), cos[None, :], sin[None, :]), (HEADS, 128))
    row = tl.arange(0, 128)[:, None]
    matrix = tl.load(signs + row * 128 + place)
    y = dot(to_bf16(x), matrix, tl.zeros((HEADS, 128), tl.float32)) * 0.08838834764831845
    scale = pow2_scale(tl.max(tl.abs(y), 1))
    target = token.to(tl.int64) * padded + head
    inside = head < padded
    tl.store(codes + target[:, None] * 128 + place, codes_of(y, inverse(scale)[:, None]), mask=inside[:, None])
    weight = tl.load(weights + token.to(tl.int64) * weights_stride + head, mask=head < heads, other=0.0)
    tl.store(folded + target, weight * constant * scale, mask=inside)


@chained
@triton.jit
def _query_heads(
    q, q_stride, out, out_stride, heads, turns, positions, eps,
    raw, raw_stride, weights, weights_stride, codes, folded, signs, index_heads, padded, constant,
    QUERY_BLOCKS: tl.constexpr, HEADS: tl.constexpr, INDEX_HEADS: tl.constexpr, FP16: tl.constexpr,
):  # fmt: skip
    """QUERY_BLOCKS 0: indexer alone; INDEX_HEADS 0: heads alone. What is not there takes no registers."""
    after_others()
    token = tl.program_id(0)
    block = tl.program_id(1)
    turn = turns + tl.maximum(tl.load(positions + token), 0).to(tl.int64) * 64
    if INDEX_HEADS == 0:
        _heads(q, q_stride, out, out_stride, turn, token, block * HEADS, heads, eps, HEADS, FP16)
    elif QUERY_BLOCKS == 0:
        _index(
            raw, raw_stride, weights, weights_stride, codes, folded, signs, turn, token, block * INDEX_HEADS,
            index_heads, padded, constant, INDEX_HEADS,
        )  # fmt: skip
    elif block < QUERY_BLOCKS:
        _heads(q, q_stride, out, out_stride, turn, token, block * HEADS, heads, eps, HEADS, FP16)
    else:
        _index(
            raw, raw_stride, weights, weights_stride, codes, folded, signs, turn, token,
            (block - QUERY_BLOCKS) * INDEX_HEADS, index_heads, padded, constant, INDEX_HEADS,
        )  # fmt: skip


def query_heads(
    q: Tensor, turns: Tensor, positions: Tensor, out: Tensor, *, eps: float, index: IndexQuery | None
) -> None:
    """See the door. Many tokens take two launches: the indexer's programs need twice the registers of the heads'."""
    tokens, heads = q.shape[:2]
    few = tokens <= FEW_TOKENS and not invariant.on()
    blocks = triton.cdiv(heads, HEADS)
    args = (q, q.stride(0), out, out.stride(0), heads, turns, positions, eps)
    fp16 = out.dtype == torch.float16
    index_tile, index_blocks, extra = 0, 0, (q, 0, q, 0, q, q, q, 0, 0, 0.0)
    if index is not None:
        index_heads, padded = index.weights.shape[1], index.codes.shape[1]
        index_tile = 16 if few else min(64, max(16, triton.next_power_of_2(padded)))
        index_blocks = triton.cdiv(padded, index_tile)
        extra = (
            index.raw, index.raw.stride(0), index.weights, index.weights.stride(0), index.codes, index.folded,
            sign_matrix(q.device), index_heads, padded, 128**-0.5 * index_heads**-0.5,
        )  # fmt: skip
    if index is None or few:
        _query_heads[(tokens, blocks + index_blocks)](
            *args, *extra, QUERY_BLOCKS=blocks, HEADS=HEADS, INDEX_HEADS=index_tile, FP16=fp16, num_warps=4
        )
        return
    _query_heads[(tokens, blocks)](
        *args, *extra, QUERY_BLOCKS=blocks, HEADS=HEADS, INDEX_HEADS=0, FP16=fp16, num_warps=4
    )
    _query_heads[(tokens, index_blocks)](
        *args, *extra, QUERY_BLOCKS=0, HEADS=HEADS, INDEX_HEADS=index_tile, FP16=fp16, num_warps=4
    )
