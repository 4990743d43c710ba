"""Pass 2 of the boundary: partial sums become mixing weights, the streams one normalised and quantised input.

Every program adds up what its own token needs. post and comb, which nobody reads before the next boundary, are other
programs' work: one for each of a few tokens, in scalars (`_total`); of many tokens one for a list of them, a token per
thread (`_column`), first in line, because the Sinkhorn loop takes longest.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl

from worker_svc.ops.hyper_boundary.mix import LINE
from worker_svc.ops.launches import after_others, chained
from worker_svc.ops.triton_numbers import pow2_scale, scaled_e4m3, to_bf16


@chained
@triton.jit(do_not_specialize=["asked", "num_tokens", "makers", "sf_token", "sf_block", "twice_token", "twice_block"])
def collapse_norm(
    x_ptr,
    part_ptr,
    scale_ptr,
    base_ptr,
    norm_ptr,
    rows_ptr,
    y_ptr,
    q_ptr,
    sf_ptr,
    twice_ptr,
    post_ptr,
    comb_ptr,
    asked,
    num_tokens,
    makers,
    sf_token,
    sf_block,
    twice_token,
    twice_block,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_POW2: tl.constexpr,
    GRAM: tl.constexpr,
    HEAD: tl.constexpr,
    QUANT: tl.constexpr,
    TWICE: tl.constexpr,
    ITERATIONS: tl.constexpr,
    EPS: tl.constexpr,
    NORM_EPS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (row, piece): BLOCK channels of one token's input. post and comb: the last piece of a few tokens; of many
    the first `makers` programs, TOKENS tokens each."""
    after_others()
    row = tl.program_id(0)
    piece = tl.program_id(1)
    if not GRAM:
        row -= makers
        piece = tl.where(row < 0, PIECES, piece)
    t = tl.maximum(row, 0)
    if HEAD:
        t = tl.load(rows_ptr + row)
    s = tl.arange(0, PARTS_POW2)
    d = piece * BLOCK + tl.arange(0, BLOCK)
    live = d < WIDTH
    # The streams are on their way while the mixing weights are added up.
    x = x_ptr + t.to(tl.int64) * (4 * WIDTH) + d
    x0 = tl.load(x, mask=live, other=0.0)
    x1 = tl.load(x + WIDTH, mask=live, other=0.0)
    x2 = tl.load(x + 2 * WIDTH, mask=live, other=0.0)
    x3 = tl.load(x + 3 * WIDTH, mask=live, other=0.0)
    if GRAM:
        parts = part_ptr + t.to(tl.int64) * 42 * PARTS + s
        line = PARTS
        g0 = _total(parts, 32 * line, s, PARTS)
        g1 = _total(parts, 33 * line, s, PARTS)
        g2 = _total(parts, 34 * line, s, PARTS)
        g3 = _total(parts, 35 * line, s, PARTS)
        energy = g0 + g1 + g2 + g3
    else:
        parts = part_ptr + t + s * (LINE * num_tokens)
        line = num_tokens
        energy = _total(parts, 32 * line, s, PARTS)
    factor = tl.rsqrt(energy * (1.0 / (4 * WIDTH)) + NORM_EPS)
    if piece == PIECES:
        if GRAM:
            at_comb = comb_ptr + row * 16
            _post_comb(parts, s, factor, scale_ptr, base_ptr, post_ptr + row * 4, at_comb, PARTS, ITERATIONS, EPS)
        elif not HEAD:
            first = (row + makers) * TOKENS
            at = (part_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr)
            _post_combs(at, first, asked, num_tokens, WIDTH, PARTS, ITERATIONS, EPS, NORM_EPS, TOKENS)
    else:
        a = tl.load(scale_ptr) * factor
        w0 = _gate(_total(parts, 0 * line, s, PARTS) * a + tl.load(base_ptr)) + EPS
        w1 = _gate(_total(parts, 1 * line, s, PARTS) * a + tl.load(base_ptr + 1)) + EPS
        w2 = _gate(_total(parts, 2 * line, s, PARTS) * a + tl.load(base_ptr + 2)) + EPS
        w3 = _gate(_total(parts, 3 * line, s, PARTS) * a + tl.load(base_ptr + 3)) + EPS
        v = w0 * x0.to(tl.float32) + w1 * x1.to(tl.float32) + w2 * x2.to(tl.float32) + w3 * x3.to(tl.float32)
        v = to_bf16(v).to(tl.float32)
        if GRAM:
            crossed = w0 * (w1 * _total(parts, 36 * line, s, PARTS) + w2 * _total(parts, 37 * line, s, PARTS))
            crossed += w0 * w3 * _total(parts, 38 * line, s, PARTS) + w1 * w2 * _total(parts, 39 * line, s, PARTS)
            crossed += w1 * w3 * _total(parts, 40 * line, s, PARTS) + w2 * w3 * _total(parts, 41 * line, s, PARTS)
            squared = w0 * w0 * g0 + w1 * w1 * g1 + w2 * w2 * g2 + w3 * w3 * g3 + 2.0 * crossed
        else:
            squared = tl.sum(v * v, 0)
        weight = tl.load(norm_ptr + d, mask=live, other=0.0).to(tl.float32)
        n = to_bf16(v * tl.rsqrt(tl.maximum(squared, 0.0) * (1.0 / WIDTH) + NORM_EPS) * weight)
        row64 = row.to(tl.int64)
        tl.store(y_ptr + row64 * WIDTH + d, n, mask=live)
        if QUANT:
            blocks = tl.reshape(n.to(tl.float32), (BLOCK // 128, 128))
            scale = pow2_scale(tl.max(tl.abs(blocks), axis=1))
            codes = tl.reshape(scaled_e4m3(blocks, scale[:, None]), (BLOCK,))
            tl.store(q_ptr + row64 * WIDTH + d, codes, mask=live)
            b = piece * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
            tl.store(sf_ptr + row64 * sf_token + b * sf_block, scale, mask=b * 128 < WIDTH)
            if TWICE:
                tl.store(twice_ptr + row64 * twice_token + b * twice_block, scale, mask=b * 128 < WIDTH)


@triton.jit
def _post_combs(
    pointers,
    first,
    asked,
    num_tokens,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    EPS: tl.constexpr,
    NORM_EPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """post and comb of TOKENS tokens: everything here is a vector over tokens."""
    part_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr = pointers
    row = first + tl.arange(0, TOKENS)
    here = row < asked
    parts = part_ptr + row.to(tl.int64)
    factor = tl.rsqrt(_column(parts, 32, here, num_tokens, PARTS) * (1.0 / (4 * WIDTH)) + NORM_EPS)
    a = tl.load(scale_ptr + 1) * factor
    for k in tl.static_range(4):
        gate = _gate(_column(parts, 4 + k, here, num_tokens, PARTS) * a + tl.load(base_ptr + 4 + k))
        tl.store(post_ptr + row * 4 + k, 2.0 * gate, mask=here)
    a = tl.load(scale_ptr + 2) * factor
    c0 = _softmax_columns(parts, here, 8, a, base_ptr, num_tokens, PARTS, EPS)
    c1 = _softmax_columns(parts, here, 12, a, base_ptr, num_tokens, PARTS, EPS)
    c2 = _softmax_columns(parts, here, 16, a, base_ptr, num_tokens, PARTS, EPS)
    c3 = _softmax_columns(parts, here, 20, a, base_ptr, num_tokens, PARTS, EPS)
    c0, c1, c2, c3 = _sinkhorn(c0, c1, c2, c3, ITERATIONS, EPS)
    comb = comb_ptr + row * 16
    _store_columns(comb, here, c0)
    _store_columns(comb + 4, here, c1)
    _store_columns(comb + 8, here, c2)
    _store_columns(comb + 12, here, c3)


@triton.jit
def _column(parts, column, here, num_tokens, PARTS: tl.constexpr):
    """One column's sum for a vector of tokens."""
    total = tl.load(parts + column * num_tokens, mask=here, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + (part * LINE + column) * num_tokens, mask=here, other=0.0)
    return total


@triton.jit
def _softmax_columns(parts, here, column, a, base_ptr, num_tokens, PARTS: tl.constexpr, EPS: tl.constexpr):
    """One row of comb before the Sinkhorn loop, for a vector of tokens."""
    r0 = _column(parts, column, here, num_tokens, PARTS) * a + tl.load(base_ptr + column)
    r1 = _column(parts, column + 1, here, num_tokens, PARTS) * a + tl.load(base_ptr + column + 1)
    r2 = _column(parts, column + 2, here, num_tokens, PARTS) * a + tl.load(base_ptr + column + 2)
    r3 = _column(parts, column + 3, here, num_tokens, PARTS) * a + tl.load(base_ptr + column + 3)
    return _softmax(r0, r1, r2, r3, EPS)


@triton.jit
def _store_columns(at, here, row):
    a, b, c, d = row
    tl.store(at, a, mask=here)
    tl.store(at + 1, b, mask=here)
    tl.store(at + 2, c, mask=here)
    tl.store(at + 3, d, mask=here)


@triton.jit
def _total(parts, column, s, PARTS: tl.constexpr):
    """One column of the token's partial sums, at that distance from `parts` [PARTS_POW2], added up."""
    return tl.sum(tl.load(parts + column, mask=s < PARTS, other=0.0), 0)


@triton.jit
def _gate(v):
    return 1.0 / (1.0 + tl.exp(-v))


@triton.jit
def _post_comb(
    parts,
    s,
    factor,
    scale_ptr,
    base_ptr,
    post_ptr,
    comb_ptr,
    PARTS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    EPS: tl.constexpr,
):
    """The token's post [4] and doubly stochastic comb [4, 4]: softmax of the rows, then columns and rows in turn."""
    a = tl.load(scale_ptr + 1) * factor
    for k in tl.static_range(4):
        raw = _total(parts, (4 + k) * PARTS, s, PARTS) * a + tl.load(base_ptr + 4 + k)
        tl.store(post_ptr + k, 2.0 * _gate(raw))
    a = tl.load(scale_ptr + 2) * factor
    c0 = _softmax_row(parts, s, 8, a, base_ptr, PARTS, EPS)
    c1 = _softmax_row(parts, s, 12, a, base_ptr, PARTS, EPS)
    c2 = _softmax_row(parts, s, 16, a, base_ptr, PARTS, EPS)
    c3 = _softmax_row(parts, s, 20, a, base_ptr, PARTS, EPS)
    c0, c1, c2, c3 = _sinkhorn(c0, c1, c2, c3, ITERATIONS, EPS)
    _store_row(comb_ptr, c0)
    _store_row(comb_ptr + 4, c1)
    _store_row(comb_ptr + 8, c2)
    _store_row(comb_ptr + 12, c3)


@triton.jit
def _softmax_row(parts, s, column, a, base_ptr, PARTS: tl.constexpr, EPS: tl.constexpr):
    """One row of comb before the Sinkhorn loop."""
    r0 = _total(parts, column * PARTS, s, PARTS) * a + tl.load(base_ptr + column)
    r1 = _total(parts, (column + 1) * PARTS, s, PARTS) * a + tl.load(base_ptr + column + 1)
    r2 = _total(parts, (column + 2) * PARTS, s, PARTS) * a + tl.load(base_ptr + column + 2)
    r3 = _total(parts, (column + 3) * PARTS, s, PARTS) * a + tl.load(base_ptr + column + 3)
    return _softmax(r0, r1, r2, r3, EPS)


@triton.jit
def _softmax(r0, r1, r2, r3, EPS: tl.constexpr):
    """Softmax of four numbers, plus eps each."""
    top = tl.maximum(tl.maximum(r0, r1), tl.maximum(r2, r3))
    e0, e1, e2, e3 = tl.exp(r0 - top), tl.exp(r1 - top), tl.exp(r2 - top), tl.exp(r3 - top)
    share = 1.0 / ((e0 + e1) + (e2 + e3))
    return e0 * share + EPS, e1 * share + EPS, e2 * share + EPS, e3 * share + EPS


@triton.jit
def _sinkhorn(r0, r1, r2, r3, ITERATIONS: tl.constexpr, EPS: tl.constexpr):
    """Four rows of four, columns to one, then rows and columns in turn."""
    c00, c01, c02, c03 = r0
    c10, c11, c12, c13 = r1
    c20, c21, c22, c23 = r2
    c30, c31, c32, c33 = r3
    c00, c10, c20, c30 = _to_one(c00, c10, c20, c30, EPS)
    c01, c11, c21, c31 = _to_one(c01, c11, c21, c31, EPS)
    c02, c12, c22, c32 = _to_one(c02, c12, c22, c32, EPS)
    c03, c13, c23, c33 = _to_one(c03, c13, c23, c33, EPS)
    for _ in range(ITERATIONS - 1):
        c00, c01, c02, c03 = _to_one(c00, c01, c02, c03, EPS)
        c10, c11, c12, c13 = _to_one(c10, c11, c12, c13, EPS)
        c20, c21, c22, c23 = _to_one(c20, c21, c22, c23, EPS)
        c30, c31, c32, c33 = _to_one(c30, c31, c32, c33, EPS)
        c00, c10, c20, c30 = _to_one(c00, c10, c20, c30, EPS)
        c01, c11, c21, c31 = _to_one(c01, c11, c21, c31, EPS)
        c02, c12, c22, c32 = _to_one(c02, c12, c22, c32, EPS)
        c03, c13, c23, c33 = _to_one(c03, c13, c23, c33, EPS)
    return (c00, c01, c02, c03), (c10, c11, c12, c13), (c20, c21, c22, c23), (c30, c31, c32, c33)


@triton.jit
def _to_one(a, b, c, d, EPS: tl.constexpr):
    """Four numbers over their sum."""
    share = 1.0 / ((a + b) + (c + d) + EPS)
    return a * share, b * share, c * share, d * share


@triton.jit
def _store_row(at, row):
    a, b, c, d = row
    tl.store(at, a)
    tl.store(at + 1, b)
    tl.store(at + 2, c)
    tl.store(at + 3, d)
