"""Sampling in three launches: which values stay, the best of every tile, the best of all.

1. `threshold`: what top-k, top-p and min-p leave of each row; rows without them leave at once.
2. `_sample_tiles`: noise in FP32 and the best value of each tile of the vocabulary.
3. `_sample_pick`: tiles within reach of the best one (almost always a single one) are drawn again with the noise in
   FP64, which gives the host sampler's very numbers; the lowest id wins a tie.
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

from worker_svc.ops.sample.threshold import threshold
from worker_svc.ops.sample.values import GREEDY_BELOW, LARGEST, scaled_values, stays

if TYPE_CHECKING:
    from worker_svc.ops.sample import Params

TILE = 1024
SCAN, SLOW = 8192, 4096
"""Values of a row that a step of `threshold` reads, and where it keeps seven sums of each."""
ROOM = 2048
"""Values that top-k or top-p can be searched among without reading the whole row each time."""
REACH = tl.constexpr(1e-3)


def sample(
    logits: Tensor,
    params: Params,
    tokens: Tensor,
    faults: Tensor,
    end: int,
    never: Tensor | None,
    masks: Tensor | None,
) -> None:
    """See the door."""
    rows, vocab = logits.shape
    if rows == 0:
        return
    tiles = triton.cdiv(vocab, TILE)
    floats = torch.empty(rows, tiles + 2, dtype=torch.float32, device=logits.device)
    last_tie = torch.empty(rows, dtype=torch.int32, device=logits.device)
    found, ids = (torch.empty(size, dtype=torch.int32, device=logits.device) for size in (rows, rows * ROOM))
    values = torch.empty(rows * ROOM, dtype=torch.float32, device=logits.device)
    p = params
    masking = {
        "never_ptr": tokens if never is None else never,
        "masks_ptr": tokens if masks is None else masks,
        "NEVER": never is not None,
        "MASKED": masks is not None,
        "VOCAB": vocab,
    }
    scan = min(SCAN, triton.next_power_of_2(vocab))
    threshold[(rows,)](
        logits,
        p.temperature,
        p.top_k,
        p.top_p,
        p.min_p,
        floats,
        last_tie,
        floats.stride(0),
        found,
        values,
        ids,
        TILES=tiles,
        SCAN=scan,
        SLOW=min(SLOW, scan),
        ROOM=ROOM,
        num_warps=max(1, min(16, scan // 128)),
        **masking,
    )
    noise = (p.seed_low, p.seed_high, p.choice, p.position)
    common = {"TILES": tiles, "TILE": TILE, "num_warps": 4} | masking
    _sample_tiles[(rows, tiles)](logits, p.temperature, *noise, floats, last_tie, floats.stride(0), **common)
    _sample_pick[(rows,)](
        logits,
        p.temperature,
        *noise,
        floats,
        last_tie,
        tokens,
        faults,
        end,
        floats.stride(0),
        TILES_POW2=triton.next_power_of_2(tiles),
        **common,
    )


@triton.jit
def _words(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, first, TILE: tl.constexpr):
    """The random words of ids first .. first + TILE: uint32 [TILE]."""
    low = tl.load(seed_low_ptr + row).to(tl.uint32, bitcast=True).to(tl.uint64)
    choice = tl.load(choice_ptr + row).to(tl.uint32, bitcast=True).to(tl.uint64)
    block = (first // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    zeros = tl.zeros_like(block)
    position = tl.load(position_ptr + row).to(tl.uint32, bitcast=True) + zeros
    high = tl.load(seed_high_ptr + row).to(tl.uint32, bitcast=True) + zeros
    w0, w1, w2, w3 = tl.philox((choice << 32) | low, block, position, high, zeros)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TILE,))


@triton.jit
def _sample_tiles(
    logits_ptr,
    temperature_ptr,
    seed_low_ptr,
    seed_high_ptr,
    choice_ptr,
    position_ptr,
    floats_ptr,
    last_tie_ptr,
    float_row,
    never_ptr,
    masks_ptr,
    NEVER: tl.constexpr,
    MASKED: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """floats[row, tile]: the tile's highest value, noise included; NaN if one of its logits is."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    temperature = tl.load(temperature_ptr + row)
    v = scaled_values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
    broken = tl.max((v != v).to(tl.int32), 0)
    if temperature >= GREEDY_BELOW:
        bound = tl.load(floats_ptr + row * float_row + TILES)
        floor = tl.load(floats_ptr + row * float_row + TILES + 1)
        kept = stays(v, ids, bound, tl.load(last_tie_ptr + row)) & (v >= floor)
        if tl.max(kept.to(tl.int32), 0) != 0:  # else: no noise for a tile of which nothing stays
            w = _words(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, tile * TILE, TILE)
            v = tl.where(kept, v + _noise32(w), float("-inf"))
        else:
            v = tl.full((TILE,), float("-inf"), tl.float32)
    best = tl.where(broken != 0, float("nan"), tl.max(v, 0))
    tl.store(floats_ptr + row * float_row + tile, best)


@triton.jit
def _noise32(w):
    """-log(-log((w + 0.5) / 2^32)) in FP32: near one from the distance to one, or all digits would go."""
    low = (w.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    gap = ((w ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = gap * (1.0 + gap * (0.5 + gap * (0.33333334 + gap * (0.25 + gap * 0.2))))
    inner = tl.where(gap < 0.02, series, -tl.log(tl.minimum(low, 1.0 - 1e-7)))
    return -tl.log(inner)


@triton.jit(do_not_specialize=["end"])
def _sample_pick(
    logits_ptr,
    temperature_ptr,
    seed_low_ptr,
    seed_high_ptr,
    choice_ptr,
    position_ptr,
    floats_ptr,
    last_tie_ptr,
    tokens_ptr,
    faults_ptr,
    end,
    float_row,
    never_ptr,
    masks_ptr,
    NEVER: tl.constexpr,
    MASKED: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_POW2: tl.constexpr,
    TILE: tl.constexpr,
):
    """The row's token and fault."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    t = tl.arange(0, TILES_POW2)
    maxima = tl.load(floats_ptr + row * float_row + t, mask=t < TILES, other=float("-inf"))
    broken = tl.max((maxima != maxima).to(tl.int32), 0)
    top = tl.max(tl.where(maxima == maxima, maxima, float("-inf")), 0)
    fault = tl.where((broken != 0) | (top == LARGEST), 1, tl.where(top == -LARGEST, 2, 0))
    token = end
    if fault == 0:
        bound = tl.load(floats_ptr + row * float_row + TILES)
        floor = tl.load(floats_ptr + row * float_row + TILES + 1)
        last_tie = tl.load(last_tie_ptr + row)
        reach = top - (REACH + tl.abs(top) * 1e-6)
        best = tl.full((), float("-inf"), tl.float64)
        tile = tl.min(tl.where(maxima >= reach, t, TILES), 0)
        while tile < TILES:
            ids = tile * TILE + tl.arange(0, TILE)
            v = scaled_values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
            value = v.to(tl.float64)
            if temperature >= GREEDY_BELOW:
                w = _words(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, tile * TILE, TILE)
                uniform = (w.to(tl.float64) + 0.5) * 2.3283064365386963e-10
                value += (-tl.log(-tl.log(uniform))).to(tl.float32).to(tl.float64)
                kept = stays(v, ids, bound, last_tie) & (v >= floor)
                value = tl.where(kept, value, float("-inf"))
            here = tl.max(value, 0)
            first = tl.min(tl.where(value == here, ids, VOCAB), 0)
            token = tl.where(here > best, first, token)
            best = tl.maximum(best, here)
            tile = tl.min(tl.where((maxima >= reach) & (t > tile), t, TILES), 0)
    elif fault == 2:
        # A NaN under a mask: the model is broken all the same.
        nans = 0
        for at in range(0, VOCAB, TILE):
            ids = at + tl.arange(0, TILE)
            raw = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + ids, mask=ids < VOCAB, other=0.0)
            nans = tl.maximum(nans, tl.max((raw != raw).to(tl.int32), 0))
        fault = tl.where(nans != 0, 1, 2)
    tl.store(tokens_ptr + row, token)
    tl.store(faults_ptr + row, fault)
