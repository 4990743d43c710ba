"""Sampling in three launches: which values stay, the best of every tile, the best of all.

1. `_threshold`, one program per row: top-k by a radix search over the values' bits, top-p by a search of the same
   bits over masses (three bits a pass); rows without either leave at once.
2. `_tiles`: noise in FP32 and the best value of each tile of the vocabulary.
3. `_pick`: tiles within reach of the best one (almost always a single one) are drawn again with the noise in FP64,
   which gives the host sampler's very numbers; the lowest id wins a tie.
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

if TYPE_CHECKING:
    from worker_svc.ops.sample import Params

TILE = 1024
SCAN = 8192
GREEDY_BELOW = tl.constexpr(1e-5)
REACH = tl.constexpr(1e-3)
LARGEST = tl.constexpr(float("inf"))


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
    p = params
    masking = {
        "never_ptr": tokens if never is None else never,
        "masks_ptr": tokens if masks is None else masks,
        "NEVER": never is not None,
        "MASKED": masks is not None,
        "VOCAB": vocab,
    }
    scan = min(SCAN, triton.next_power_of_2(vocab))
    _threshold[(rows,)](
        logits,
        p.temperature,
        p.top_k,
        p.top_p,
        p.min_p,
        floats,
        last_tie,
        floats.stride(0),
        TILES=tiles,
        SCAN=scan,
        num_warps=max(1, min(16, scan // 128)),
        **masking,
    )
    noise = (p.seed_low, p.seed_high, p.choice, p.position)
    common = {"TILES": tiles, "TILE": TILE, "num_warps": 4} | masking
    _tiles[(rows, tiles)](logits, p.temperature, *noise, floats, last_tie, floats.stride(0), **common)
    _pick[(rows,)](
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
def _values(
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
    there = ids < VOCAB
    v = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + ids, mask=there, other=float("-inf"))
    words: tl.constexpr = (VOCAB + 31) // 32
    if NEVER:
        word = tl.load(never_ptr + ids // 32, mask=there, other=0)
        v = tl.where((word >> (ids % 32)) & 1 != 0, float("-inf"), v)
    if MASKED:
        word = tl.load(masks_ptr + row.to(tl.int64) * words + ids // 32, mask=there, other=0)
        v = tl.where((word >> (ids % 32)) & 1 != 0, v, float("-inf"))
    if temperature >= GREEDY_BELOW:
        v = tl.div_rn(v, temperature + tl.zeros_like(v))
    return v + 0.0


@triton.jit
def _keys(v):
    """Unsigned integers in the order of the values."""
    bits = v.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ -1, bits ^ -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _stays(v, ids, bound, last_tie):
    """Above the bound, or equal to it and early enough."""
    return (v > bound) | ((v == bound) & (ids <= last_tie))


@triton.jit
def _threshold(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    floats_ptr,
    last_tie_ptr,
    float_row,
    never_ptr,
    masks_ptr,
    NEVER: tl.constexpr,
    MASKED: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    SCAN: tl.constexpr,
):
    """floats[row, TILES]: the lowest value that stays; [.., TILES + 1]: the lowest that min-p leaves; last_tie[row]."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    drawn = temperature >= GREEDY_BELOW
    bound = -LARGEST
    last_tie = VOCAB
    floor = -LARGEST
    lane = tl.arange(0, SCAN)
    if drawn & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        best = -LARGEST
        finite = 0
        for first in range(0, VOCAB, SCAN):
            v = _values(logits_ptr, never_ptr, masks_ptr, row, first + lane, temperature, NEVER, MASKED, VOCAB)
            best = tl.maximum(best, tl.max(v, 0))
            finite += tl.sum((v > -LARGEST).to(tl.int32), 0)
        if (top_k > 0) & (top_k < finite):
            bound, last_tie = _top_k(
                logits_ptr, never_ptr, masks_ptr, row, temperature, top_k, NEVER, MASKED, VOCAB, SCAN
            )
        if top_p < 1.0:
            bound, last_tie = _top_p(
                logits_ptr,
                never_ptr,
                masks_ptr,
                row,
                temperature,
                top_p,
                best,
                bound,
                last_tie,
                NEVER,
                MASKED,
                VOCAB,
                SCAN,
            )
        if min_p > 0.0:
            floor = best + tl.log(min_p)
    tl.store(floats_ptr + row * float_row + TILES, bound)
    tl.store(floats_ptr + row * float_row + TILES + 1, floor)
    tl.store(last_tie_ptr + row, last_tie)


@triton.jit
def _top_k(
    logits_ptr,
    never_ptr,
    masks_ptr,
    row,
    temperature,
    top_k,
    NEVER: tl.constexpr,
    MASKED: tl.constexpr,
    VOCAB: tl.constexpr,
    SCAN: tl.constexpr,
):
    """The top_k-th highest value, and the last id among those equal to it that is still one of the top_k."""
    lane = tl.arange(0, SCAN)
    digit = tl.arange(0, 256)
    prefix = tl.full((), 0, tl.uint32)
    wanted = top_k
    shift = tl.full((), 24, tl.uint32)
    for level in range(4):
        counts = tl.zeros((256,), tl.int32)
        for first in range(0, VOCAB, SCAN):
            v = _values(logits_ptr, never_ptr, masks_ptr, row, first + lane, temperature, NEVER, MASKED, VOCAB)
            key = _keys(v)
            mine = v > -LARGEST
            mine &= (level == 0) | (key >> shift >> 8 == prefix >> shift >> 8)
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=mine)
        # The highest digit with at least `wanted` keys from it up.
        total = tl.sum(counts, 0)
        above = total - tl.cumsum(counts, 0)  # keys with a higher digit
        chosen = tl.max(tl.where(above + counts >= wanted, digit, 0), 0)
        wanted -= tl.sum(tl.where(digit == chosen, above, 0), 0)
        prefix |= chosen.to(tl.uint32) << shift
        shift -= 8
    bound = _value(prefix)
    return bound, _nth_equal(
        logits_ptr, never_ptr, masks_ptr, row, temperature, bound, VOCAB, wanted, NEVER, MASKED, VOCAB, SCAN
    )


@triton.jit
def _value(key):
    """Inverse of `_keys` for one key."""
    bits = key.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ -2147483648, bits ^ -1)).to(tl.float32, bitcast=True)


@triton.jit
def _nth_equal(
    logits_ptr,
    never_ptr,
    masks_ptr,
    row,
    temperature,
    bound,
    last_tie,
    wanted,
    NEVER: tl.constexpr,
    MASKED: tl.constexpr,
    VOCAB: tl.constexpr,
    SCAN: tl.constexpr,
):
    """The id of the wanted-th value equal to bound, counted from id 0; last_tie limits what counts."""
    lane = tl.arange(0, SCAN)
    seen = 0
    found = last_tie
    for first in range(0, VOCAB, SCAN):
        ids = first + lane
        v = _values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
        equal = ((v == bound) & (ids <= last_tie) & (ids < VOCAB)).to(tl.int32)
        here = tl.cumsum(equal, 0) + seen
        found = tl.minimum(found, tl.min(tl.where((equal != 0) & (here == wanted), ids, VOCAB), 0))
        seen += tl.sum(equal, 0)
    return found


@triton.jit
def _top_p(
    logits_ptr,
    never_ptr,
    masks_ptr,
    row,
    temperature,
    top_p,
    best,
    bound,
    last_tie,
    NEVER: tl.constexpr,
    MASKED: tl.constexpr,
    VOCAB: tl.constexpr,
    SCAN: tl.constexpr,
):
    """The fewest most probable of what stays so far whose mass reaches top_p: its lowest value and last tie."""
    lane = tl.arange(0, SCAN)
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, VOCAB, SCAN):
        ids = first + lane
        v = _values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
        total += tl.sum(tl.where(_stays(v, ids, bound, last_tie), tl.exp(v - best), 0.0), 0).to(tl.float64)
    target = total * top_p.to(tl.float64)
    # The highest key with at least `target` of mass strictly above it; whatever is higher stays.
    key = tl.full((), 0, tl.uint32)
    step = tl.full((), 1 << 30, tl.uint32)
    for level in range(11):
        s0 = tl.full((), 0.0, tl.float64)
        s1 = s0
        s2 = s0
        s3 = s0
        s4 = s0
        s5 = s0
        s6 = s0
        for first in range(0, VOCAB, SCAN):
            ids = first + lane
            v = _values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
            mass = tl.where(_stays(v, ids, bound, last_tie), tl.exp(v - best), 0.0)
            k = _keys(v)
            s0 += _mass_above(mass, k, key | (step * 1))
            s1 += _mass_above(mass, k, key | (step * 2))
            s2 += _mass_above(mass, k, key | (step * 3))
            if level > 0:  # the first digit has two bits
                s3 += _mass_above(mass, k, key | (step * 4))
                s4 += _mass_above(mass, k, key | (step * 5))
                s5 += _mass_above(mass, k, key | (step * 6))
                s6 += _mass_above(mass, k, key | (step * 7))
        digit = (s0 >= target).to(tl.int32) + (s1 >= target).to(tl.int32) + (s2 >= target).to(tl.int32)
        if level > 0:
            digit += (s3 >= target).to(tl.int32) + (s4 >= target).to(tl.int32)
            digit += (s5 >= target).to(tl.int32) + (s6 >= target).to(tl.int32)
        key |= digit.to(tl.uint32) * step
        step = step >> 3
    lowest = LARGEST
    for first in range(0, VOCAB, SCAN):
        ids = first + lane
        v = _values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
        inside = _stays(v, ids, bound, last_tie) & (_keys(v) > key)
        lowest = tl.minimum(lowest, tl.min(tl.where(inside, v, LARGEST), 0))
    mass_above = tl.full((), 0.0, tl.float64)
    for first in range(0, VOCAB, SCAN):
        ids = first + lane
        v = _values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
        inside = _stays(v, ids, bound, last_tie) & (v > lowest)
        mass_above += tl.sum(tl.where(inside, tl.exp(v - best), 0.0), 0).to(tl.float64)
    own = tl.exp(lowest - best).to(tl.float64)
    # Equal values count one by one: the i-th (from 0) stays while the mass before it is below the target.
    wanted = tl.minimum(tl.maximum(tl.ceil((target - mass_above) / own), 1.0), VOCAB).to(tl.int32)
    tie = tl.where(lowest == bound, last_tie, VOCAB)
    return lowest, _nth_equal(
        logits_ptr, never_ptr, masks_ptr, row, temperature, lowest, tie, wanted, NEVER, MASKED, VOCAB, SCAN
    )


@triton.jit
def _mass_above(mass, keys, key):
    return tl.sum(tl.where(keys > key, mass, 0.0), 0).to(tl.float64)


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
def _tiles(
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
    v = _values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
    broken = tl.max((v != v).to(tl.int32), 0)
    if temperature >= GREEDY_BELOW:
        bound = tl.load(floats_ptr + row * float_row + TILES)
        floor = tl.load(floats_ptr + row * float_row + TILES + 1)
        kept = _stays(v, ids, bound, tl.load(last_tie_ptr + row)) & (v >= floor)
        w = _words(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, tile * TILE, TILE)
        v = tl.where(kept, v + _noise32(w), float("-inf"))
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
def _pick(
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
            v = _values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
            value = v.to(tl.float64)
            if temperature >= GREEDY_BELOW:
                w = _words(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, tile * TILE, TILE)
                uniform = (w.to(tl.float64) + 0.5) * 2.3283064365386963e-10
                value += (-tl.log(-tl.log(uniform))).to(tl.float32).to(tl.float64)
                kept = _stays(v, ids, bound, last_tie) & (v >= floor)
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
