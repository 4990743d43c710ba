"""Exact selection of the k highest scores: a tree of tiles, each held in registers by one program.

A program searches the k-th highest of its tile by counting how many scores reach each of three bounds, then writes what
is taken at places given by one running sum: ascending by construction, the first of equals, always the same. A row
longer than a tile is cut; every tile hands its k highest on to the next level. Levels follow from the width alone, so
that a graph can replay them; programs beyond a row's length hand on nothing.
"""

# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops.launches import after_others, chained

TILE = 4096
"""Scores of one program at most."""


@triton.jit
def _ordered(score):
    """int32 below 2^31 - 1 that orders like the FP32 score; both zeros alike."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.minimum(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFE)


@triton.jit
def _bounds(key, known, k):
    """(low, high, room), int32: keys >= high are taken, and of those in low .. high - 1 the first `room`."""
    low = tl.min(tl.where(known, key, 0x7FFFFFFE), 0).to(tl.int64)
    high = tl.max(tl.where(known, key, -0x7FFFFFFF), 0).to(tl.int64) + 1
    reach = tl.sum(known.to(tl.int32), 0).to(tl.int64)  # keys that reach low; those that reach high are fewer than k
    above = tl.zeros((), tl.int64)
    while (high - low > 1) & (reach > k):
        step = (high - low + 3) // 4
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        packed = (known & (key >= first.to(tl.int32))).to(tl.int64)
        packed += (known & (key >= second.to(tl.int32))).to(tl.int64) << 20
        packed += (known & (key >= third.to(tl.int32))).to(tl.int64) << 40
        counts = tl.sum(packed, 0)
        n1 = counts & 0xFFFFF
        n2 = (counts >> 20) & 0xFFFFF
        n3 = counts >> 40
        # The highest bound that k keys still reach becomes low, the next one high.
        above = tl.where(n3 >= k, above, tl.where(n2 >= k, n3, tl.where(n1 >= k, n2, n1)))
        reach = tl.where(n3 >= k, n3, tl.where(n2 >= k, n2, tl.where(n1 >= k, n1, reach)))
        high = tl.where(n3 >= k, high, tl.where(n2 >= k, third, tl.where(n1 >= k, second, first)))
        low = tl.where(n3 >= k, third, tl.where(n2 >= k, second, tl.where(n1 >= k, first, low)))
    return low.to(tl.int32), high.to(tl.int32), (k - above).to(tl.int32)


@chained
@triton.jit
def _top_of_tile(
    scores, stride, entries, lengths, slots, table, table_stride, base, keys_out, out, out_stride, k,
    FIRST: tl.constexpr, LAST: tl.constexpr, PAGED: tl.constexpr, TILE: tl.constexpr, K_TILE: tl.constexpr,
):  # fmt: skip
    after_others()
    token = tl.program_id(0)
    tile = tl.program_id(1)
    place = tile * TILE + tl.arange(0, TILE)
    length = tl.load(lengths + token)
    if FIRST:
        known = place < length
        entry = place
        key = _ordered(tl.load(scores + token.to(tl.int64) * stride + place, mask=known, other=0.0))
    else:  # `scores` are keys of the level before, `entries` what they belong to, -1 nothing
        entry = tl.load(entries + token.to(tl.int64) * stride + place, mask=place < stride, other=-1)
        known = entry >= 0
        key = tl.load(scores + token.to(tl.int64) * stride + place, mask=known, other=0)
    low, high, room = _bounds(key, known, k)
    over = known & (key >= high)
    edge = known & (key >= low) & (key < high)
    passed = tl.cumsum(over.to(tl.int32) + (edge.to(tl.int32) << 16), 0)
    rank = tl.minimum(passed >> 16, room)
    taken = over | (edge & ((passed >> 16) <= room))
    target = (passed & 0xFFFF) + rank - 1
    count = tl.sum(taken.to(tl.int32), 0)
    blank = tl.arange(0, K_TILE)
    out += token.to(tl.int64) * out_stride + tile * k
    if LAST:
        if PAGED:
            table += tl.maximum(tl.load(slots + token), 0).to(tl.int64) * table_stride
            row = tl.load(table + entry // 64, mask=taken, other=0) * 64 + entry % 64
        else:
            row = tl.load(base + token) + entry
        tl.store(out + target, row, mask=taken)
    else:
        tl.store(out + target, entry, mask=taken)
        tl.store(keys_out + token.to(tl.int64) * out_stride + tile * k + target, key, mask=taken)
    tl.store(out + blank, -1, mask=(blank >= count) & (blank < k))


def _select(
    scores: Tensor, lengths: Tensor, out: Tensor, slots: Tensor, table: Tensor, base: Tensor, *, paged: bool
) -> None:
    tokens, k = out.shape
    width = max(1, scores.shape[1])
    keys, entries, stride, first = scores, lengths, scores.stride(0), True
    while True:
        tile = max(128, min(TILE, triton.next_power_of_2(width)))
        tiles = triton.cdiv(width, tile)
        last = tiles == 1
        # Tiles of a level write side by side, k places each.
        chosen = out if last else torch.empty(tokens, tiles * k, dtype=torch.int32, device=out.device)
        chosen_keys = chosen if last else torch.empty_like(chosen)
        _top_of_tile[(tokens, tiles)](
            keys, stride, entries, lengths, slots, table, table.stride(0), base, chosen_keys, chosen, chosen.stride(0),
            k, FIRST=first, LAST=last, PAGED=paged, TILE=tile, K_TILE=triton.next_power_of_2(k),
            num_warps=4 if tile <= 1024 else 8,
        )  # fmt: skip
        if last:
            return
        keys, entries, stride, width, first = chosen_keys, chosen, chosen.stride(0), tiles * k, False


def top_rows(scores: Tensor, lengths: Tensor, slots: Tensor, block_table: Tensor, out: Tensor) -> None:
    """See the door."""
    _select(scores, lengths, out, slots, block_table, lengths, paged=True)


def top_entries(scores: Tensor, lengths: Tensor, base: Tensor, out: Tensor) -> None:
    """See the door."""
    _select(scores, lengths, out, lengths, lengths, base, paged=False)
