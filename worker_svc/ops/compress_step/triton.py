"""Compressor kernels: a program per token and compressor keeps the state and, if the token closes one, makes the entry.

Most programs only add ape and store 2 to 8 KB. An emitting one reads the window (C4: 8 half states, C128: 128 states)
from the batch where the batch has them, else from the ring, so that it never waits for another program's store; that
is why a ring must have room for a window and all tokens of a row. C128 reads 512 KB in an online softmax: rare enough
(one token in 128) that its latency does not show on average.

In deterministic mode (`ops.invariant`) decode and chunks launch one and the same program: entries first, then states.
"""

# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops import invariant
from worker_svc.ops.kv_rows import BF16_PAGE_BYTES
from worker_svc.ops.launches import after_others, chained
from worker_svc.ops.triton_numbers import pow2_scale
from worker_svc.ops.triton_rows import PAGE, codes_of, inverse, store_row, turn_pairs

if TYPE_CHECKING:
    from worker_svc.ops.compress_step import IndexCompressor

COPY = 512
SLOTS = 16
CHUNK_GROUP = 16


@triton.jit
def _keep(raw, ape, target, FIRST: tl.constexpr, WIDTH: tl.constexpr, COPY: tl.constexpr):
    """target[FIRST : FIRST + WIDTH] = raw + ape."""
    for begin in tl.static_range(0, WIDTH, COPY):
        place = FIRST + begin + tl.arange(0, COPY)
        tl.store(target + place, tl.load(raw + place) + tl.load(ape + place))


@triton.jit
def _slots(
    raw, raw_stride, ape, states, token, position, slot, start, offset, column,
    RATIO: tl.constexpr, ring, WIDTH: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """FP32 [n, E] of column `column` [n, E] of the states at position + offset [n]; whatever at negative positions.
    BIAS: these are z columns, to which ape is added (in the ring it has been already)."""
    at = position + offset
    own = (at >= start)[:, None]
    old = ((at < start) & (at >= 0))[:, None]
    new = tl.load(raw + (token + offset).to(tl.int64)[:, None] * raw_stride + column, mask=own, other=0.0)
    if BIAS:
        new += tl.load(ape + (tl.maximum(at, 0) % RATIO)[:, None] * WIDTH + column, mask=own, other=0.0)
    row = (slot * ring + tl.maximum(at, 0) % ring).to(tl.int64)
    return tl.where(own, new, tl.load(states + row[:, None] * WIDTH + column, mask=old, other=0.0))


@triton.jit
def _entry_c4(
    raw, raw_stride, ape, states, token, position, slot, start, ring,
    FIRST: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """FP32 [SIZE]: a halves of the four tokens before the group, b halves of the group; columns kv a, b, z a, b."""
    slot_number = tl.arange(0, 8)
    offset = slot_number - 7
    column = FIRST + tl.where(slot_number < 4, 0, SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
    values = _slots(raw, raw_stride, ape, states, token, position, slot, start, offset, column, 4, ring, WIDTH, False)
    column += 2 * SIZE
    scores = _slots(raw, raw_stride, ape, states, token, position, slot, start, offset, column, 4, ring, WIDTH, True)
    scores = tl.where((position + offset >= 0)[:, None], scores, float("-inf"))
    weight = tl.exp(scores - tl.max(scores, 0)[None, :])
    return tl.sum(weight * values, 0) / tl.sum(weight, 0)


@triton.jit
def _entry_c128(
    raw, raw_stride, ape, states, token, position, slot, start, ring,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """FP32 [SIZE] over 128 tokens, SLOTS at a time with a running maximum."""
    column = tl.arange(0, SLOTS)[:, None] * 0 + tl.arange(0, SIZE)[None, :]
    top = tl.full((SIZE,), float("-inf"), tl.float32)
    total = tl.zeros((SIZE,), tl.float32)
    mixed = tl.zeros((SIZE,), tl.float32)
    for begin in range(0, 128, SLOTS):
        offset = begin + tl.arange(0, SLOTS) - 127
        values = _slots(
            raw, raw_stride, ape, states, token, position, slot, start, offset, column, 128, ring, WIDTH, False
        )  # fmt: skip
        scores = _slots(
            raw, raw_stride, ape, states, token, position, slot, start, offset, column + SIZE, 128, ring, WIDTH, True
        )  # fmt: skip
        highest = tl.maximum(top, tl.max(scores, 0))
        weight = tl.exp(scores - highest[None, :])
        kept = tl.exp(top - highest)
        total = total * kept + tl.sum(weight, 0)
        mixed = mixed * kept + tl.sum(weight * values, 0)
        top = highest
    return mixed / total


@triton.jit
def _normed(entry, norm, turn, eps, SIZE: tl.constexpr):
    """FP32 [SIZE / 2, 2]: RMS norm, then the last 32 pairs turned."""
    y = entry * tl.rsqrt(tl.sum(entry * entry, 0) * (1.0 / SIZE) + eps) * tl.load(norm + tl.arange(0, SIZE))
    pair = tl.arange(0, SIZE // 2)
    angle = turn + (pair - (SIZE // 2 - 32)) * 2
    turning = pair >= SIZE // 2 - 32
    cos = tl.load(angle, mask=turning, other=1.0)
    sin = tl.load(angle + 1, mask=turning, other=0.0)
    return turn_pairs(tl.reshape(y, (SIZE // 2, 2)), cos, sin)


@triton.jit
def _store_main(entry, norm, turns, position, row, pool, page_bytes, eps, RATIO: tl.constexpr, BF16: tl.constexpr):
    turn = turns + (position + 1 - RATIO).to(tl.int64) * 64
    store_row(tl.reshape(_normed(entry, norm, turn, eps, 512), (8, 64)), pool, row, page_bytes, BF16)


@triton.jit
def _signs(a, b):
    """(-1)^popcount(a & b) of numbers below 16."""
    bits = a & b
    bits ^= bits >> 2
    bits ^= bits >> 1
    return 1.0 - 2.0 * (bits & 1).to(tl.float32)


@triton.jit
def _hadamard(y):
    """FP32 [8, 16], 128 values in order, transformed: the matrix of 128 is the product of those of 8 and 16."""
    i = tl.arange(0, 8)
    j = tl.arange(0, 16)
    y = tl.sum(y[:, :, None] * _signs(j[:, None], j[None, :])[None, :, :], 1)
    return tl.sum(y[:, None, :] * _signs(i[:, None], i[None, :])[:, :, None], 0) * 0.08838834764831845


@triton.jit
def _store_index(entry, norm, turns, position, row, pool, page_bytes, eps):
    turn = turns + (position + 1 - 4).to(tl.int64) * 64
    turned = _hadamard(tl.reshape(_normed(entry, norm, turn, eps, 128), (8, 16)))
    scale = pow2_scale(tl.max(tl.max(tl.abs(turned), 1), 0))
    page = pool + (row // PAGE).to(tl.int64) * page_bytes
    place = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    target = (page + (row % PAGE) * 128).to(tl.pointer_type(tl.float8e4nv))
    tl.store(target + place, codes_of(turned, inverse(scale)))
    tl.store((page + PAGE * 128).to(tl.pointer_type(tl.float32)) + row % PAGE, scale)


@triton.jit
def _keep_own(
    raw, raw_stride, ape, states, token, position, slot, side, ring,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """The token's state into the ring: each side its own columns."""
    if position >= 0:
        target = states + (slot * ring + position % ring).to(tl.int64) * WIDTH
        source = raw + token.to(tl.int64) * raw_stride
        bias = ape + (position % RATIO) * WIDTH
        if side == 0:
            _keep(source, bias, target, 0, 2048 if RATIO == 4 else 1024, COPY)
        else:
            _keep(source, bias, target, 2048, 512, COPY)


# Columns of a step lie anywhere in what was sent for it: where they do must not make another program of this one.
@chained
@triton.jit(do_not_specialize=["positions", "slots", "first_token", "write_rows", "tokens"])
def _compress(
    raw, raw_stride, ape, norm, turns, positions, slots, first_token, states, write_rows, pool, page_bytes,
    index_norm, index_pool, index_page_bytes, ring, tokens, eps,
    RATIO: tl.constexpr, BF16: tl.constexpr, KEEP: tl.constexpr, SLOTS: tl.constexpr, COPY: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """GROUP tokens, one after the other; side 0 is the main compressor's, side 1 the indexer's."""
    after_others()
    side = tl.program_id(1)
    width: tl.constexpr = 2560 if RATIO == 4 else 1024
    for number in range(GROUP):
        token = tl.program_id(0) * GROUP + number
        inside = token < tokens
        position = tl.load(positions + token, mask=inside, other=-1)
        row = tl.load(write_rows + token, mask=inside, other=-1)
        slot = tl.load(slots + token, mask=inside, other=0)
        if (position >= 0) & (row >= 0):
            start = tl.load(positions + tl.load(first_token + token))
            # Which side a C128 program takes is known when it is compiled: only one side of it exists.
            if RATIO == 4:
                if side == 0:
                    main = _entry_c4(raw, raw_stride, ape, states, token, position, slot, start, ring, 0, 512, width)
                    _store_main(main, norm, turns, position, row, pool, page_bytes, eps, RATIO, BF16)
                else:
                    key = _entry_c4(raw, raw_stride, ape, states, token, position, slot, start, ring, 2048, 128, width)
                    _store_index(key, index_norm, turns, position, row, index_pool, index_page_bytes, eps)
            else:
                entry = _entry_c128(raw, raw_stride, ape, states, token, position, slot, start, ring, 512, width, SLOTS)
                _store_main(entry, norm, turns, position, row, pool, page_bytes, eps, RATIO, BF16)
        if KEEP:
            _keep_own(raw, raw_stride, ape, states, token, position, slot, side, ring, RATIO, width, COPY)


@triton.jit
def _keep_states(
    raw, raw_stride, ape, positions, slots, last_position, states, ring,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    position = tl.load(positions + token)
    if (position >= 0) & (position > tl.load(last_position + token) - ring):
        target = states + (tl.load(slots + token) * ring + position % ring).to(tl.int64) * WIDTH
        _keep(raw + token.to(tl.int64) * raw_stride, ape + (position % RATIO) * WIDTH, target, 0, WIDTH, COPY)


def compress_step(
    raw: Tensor,
    ape: Tensor,
    norm: Tensor,
    turns: Tensor,
    positions: Tensor,
    slots: Tensor,
    first_token: Tensor,
    states: Tensor,
    write_rows: Tensor,
    pool: Tensor,
    *,
    ratio: int,
    ring: int,
    eps: float,
    index: IndexCompressor | None,
) -> None:
    """See the door. In deterministic mode as a chunk, of which every token is the last: all states are kept."""
    args = (raw, ape, norm, turns, positions, slots, first_token, states, write_rows, pool)
    if invariant.on():
        compress_chunk(*args, positions, ratio=ratio, ring=ring, eps=eps, index=index)
    else:
        _launch(*args, ratio=ratio, ring=ring, eps=eps, index=index, keep=True, group=1)


def _launch(
    raw, ape, norm, turns, positions, slots, first_token, states, write_rows, pool, *,
    ratio: int, ring: int, eps: float, index: IndexCompressor | None, keep: bool, group: int,
) -> None:  # fmt: skip
    """Programs of `group` tokens each; without `keep` the ring is only read."""
    tokens = positions.shape[0]
    _compress[(triton.cdiv(tokens, group), 2 if ratio == 4 else 1)](
        raw, raw.stride(0), ape, norm, turns, positions, slots, first_token, states, write_rows, pool, pool.stride(0),
        norm if index is None else index.norm,
        pool if index is None else index.pool,
        0 if index is None else index.pool.stride(0),
        ring, tokens, eps,
        RATIO=ratio, BF16=pool.shape[1] == BF16_PAGE_BYTES, KEEP=keep, SLOTS=SLOTS, COPY=COPY, GROUP=group,
        num_warps=8,
    )  # fmt: skip


def compress_chunk(
    raw: Tensor,
    ape: Tensor,
    norm: Tensor,
    turns: Tensor,
    positions: Tensor,
    slots: Tensor,
    first_token: Tensor,
    states: Tensor,
    write_rows: Tensor,
    pool: Tensor,
    last_position: Tensor,
    *,
    ratio: int,
    ring: int,
    eps: float,
    index: IndexCompressor | None,
) -> None:
    """See the door; programs take a window's worth of tokens each, in deterministic mode one as in decode."""
    args = (raw, ape, norm, turns, positions, slots, first_token, states, write_rows, pool)
    group = 1 if invariant.on() else min(ratio, CHUNK_GROUP)
    _launch(*args, ratio=ratio, ring=ring, eps=eps, index=index, keep=False, group=group)
    _keep_states[(positions.shape[0],)](
        raw, raw.stride(0), ape, positions, slots, last_position, states, ring,
        RATIO=ratio, WIDTH=states.shape[1], COPY=COPY, num_warps=4,
    )  # fmt: skip
