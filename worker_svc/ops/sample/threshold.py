"""Which values top-k, top-p and min-p leave, one program per row; rows that ask for none of them leave at once.

A row is read three times. The highest value of each of SCAN lanes gives a bound that at least top_k values, or top_p of
the mass, are not below: few values lie above it beside those, and they are collected. The exact bound is searched
among these, in registers, by their bits; masses are integers, so that the order in which values were collected does
not matter. What collects more than ROOM values (a flat distribution, a large top_k) is searched in the whole row.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl

from worker_svc.ops.sample.values import GREEDY_BELOW, LARGEST, allowed_values, keys, ordered, scaled_values, stays
from worker_svc.ops.triton_numbers import INTERPRETED

COARSE = tl.constexpr(1 << 14)
"""How close, in steps of FP32, the lanes' bound comes to what it could be: 2^-9 of a value lets few more values in."""
MASS_ONE = tl.constexpr(float(1 << 42))
"""A mass of one as an integer: 4096 of them fit in 63 bits."""


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
    found_ptr,
    values_ptr,
    ids_ptr,
    never_ptr,
    masks_ptr,
    NEVER: tl.constexpr,
    MASKED: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    SCAN: tl.constexpr,
    SLOW: tl.constexpr,
    ROOM: tl.constexpr,
):
    """floats[row, TILES]: the lowest value that stays; [.., TILES + 1]: the lowest that min-p leaves; last_tie[row].

    found int32 [rows], values FP32 and ids int32 [rows, ROOM] are scratch."""
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
        peaks = tl.full((SCAN,), -LARGEST, tl.float32)
        finite = tl.zeros((SCAN,), tl.int32)
        ahead = allowed_values(logits_ptr, never_ptr, masks_ptr, row, lane, NEVER, MASKED, VOCAB)
        for first in range(0, VOCAB, SCAN):
            v = ahead
            ahead = allowed_values(logits_ptr, never_ptr, masks_ptr, row, first + SCAN + lane, NEVER, MASKED, VOCAB)
            peaks = tl.maximum(peaks, v)
            finite += (v > -LARGEST).to(tl.int32)
        best_raw = tl.max(peaks, 0)
        best = tl.div_rn(best_raw, temperature) + 0.0
        by_count = (top_k > 0) & (top_k < tl.sum(finite, 0))
        if by_count | (top_p < 1.0):
            total = tl.full((), 0.0, tl.float64)
            if not by_count:
                masses = tl.zeros((SCAN,), tl.float32)
                ahead = allowed_values(logits_ptr, never_ptr, masks_ptr, row, lane, NEVER, MASKED, VOCAB)
                for first in range(0, VOCAB, SCAN):
                    v = ahead
                    after = first + SCAN + lane
                    ahead = allowed_values(logits_ptr, never_ptr, masks_ptr, row, after, NEVER, MASKED, VOCAB)
                    masses += tl.exp((v - best_raw) / temperature)
                total += tl.sum(masses.to(tl.float64), 0)
            reach = _lanes_bound(peaks, best_raw, temperature, by_count, top_k, top_p, total)
            found = _collect(
                logits_ptr,
                never_ptr,
                masks_ptr,
                row,
                reach,
                found_ptr + row,
                values_ptr + row * ROOM,
                ids_ptr + row * ROOM,
                NEVER,
                MASKED,
                VOCAB,
                SCAN,
                ROOM,
            )
            if found <= ROOM:
                bound, last_tie = _among(
                    values_ptr + row * ROOM,
                    ids_ptr + row * ROOM,
                    found,
                    temperature,
                    best,
                    by_count,
                    top_k,
                    top_p,
                    total,
                    VOCAB,
                    ROOM,
                )
            else:
                if by_count:
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
                        SLOW,
                    )
        if min_p > 0.0:
            floor = best + tl.log(min_p)
    tl.store(floats_ptr + row * float_row + TILES, bound)
    tl.store(floats_ptr + row * float_row + TILES + 1, floor)
    tl.store(last_tie_ptr + row, last_tie)


@triton.jit
def _lanes_bound(peaks, best, temperature, by_count, top_k, top_p, total):
    """A value, not scaled, that top_k values or top_p of the mass are not below, a little lower than the highest peak
    for which that is sure; -inf if no peak is. Values that scaling makes equal to it are not below it either."""
    there = peaks > -LARGEST
    mass = tl.where(there, tl.exp((peaks - best) / temperature), 0.0)
    weight = tl.where(by_count, there.to(tl.float32), mass)
    target = tl.where(by_count, top_k.to(tl.float32), (total * top_p.to(tl.float64) * 1.00002).to(tl.float32))
    key = ordered(peaks)
    low = tl.min(tl.where(there, key, 0x7FFFFFFF), 0).to(tl.int64)
    high = tl.max(tl.where(there, key, -0x7FFFFFFF), 0).to(tl.int64)
    sure = tl.sum(weight, 0) >= target
    while high - low > COARSE:
        middle = (low + high + 1) >> 1
        reached = tl.sum(tl.where(key >= middle.to(tl.int32), weight, 0.0), 0) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    bound = tl.max(tl.where(there & (key <= low.to(tl.int32)), peaks, -LARGEST), 0)
    return tl.where(sure, bound - tl.abs(bound) * 1e-6 - 1e-30, -LARGEST)


@triton.jit
def _collect(
    logits_ptr,
    never_ptr,
    masks_ptr,
    row,
    reach,
    found_ptr,
    values_ptr,
    ids_ptr,
    NEVER: tl.constexpr,
    MASKED: tl.constexpr,
    VOCAB: tl.constexpr,
    SCAN: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Values from `reach` up and their ids, in any order; returns how many there are, stored or not."""
    lane = tl.arange(0, SCAN)
    tl.atomic_xchg(found_ptr, 0)
    tl.debug_barrier()
    ahead = allowed_values(logits_ptr, never_ptr, masks_ptr, row, lane, NEVER, MASKED, VOCAB)
    for first in range(0, VOCAB, SCAN):
        ids = first + lane
        v = ahead
        ahead = allowed_values(logits_ptr, never_ptr, masks_ptr, row, ids + SCAN, NEVER, MASKED, VOCAB)
        taken = (v >= reach) & (v > -LARGEST)
        place = tl.atomic_add(found_ptr + tl.zeros_like(ids), 1, mask=taken)
        fits = taken & (place < ROOM)
        tl.store(values_ptr + place, v, mask=fits)
        tl.store(ids_ptr + place, ids, mask=fits)
    tl.debug_barrier()
    return tl.atomic_add(found_ptr, 0)


@triton.jit
def _among(
    values_ptr,
    ids_ptr,
    found,
    temperature,
    best,
    by_count,
    top_k,
    top_p,
    total,
    VOCAB: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The lowest value that top-k and then top-p leave, and the last id among those equal to it; `total` is the row's
    mass where there is no top-k."""
    place = tl.arange(0, ROOM)
    inside = place < found
    v = tl.load(values_ptr + place, mask=inside, other=-LARGEST)
    ids = tl.load(ids_ptr + place, mask=inside, other=VOCAB)
    v = tl.div_rn(v, temperature + tl.zeros_like(v)) + 0.0
    key = ordered(v)
    bound = -LARGEST
    last_tie = VOCAB
    if by_count:
        one = inside.to(tl.int64)
        cut = _cut(key, one, inside, top_k.to(tl.float64))
        above = inside & (key > cut)
        equal = inside & (key == cut)
        last_tie = _last_of(ids, equal, top_k - tl.sum(above.to(tl.int32), 0))
        bound = tl.max(tl.where(equal, v, -LARGEST), 0)
        inside = above | (equal & (ids <= last_tie))
    if top_p < 1.0:
        mass = tl.where(inside, (tl.exp(v - best) * MASS_ONE).to(tl.int64), 0)
        all_mass = tl.where(by_count, tl.sum(mass, 0).to(tl.float64), total * MASS_ONE)
        target = all_mass * top_p.to(tl.float64)
        cut = _cut(key, mass, inside, target)
        equal = inside & (key == cut)
        own = tl.maximum(tl.max(tl.where(equal, mass, 0), 0), 1).to(tl.float64)
        missing = target - tl.sum(tl.where(key > cut, mass, 0), 0).to(tl.float64)
        # Equal values count one by one: the i-th (from 0) stays while the mass before it is below the target.
        wanted = tl.minimum(tl.maximum(tl.ceil(missing / own), 1.0), VOCAB).to(tl.int32)
        last_tie = _last_of(ids, equal, wanted)
        bound = tl.max(tl.where(equal, v, -LARGEST), 0)
    return bound, last_tie


@triton.jit
def _cut(key, weight, inside, target):
    """The highest key such that what has it or a higher one weighs `target`; the lowest if nothing does."""
    low = tl.min(tl.where(inside, key, 0x7FFFFFFF), 0).to(tl.int64)
    high = tl.max(tl.where(inside, key, -0x7FFFFFFF), 0).to(tl.int64)
    while low < high:
        step = (high - low + 3) >> 2
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        m1 = tl.where(key >= first.to(tl.int32), weight, 0)
        m2 = tl.where(key >= second.to(tl.int32), weight, 0)
        m3 = tl.where(key >= third.to(tl.int32), weight, 0)
        if INTERPRETED:  # there a reduction by a function of ours takes seconds
            s1, s2, s3 = tl.sum(m1, 0), tl.sum(m2, 0), tl.sum(m3, 0)
        else:
            s1, s2, s3 = tl.reduce((m1, m2, m3), 0, _add_three)
        r1, r2, r3 = s1.to(tl.float64) >= target, s2.to(tl.float64) >= target, s3.to(tl.float64) >= target
        high = tl.where(r3, high, tl.where(r2, third - 1, tl.where(r1, second - 1, first - 1)))
        low = tl.where(r3, third, tl.where(r2, second, tl.where(r1, first, low)))
    return low.to(tl.int32)


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _last_of(ids, equal, wanted):
    """The id of the wanted-th of the equal ones, counted from id 0; of the last if they are fewer."""
    low = tl.full((), 0, tl.int32)
    high = tl.max(tl.where(equal, ids, 0), 0)
    if tl.sum(equal.to(tl.int32), 0) > wanted:
        while low < high:
            middle = (low + high) >> 1
            reached = tl.sum((equal & (ids <= middle)).to(tl.int32), 0) >= wanted
            high = tl.where(reached, middle, high)
            low = tl.where(reached, low, middle + 1)
    return high


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
    masses = tl.zeros((SCAN,), tl.float32)
    for first in range(0, VOCAB, SCAN):
        ids = first + lane
        v = scaled_values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
        masses += tl.where(stays(v, ids, bound, last_tie), tl.exp(v - best), 0.0)
    target = tl.sum(masses.to(tl.float64), 0) * top_p.to(tl.float64)
    # The highest key with at least `target` of mass strictly above it; whatever is higher stays.
    key = tl.full((), 0, tl.uint32)
    step = tl.full((), 1 << 30, tl.uint32)
    for level in range(11):
        s0 = tl.zeros((SCAN,), tl.float32)
        s1 = s0
        s2 = s0
        s3 = s0
        s4 = s0
        s5 = s0
        s6 = s0
        ahead = allowed_values(logits_ptr, never_ptr, masks_ptr, row, lane, NEVER, MASKED, VOCAB)
        for first in range(0, VOCAB, SCAN):
            ids = first + lane
            v = tl.div_rn(ahead, temperature + tl.zeros_like(ahead)) + 0.0
            ahead = allowed_values(logits_ptr, never_ptr, masks_ptr, row, ids + SCAN, NEVER, MASKED, VOCAB)
            mass = tl.where(stays(v, ids, bound, last_tie), tl.exp(v - best), 0.0)
            k = keys(v)
            s0 += tl.where(k > (key | (step * 1)), mass, 0.0)
            s1 += tl.where(k > (key | (step * 2)), mass, 0.0)
            s2 += tl.where(k > (key | (step * 3)), mass, 0.0)
            if level > 0:  # the first digit has two bits
                s3 += tl.where(k > (key | (step * 4)), mass, 0.0)
                s4 += tl.where(k > (key | (step * 5)), mass, 0.0)
                s5 += tl.where(k > (key | (step * 6)), mass, 0.0)
                s6 += tl.where(k > (key | (step * 7)), mass, 0.0)
        digit = _reaches(s0, target) + _reaches(s1, target) + _reaches(s2, target)
        if level > 0:
            digit += _reaches(s3, target) + _reaches(s4, target) + _reaches(s5, target) + _reaches(s6, target)
        key |= digit.to(tl.uint32) * step
        step = step >> 3
    lows = tl.full((SCAN,), LARGEST, tl.float32)
    for first in range(0, VOCAB, SCAN):
        ids = first + lane
        v = scaled_values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
        lows = tl.minimum(lows, tl.where(stays(v, ids, bound, last_tie) & (keys(v) > key), v, LARGEST))
    lowest = tl.min(lows, 0)
    masses = tl.zeros((SCAN,), tl.float32)
    for first in range(0, VOCAB, SCAN):
        ids = first + lane
        v = scaled_values(logits_ptr, never_ptr, masks_ptr, row, ids, temperature, NEVER, MASKED, VOCAB)
        masses += tl.where(stays(v, ids, bound, last_tie) & (v > lowest), tl.exp(v - best), 0.0)
    mass_above = tl.sum(masses.to(tl.float64), 0)
    own = tl.exp(lowest - best).to(tl.float64)
    # Equal values count one by one: the i-th (from 0) stays while the mass before it is below the target.
    wanted = tl.minimum(tl.maximum(tl.ceil((target - mass_above) / own), 1.0), VOCAB).to(tl.int32)
    tie = tl.where(lowest == bound, last_tie, VOCAB)
    return lowest, _nth_equal(
        logits_ptr, never_ptr, masks_ptr, row, temperature, lowest, tie, wanted, NEVER, MASKED, VOCAB, SCAN
    )


@triton.jit
def _reaches(masses, target):
    return (tl.sum(masses.to(tl.float64), 0) >= target).to(tl.int32)
