"""Pass 1 of the boundary: the sublayer's output goes into the streams, the next mixer's partial sums come out."""
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl

from worker_svc.ops.triton_numbers import dot, pinned, to_bf16


@triton.jit(do_not_specialize=["num_tokens"])
def mix_streams(
    x_ptr,
    new_ptr,
    out_ptr,
    shared_ptr,
    post_ptr,
    comb_ptr,
    ids_ptr,
    embed_ptr,
    high_ptr,
    low_ptr,
    part_ptr,
    num_tokens,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SOURCE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GRAM: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program (i, p): TOKENS tokens, TILES * CHANNELS channels of all four streams. Partials: [token, column, part]."""
    part = tl.program_id(1)
    column = tl.arange(0, 32)
    if GRAM:
        # Weights first: no load may pass the stores below, and these come from afar.
        c = part * CHANNELS + tl.arange(0, CHANNELS)
        h0, l0 = _mixer_rows(high_ptr, low_ptr, 0, c, column, WIDTH, OUTPUTS)
        h1, l1 = _mixer_rows(high_ptr, low_ptr, WIDTH, c, column, WIDTH, OUTPUTS)
        h2, l2 = _mixer_rows(high_ptr, low_ptr, 2 * WIDTH, c, column, WIDTH, OUTPUTS)
        h3, l3 = _mixer_rows(high_ptr, low_ptr, 3 * WIDTH, c, column, WIDTH, OUTPUTS)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = t < num_tokens
    t64 = t.to(tl.int64)
    mixes = tl.zeros((TOKENS, 32), tl.float32)
    squares = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if SOURCE == 0:
        source = tl.load(ids_ptr + t, mask=here, other=0).to(tl.int64) * WIDTH
    else:
        source = t64 * WIDTH
        p0 = tl.load(post_ptr + t * 4, mask=here, other=0.0)[:, None]
        p1 = tl.load(post_ptr + t * 4 + 1, mask=here, other=0.0)[:, None]
        p2 = tl.load(post_ptr + t * 4 + 2, mask=here, other=0.0)[:, None]
        p3 = tl.load(post_ptr + t * 4 + 3, mask=here, other=0.0)[:, None]
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
            if SOURCE == 1:
                o = tl.load(out_ptr + source[:, None] + d[None, :], mask=live, other=0.0).to(tl.float32)
            else:
                o = tl.load(shared_ptr + source[:, None] + d[None, :], mask=live, other=0.0).to(tl.float32)
                for row in tl.static_range(PER_TOKEN):
                    at_row = (t64 * PER_TOKEN + row)[:, None] * WIDTH + d[None, :]
                    o += tl.load(out_ptr + at_row, mask=live, other=0.0).to(tl.float32)
            x0 = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
            x1 = tl.load(x_ptr + at + WIDTH, mask=live, other=0.0).to(tl.float32)
            x2 = tl.load(x_ptr + at + 2 * WIDTH, mask=live, other=0.0).to(tl.float32)
            x3 = tl.load(x_ptr + at + 3 * WIDTH, mask=live, other=0.0).to(tl.float32)
            s0 = _stream(comb_ptr, t, here, 0, p0, o, x0, x1, x2, x3)
            s1 = _stream(comb_ptr, t, here, 1, p1, o, x0, x1, x2, x3)
            s2 = _stream(comb_ptr, t, here, 2, p2, o, x0, x1, x2, x3)
            s3 = _stream(comb_ptr, t, here, 3, p3, o, x0, x1, x2, x3)
        tl.store(new_ptr + at, s0, mask=live)
        tl.store(new_ptr + at + WIDTH, s1, mask=live)
        tl.store(new_ptr + at + 2 * WIDTH, s2, mask=live)
        tl.store(new_ptr + at + 3 * WIDTH, s3, mask=live)
        if not GRAM:
            h0, l0 = _mixer_rows(high_ptr, low_ptr, 0, d, column, WIDTH, OUTPUTS)
        mixes = _project(s0, h0, l0, mixes)
        if not GRAM:
            h1, l1 = _mixer_rows(high_ptr, low_ptr, WIDTH, d, column, WIDTH, OUTPUTS)
        mixes = _project(s1, h1, l1, mixes)
        if not GRAM:
            h2, l2 = _mixer_rows(high_ptr, low_ptr, 2 * WIDTH, d, column, WIDTH, OUTPUTS)
        mixes = _project(s2, h2, l2, mixes)
        if not GRAM:
            h3, l3 = _mixer_rows(high_ptr, low_ptr, 3 * WIDTH, d, column, WIDTH, OUTPUTS)
        mixes = _project(s3, h3, l3, mixes)
        f0 = s0.to(tl.float32)
        f1 = s1.to(tl.float32)
        f2 = s2.to(tl.float32)
        f3 = s3.to(tl.float32)
        if GRAM:
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
        else:
            squares += f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3
    if not GRAM:
        tl.store(part_ptr + (t64 * 42 + 32) * PARTS + part, tl.sum(squares, 1), mask=here)
    kept = here[:, None] & (column < OUTPUTS)[None, :]
    tl.store(part_ptr + (t64[:, None] * 42 + column[None, :]) * PARTS + part, mixes, mask=kept)


@triton.jit
def _stream(comb_ptr, t, here, k, post, o, x0, x1, x2, x3):
    """New stream k as BF16."""
    c0 = tl.load(comb_ptr + t * 16 + k, mask=here, other=0.0)[:, None]
    c1 = tl.load(comb_ptr + t * 16 + 4 + k, mask=here, other=0.0)[:, None]
    c2 = tl.load(comb_ptr + t * 16 + 8 + k, mask=here, other=0.0)[:, None]
    c3 = tl.load(comb_ptr + t * 16 + 12 + k, mask=here, other=0.0)[:, None]
    return to_bf16(post * o + c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3)


@triton.jit
def _mixer_rows(high_ptr, low_ptr, offset, d, column, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr):
    """Both halves of the mixer for one stream's channels d: BF16 [channels, 32] each."""
    at = column[None, :] * (4 * WIDTH) + (offset + d)[:, None]
    kept = (column < OUTPUTS)[None, :] & (d < WIDTH)[:, None]
    return tl.load(high_ptr + at, mask=kept, other=0.0), tl.load(low_ptr + at, mask=kept, other=0.0)


@triton.jit
def _project(s, high, low, mixes):
    """mixes += s @ (high + low)."""
    s = pinned(s)
    return dot(s, low, dot(s, high, mixes))
