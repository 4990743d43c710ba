"""Inverse rotation and FP8 quantisation of attention outputs: one program per token and few heads.

A head is four blocks of 128 values; the last 64 of the last block turn back. Bound by memory: 1 KB in, 512 bytes out.
"""

# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops import invariant
from worker_svc.ops.launches import after_others, chained
from worker_svc.ops.triton_numbers import pow2_scale
from worker_svc.ops.triton_rows import codes_of, inverse, pair_turns, turn_pairs

HEADS, MANY_HEADS, MANY_TOKENS = 4, 16, 4096
"""Heads of a program, and of one where there are many tokens. Deterministic mode has one program for all."""


@chained
@triton.jit(do_not_specialize=["scale_column"])
def _turn_and_quantise(
    o,
    turns,
    positions,
    codes,
    scale,
    scale_token,
    scale_group,
    scale_column,
    heads,
    per_group,
    HEADS: tl.constexpr,
):
    after_others()
    token = tl.program_id(0)
    block = tl.program_id(1) * HEADS * 4 + tl.arange(0, HEADS * 4)  # of 128 values; 4 a head
    known = (block < heads * 4)[:, None]
    place = tl.arange(0, 128)[None, :]
    source = o + (token.to(tl.int64) * heads * 4 + block)[:, None] * 128
    x = tl.load(source + place, mask=known, other=0.0).to(tl.float32)
    turn = turns + tl.maximum(tl.load(positions + token), 0).to(tl.int64) * 64
    cos, sin = pair_turns(turn, tl.arange(0, 64), 32)
    last = (block % 4 == 3)[:, None]
    cos, sin = tl.where(last, cos[None, :], 1.0), tl.where(last, -sin[None, :], 0.0)
    y = tl.reshape(turn_pairs(tl.reshape(x, (HEADS * 4, 64, 2)), cos, sin), (HEADS * 4, 128))
    factor = pow2_scale(tl.max(tl.abs(y), 1))
    target = codes + (token.to(tl.int64) * heads * 4 + block)[:, None] * 128
    tl.store(target + place, codes_of(y, inverse(factor)[:, None]), mask=known)
    group = block // (per_group * 4)
    column = block % (per_group * 4)
    address = scale + token.to(tl.int64) * scale_token + group.to(tl.int64) * scale_group
    tl.store(address + column.to(tl.int64) * scale_column, factor, mask=block < heads * 4)


def attention_output(o: Tensor, turns: Tensor, positions: Tensor, codes: Tensor, scale: Tensor) -> None:
    """See the door."""
    tokens, heads = o.shape[:2]
    tile = HEADS if tokens < MANY_TOKENS or invariant.on() else MANY_HEADS
    _turn_and_quantise[(tokens, triton.cdiv(heads, tile))](
        o, turns, positions, codes, scale, *scale.stride(), heads, heads // codes.shape[1], HEADS=tile, num_warps=4
    )
