"""Pass 1 of the boundary: the sublayer's output goes into the streams, the next mixer's partial sums come out.

`mix_few` serves up to 64 tokens: a program holds one tile, and the products of streams cost one reduction. `mix_many`
walks along the channels: per tile one product of each stream with both halves of the mixer side by side.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl

from worker_svc.ops.launches import after_others, chained
from worker_svc.ops.triton_numbers import dot, pinned, to_bf16
from worker_svc.ops.triton_rows import added

LINE = tl.constexpr(33)
"""Floats that `mix_many` leaves per token and part: 32 mixer outputs, the sum of squares."""


@chained
@triton.jit(do_not_specialize=["num_tokens"])
def mix_few(
    x_ptr,
    new_ptr,
    out_ptr,
    shared_ptr,
    post_ptr,
    comb_ptr,
    ids_ptr,
    embed_ptr,
    both_ptr,
    part_ptr,
    num_tokens,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SOURCE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SUMMED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program (i, p): TOKENS tokens, CHANNELS channels of all four streams. Partials: [token, column, part]."""
    part = tl.program_id(1)
    column = tl.arange(0, 32)
    d = part * CHANNELS + tl.arange(0, CHANNELS)
    # Weights first: no load may pass the stores below, and these come from afar.
    h0, l0 = _mixer_rows(both_ptr, 0, d, column, WIDTH, OUTPUTS)
    h1, l1 = _mixer_rows(both_ptr, WIDTH, d, column, WIDTH, OUTPUTS)
    h2, l2 = _mixer_rows(both_ptr, 2 * WIDTH, d, column, WIDTH, OUTPUTS)
    h3, l3 = _mixer_rows(both_ptr, 3 * WIDTH, d, column, WIDTH, OUTPUTS)
    after_others()
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = t < num_tokens
    t64 = t.to(tl.int64)
    live = here[:, None] & (d < WIDTH)[None, :]
    at = t64[:, None] * (4 * WIDTH) + d[None, :]
    if SOURCE == 0:
        source = tl.load(ids_ptr + t, mask=here, other=0).to(tl.int64) * WIDTH
        s0 = tl.load(embed_ptr + source[:, None] + d[None, :], mask=live, other=0.0)
        s1 = s0
        s2 = s0
        s3 = s0
    else:
        o = _output(out_ptr, shared_ptr, t64, d, live, num_tokens, WIDTH, SOURCE, PER_TOKEN, SUMMED)
        x0 = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
        x1 = tl.load(x_ptr + at + WIDTH, mask=live, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + at + 2 * WIDTH, mask=live, other=0.0).to(tl.float32)
        x3 = tl.load(x_ptr + at + 3 * WIDTH, mask=live, other=0.0).to(tl.float32)
        p0, a0, b0, c0, d0 = _shares(post_ptr, comb_ptr, t, here, 0)
        p1, a1, b1, c1, d1 = _shares(post_ptr, comb_ptr, t, here, 1)
        p2, a2, b2, c2, d2 = _shares(post_ptr, comb_ptr, t, here, 2)
        p3, a3, b3, c3, d3 = _shares(post_ptr, comb_ptr, t, here, 3)
        s0 = to_bf16(p0 * o + a0 * x0 + b0 * x1 + c0 * x2 + d0 * x3)
        s1 = to_bf16(p1 * o + a1 * x0 + b1 * x1 + c1 * x2 + d1 * x3)
        s2 = to_bf16(p2 * o + a2 * x0 + b2 * x1 + c2 * x2 + d2 * x3)
        s3 = to_bf16(p3 * o + a3 * x0 + b3 * x1 + c3 * x2 + d3 * x3)
    tl.store(new_ptr + at, s0, mask=live)
    tl.store(new_ptr + at + WIDTH, s1, mask=live)
    tl.store(new_ptr + at + 2 * WIDTH, s2, mask=live)
    tl.store(new_ptr + at + 3 * WIDTH, s3, mask=live)
    mixes = tl.zeros((TOKENS, 32), tl.float32)
    mixes = _project(s0, h0, l0, mixes)
    mixes = _project(s1, h1, l1, mixes)
    mixes = _project(s2, h2, l2, mixes)
    mixes = _project(s3, h3, l3, mixes)
    f0 = s0.to(tl.float32)
    f1 = s1.to(tl.float32)
    f2 = s2.to(tl.float32)
    f3 = s3.to(tl.float32)
    gram = part_ptr + (t64 * 42 + 32) * PARTS + part
    tl.store(gram, tl.sum(f0 * f0, 1), mask=here)
    tl.store(gram + PARTS, tl.sum(f1 * f1, 1), mask=here)
    tl.store(gram + 2 * PARTS, tl.sum(f2 * f2, 1), mask=here)
    tl.store(gram + 3 * PARTS, tl.sum(f3 * f3, 1), mask=here)
    tl.store(gram + 4 * PARTS, tl.sum(f0 * f1, 1), mask=here)
    tl.store(gram + 5 * PARTS, tl.sum(f0 * f2, 1), mask=here)
    tl.store(gram + 6 * PARTS, tl.sum(f0 * f3, 1), mask=here)
    tl.store(gram + 7 * PARTS, tl.sum(f1 * f2, 1), mask=here)
    tl.store(gram + 8 * PARTS, tl.sum(f1 * f3, 1), mask=here)
    tl.store(gram + 9 * PARTS, tl.sum(f2 * f3, 1), mask=here)
    kept = here[:, None] & (column < OUTPUTS)[None, :]
    tl.store(part_ptr + (t64[:, None] * 42 + column[None, :]) * PARTS + part, mixes, mask=kept)


@chained
@triton.jit(do_not_specialize=["num_tokens"])
def mix_many(
    x_ptr,
    new_ptr,
    out_ptr,
    shared_ptr,
    post_ptr,
    comb_ptr,
    ids_ptr,
    embed_ptr,
    both_ptr,
    part_ptr,
    num_tokens,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SOURCE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SUMMED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Program (i, p): TOKENS tokens, TILES * CHANNELS channels of all four streams.

    Partials are [part, LINE, token]: a warp of the next pass, with a token per thread, reads one piece of memory.

    The tokens' shares are loaded once: a store in the loop would make every later tile load them again.
    """
    after_others()
    part = tl.program_id(1)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = t < num_tokens
    t64 = t.to(tl.int64)
    mixes = tl.zeros((TOKENS, 64), tl.float32)
    squares = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if SOURCE == 0:
        source = tl.load(ids_ptr + t, mask=here, other=0).to(tl.int64) * WIDTH
    else:
        p0, a0, b0, c0, d0 = _shares(post_ptr, comb_ptr, t, here, 0)
        p1, a1, b1, c1, d1 = _shares(post_ptr, comb_ptr, t, here, 1)
        p2, a2, b2, c2, d2 = _shares(post_ptr, comb_ptr, t, here, 2)
        p3, a3, b3, c3, d3 = _shares(post_ptr, comb_ptr, t, here, 3)
    for tile in range(TILES):
        d = (part * TILES + tile) * CHANNELS + tl.arange(0, CHANNELS)
        live = here[:, None] & (d < WIDTH)[None, :]
        at = t64[:, None] * (4 * WIDTH) + d[None, :]
        if SOURCE == 0:
            s0 = tl.load(embed_ptr + source[:, None] + d[None, :], mask=live, other=0.0)
            s1 = s0
            s2 = s0
            s3 = s0
        else:
            o = _output(out_ptr, shared_ptr, t64, d, live, num_tokens, WIDTH, SOURCE, PER_TOKEN, SUMMED)
            x0 = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
            x1 = tl.load(x_ptr + at + WIDTH, mask=live, other=0.0).to(tl.float32)
            x2 = tl.load(x_ptr + at + 2 * WIDTH, mask=live, other=0.0).to(tl.float32)
            x3 = tl.load(x_ptr + at + 3 * WIDTH, mask=live, other=0.0).to(tl.float32)
            s0 = to_bf16(p0 * o + a0 * x0 + b0 * x1 + c0 * x2 + d0 * x3)
            s1 = to_bf16(p1 * o + a1 * x0 + b1 * x1 + c1 * x2 + d1 * x3)
            s2 = to_bf16(p2 * o + a2 * x0 + b2 * x1 + c2 * x2 + d2 * x3)
            s3 = to_bf16(p3 * o + a3 * x0 + b3 * x1 + c3 * x2 + d3 * x3)
        tl.store(new_ptr + at, s0, mask=live)
        tl.store(new_ptr + at + WIDTH, s1, mask=live)
        tl.store(new_ptr + at + 2 * WIDTH, s2, mask=live)
        tl.store(new_ptr + at + 3 * WIDTH, s3, mask=live)
        mixes = dot(pinned(s0), _both_rows(both_ptr, 0, d, WIDTH, OUTPUTS), mixes)
        mixes = dot(pinned(s1), _both_rows(both_ptr, WIDTH, d, WIDTH, OUTPUTS), mixes)
        mixes = dot(pinned(s2), _both_rows(both_ptr, 2 * WIDTH, d, WIDTH, OUTPUTS), mixes)
        mixes = dot(pinned(s3), _both_rows(both_ptr, 3 * WIDTH, d, WIDTH, OUTPUTS), mixes)
        f0 = s0.to(tl.float32)
        f1 = s1.to(tl.float32)
        f2 = s2.to(tl.float32)
        f3 = s3.to(tl.float32)
        squares += f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3
    line = part_ptr + part * LINE * num_tokens + t64
    column = tl.arange(0, 32)
    total = tl.sum(tl.reshape(mixes, (TOKENS, 2, 32)), 1)
    place = line[:, None] + column[None, :] * num_tokens
    tl.store(place, total, mask=here[:, None] & (column < OUTPUTS)[None, :])
    tl.store(line + 32 * num_tokens, tl.sum(squares, 1), mask=here)


@triton.jit
def _output(
    out_ptr, shared_ptr, t64, d, live, num_tokens,
    WIDTH: tl.constexpr, SOURCE: tl.constexpr, PER_TOKEN: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """The sublayer's output FP32: its SUMMED parts, or the experts' rows and the shared one, added up."""
    own = t64[:, None] * WIDTH + d[None, :]
    if SOURCE == 1:
        return added(out_ptr + own, num_tokens * WIDTH, live, SUMMED)
    else:
        o = tl.load(shared_ptr + own, mask=live, other=0.0).to(tl.float32)
        for row in tl.static_range(PER_TOKEN):
            at_row = (t64 * PER_TOKEN + row)[:, None] * WIDTH + d[None, :]
            o += tl.load(out_ptr + at_row, mask=live, other=0.0).to(tl.float32)
        return o


@triton.jit
def _shares(post_ptr, comb_ptr, t, here, k):
    """What the output and the four old streams give to new stream k, columns of [TOKENS, 1]."""
    p = tl.load(post_ptr + t * 4 + k, mask=here, other=0.0)[:, None]
    a = tl.load(comb_ptr + t * 16 + k, mask=here, other=0.0)[:, None]
    b = tl.load(comb_ptr + t * 16 + 4 + k, mask=here, other=0.0)[:, None]
    c = tl.load(comb_ptr + t * 16 + 8 + k, mask=here, other=0.0)[:, None]
    d = tl.load(comb_ptr + t * 16 + 12 + k, mask=here, other=0.0)[:, None]
    return p, a, b, c, d


@triton.jit
def _mixer_rows(both_ptr, offset, d, column, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr):
    """Both halves of the mixer for one stream's channels d: BF16 [channels, 32] each."""
    at = column[None, :] * (4 * WIDTH) + (offset + d)[:, None]
    kept = (column < OUTPUTS)[None, :] & (d < WIDTH)[:, None]
    low_ptr = both_ptr + 32 * 4 * WIDTH
    return tl.load(both_ptr + at, mask=kept, other=0.0), tl.load(low_ptr + at, mask=kept, other=0.0)


@triton.jit
def _both_rows(both_ptr, offset, d, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr):
    """The same side by side: BF16 [channels, 64], zeros where there is no output."""
    column = tl.arange(0, 64)
    kept = (column % 32 < OUTPUTS)[None, :] & (d < WIDTH)[:, None]
    return tl.load(both_ptr + column[None, :] * (4 * WIDTH) + (offset + d)[:, None], mask=kept, other=0.0)


@triton.jit
def _project(s, high, low, mixes):
    """mixes += s @ (high + low)."""
    s = pinned(s)
    return dot(s, low, dot(s, high, mixes))
