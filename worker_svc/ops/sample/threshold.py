"""Which values top-k, top-p and min-p leave, one program per row; rows that ask for none of them leave at once.

Top-k is a radix search over the values' bits, top-p a search of the same bits over masses, three bits a pass.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl

from worker_svc.ops.sample.values import GREEDY_BELOW, LARGEST, keys, scaled_values, stays


@triton.jit
def threshold(
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
            v = scaled_values(logits_ptr, never_ptr, masks_ptr, row, first + lane, temperature, NEVER, MASKED, VOCAB)
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
            v = scaled_values(logits_ptr, never_ptr, masks_ptr, row, first + lane, temperature, NEVER, MASKED, VOCAB)
            key = keys(v)
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
        v = scaled_values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
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
        v = scaled_values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
        total += tl.sum(tl.where(stays(v, ids, bound, last_tie), tl.exp(v - best), 0.0), 0).to(tl.float64)
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
            v = scaled_values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
            mass = tl.where(stays(v, ids, bound, last_tie), tl.exp(v - best), 0.0)
            k = keys(v)
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
        v = scaled_values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
        inside = stays(v, ids, bound, last_tie) & (keys(v) > key)
        lowest = tl.minimum(lowest, tl.min(tl.where(inside, v, LARGEST), 0))
    mass_above = tl.full((), 0.0, tl.float64)
    for first in range(0, VOCAB, SCAN):
        ids = first + lane
        v = scaled_values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
        inside = stays(v, ids, bound, last_tie) & (v > lowest)
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
