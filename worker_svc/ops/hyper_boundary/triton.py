"""The boundary as two Triton kernels, one pass over the streams each.

Pass 1 splits tokens and channels: it mixes the sublayer's output into the streams and sums, per split, the next
mixer's products (tensor cores, BF16 streams times the mixer's high and low halves) and what the norm needs. Pass 2
splits again: every program adds the partial sums (a few hundred numbers), so no third launch and no atomics. At few
tokens one token is spread over many programs, and the norm's sum of squares comes from the products of the streams,
|sum_j pre_j x_j|^2 = sum_jk pre_j pre_k <x_j, x_k>. At many tokens a program owns a token and squares what it made,
and the mixing weights come from a launch of their own, a token per thread: eight warps repeating one Sinkhorn loop
were most of the work.
"""
# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops.hyper_boundary.mixer import BoundaryRules, Mixer, Workspace
from worker_svc.ops.triton_numbers import dot, pinned, pow2_scale, scaled_e4m3, to_bf16

EMBED, OUTPUT, EXPERTS = 0, 1, 2
_COLUMNS = Workspace.COLUMNS
GRAM_TOKENS = 64
"""Up to here a token's channels are spread over several programs of pass 2."""
WEIGHT_TOKENS = 32
"""Tokens of a program that makes mixing weights, one per thread."""


@dataclass(frozen=True, slots=True)
class Split:
    """How pass 1 is cut: tokens and channels per tile, tiles per program, programs along the channels, warps."""

    tokens: int
    channels: int
    tiles: int
    parts: int
    warps: int
    stages: int = 2

    @property
    def gram(self) -> bool:
        """True if every program holds one tile: then the products of streams cost one reduction."""
        return self.tiles == 1


def split(tokens: int, width: int) -> Split:
    """Enough programs for the whole chip at any number of tokens, and at most 8 parts above GRAM_TOKENS."""
    if tokens <= GRAM_TOKENS:
        channels = min(64 if tokens <= 16 else 128, width)
        return Split(16, channels, 1, -(-width // channels), 4)
    if tokens <= 1024:
        rows, parts, stages = 16, 8, 3 if tokens <= 512 else 2
    else:
        rows, parts, stages = (32, 4, 3) if tokens <= 2048 else (64, 2, 3)
    channels = 64 if rows < 64 else 32
    tiles = -(-width // (channels * parts))
    return Split(rows, channels, tiles, -(-width // (channels * tiles)), 4, stages)


def embed_mix(ids: Tensor, embed: Tensor, x_out: Tensor, mixer: Mixer, workspace: Workspace) -> None:
    """See the door."""
    _pass1(x_out, x_out, x_out, x_out, x_out, x_out, ids, embed, mixer, workspace, EMBED, 1)


def post_mix(
    x_in: Tensor,
    x_out: Tensor,
    post: Tensor,
    comb: Tensor,
    mixer: Mixer,
    workspace: Workspace,
    out: Tensor | None,
    rows: Tensor | None,
    shared: Tensor | None,
) -> None:
    """See the door."""
    if out is not None:
        _pass1(x_in, x_out, out, out, post, comb, post, x_in, mixer, workspace, OUTPUT, 1)
    else:
        assert rows is not None and shared is not None
        per_token = rows.shape[0] // max(x_in.shape[0], 1)
        _pass1(x_in, x_out, rows, shared, post, comb, post, x_in, mixer, workspace, EXPERTS, per_token)


def pre_norm(
    x: Tensor,
    mixer: Mixer,
    workspace: Workspace,
    norm_weight: Tensor,
    rules: BoundaryRules,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    q: Tensor | None,
    sf: Tensor | None,
    sf2: Tensor | None,
) -> None:
    """See the door."""
    none = y  # never read: the kernel's flags say which arguments are there
    _pass2(x, mixer, workspace, norm_weight, rules, None, y, post, comb, q, sf, sf2, none)


def head_norm(
    x: Tensor, mixer: Mixer, workspace: Workspace, norm_weight: Tensor, rules: BoundaryRules, rows: Tensor, z: Tensor
) -> None:
    """See the door."""
    _pass2(x, mixer, workspace, norm_weight, rules, rows, z, z, z, None, None, None, z)


def _pass1(x_in, x_out, out, shared, post, comb, ids, embed, mixer, workspace, source, per_token):
    tokens, _, width = x_out.shape
    if tokens == 0:
        return
    cut = split(tokens, width)
    assert tokens * cut.parts * _COLUMNS <= workspace.partials.numel(), "the workspace is for fewer tokens"
    assert width % cut.channels == 0, (width, cut.channels)
    _mix_streams[(triton.cdiv(tokens, cut.tokens), cut.parts)](
        x_in,
        x_out,
        out,
        shared,
        post,
        comb,
        ids,
        embed,
        mixer.high,
        mixer.low,
        workspace.partials,
        tokens,
        WIDTH=width,
        OUTPUTS=mixer.outputs,
        SOURCE=source,
        PER_TOKEN=per_token,
        GRAM=cut.gram,
        TOKENS=cut.tokens,
        CHANNELS=cut.channels,
        TILES=cut.tiles,
        PARTS=cut.parts,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )


def _pass2(x, mixer, workspace, norm_weight, rules, rows, y, post, comb, q, sf, sf2, none):
    tokens, _, width = x.shape
    asked = tokens if rows is None else rows.shape[0]
    if asked == 0:
        return
    cut = split(tokens, width)
    block = triton.next_power_of_2(width)
    if cut.gram:
        block = min(128 if tokens <= 16 else 512, block)
    pieces = triton.cdiv(width, block)
    scales = none if sf is None else sf
    twice = scales if sf2 is None else sf2
    head = rows is not None
    pre = workspace.partials[: 4 * asked] if cut.gram else workspace.weights(asked)
    if not cut.gram:
        _mixing_weights[(triton.cdiv(asked, WEIGHT_TOKENS),)](
            workspace.partials,
            mixer.scale,
            mixer.base,
            none if rows is None else rows,
            pre,
            post,
            comb,
            asked,
            WIDTH=width,
            PARTS=cut.parts,
            HEAD=head,
            ITERATIONS=rules.iterations,
            EPS=rules.eps,
            NORM_EPS=rules.norm_eps,
            TOKENS=WEIGHT_TOKENS,
            num_warps=max(1, WEIGHT_TOKENS // 32),
        )
    _collapse_norm[(asked, pieces + (cut.gram and not head))](
        x,
        workspace.partials,
        pre,
        mixer.scale,
        mixer.base,
        norm_weight,
        none if rows is None else rows,
        y,
        none if q is None else q,
        scales,
        twice,
        post,
        comb,
        scales.stride(0),
        scales.stride(1),
        twice.stride(0),
        twice.stride(1),
        WIDTH=width,
        PARTS=cut.parts,
        PARTS_POW2=triton.next_power_of_2(cut.parts),
        GRAM=cut.gram,
        HEAD=head,
        QUANT=q is not None,
        TWICE=sf2 is not None,
        ITERATIONS=rules.iterations,
        EPS=rules.eps,
        NORM_EPS=rules.norm_eps,
        PIECES=pieces,
        BLOCK=block,
        num_warps=1 if block <= 128 else 4 if block <= 1024 else 8,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _mix_streams(
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


@triton.jit(do_not_specialize=["sf_token", "sf_block", "twice_token", "twice_block"])
def _collapse_norm(
    x_ptr,
    part_ptr,
    pre_ptr,
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
):
    """Program (row, piece): BLOCK channels of one token's input; the last piece makes post and comb instead."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
    t = row
    if HEAD:
        t = tl.load(rows_ptr + row)
    parts = part_ptr + t.to(tl.int64) * 42 * PARTS
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
        g0 = _total(parts, 32, s, PARTS)
        g1 = _total(parts, 33, s, PARTS)
        g2 = _total(parts, 34, s, PARTS)
        g3 = _total(parts, 35, s, PARTS)
        factor = tl.rsqrt((g0 + g1 + g2 + g3) * (1.0 / (4 * WIDTH)) + NORM_EPS)
    if piece == PIECES:
        if GRAM:
            at_comb = comb_ptr + row * 16
            _post_comb(parts, s, factor, scale_ptr, base_ptr, post_ptr + row * 4, at_comb, PARTS, ITERATIONS, EPS)
    else:
        if GRAM:
            a = tl.load(scale_ptr) * factor
            w0 = _gate(_total(parts, 0, s, PARTS) * a + tl.load(base_ptr)) + EPS
            w1 = _gate(_total(parts, 1, s, PARTS) * a + tl.load(base_ptr + 1)) + EPS
            w2 = _gate(_total(parts, 2, s, PARTS) * a + tl.load(base_ptr + 2)) + EPS
            w3 = _gate(_total(parts, 3, s, PARTS) * a + tl.load(base_ptr + 3)) + EPS
        else:
            w0 = tl.load(pre_ptr + row * 4)
            w1 = tl.load(pre_ptr + row * 4 + 1)
            w2 = tl.load(pre_ptr + row * 4 + 2)
            w3 = tl.load(pre_ptr + row * 4 + 3)
        v = w0 * x0.to(tl.float32) + w1 * x1.to(tl.float32) + w2 * x2.to(tl.float32) + w3 * x3.to(tl.float32)
        v = to_bf16(v).to(tl.float32)
        if GRAM:
            crossed = w0 * (w1 * _total(parts, 36, s, PARTS) + w2 * _total(parts, 37, s, PARTS))
            crossed += w0 * w3 * _total(parts, 38, s, PARTS) + w1 * w2 * _total(parts, 39, s, PARTS)
            crossed += w1 * w3 * _total(parts, 40, s, PARTS) + w2 * w3 * _total(parts, 41, s, PARTS)
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


@triton.jit(do_not_specialize=["asked"])
def _mixing_weights(
    part_ptr,
    scale_ptr,
    base_ptr,
    rows_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    asked,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD: tl.constexpr,
    ITERATIONS: tl.constexpr,
    EPS: tl.constexpr,
    NORM_EPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """pre, and post and comb where there is no head, of TOKENS tokens: everything here is a vector over tokens."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = row < asked
    t = row
    if HEAD:
        t = tl.load(rows_ptr + row, mask=here, other=0)
    parts = part_ptr + t.to(tl.int64) * (42 * PARTS)
    total = _column(parts, 32, here, PARTS)
    factor = tl.rsqrt(total * (1.0 / (4 * WIDTH)) + NORM_EPS)
    a = tl.load(scale_ptr) * factor
    for k in tl.static_range(4):
        gate = _gate(_column(parts, k, here, PARTS) * a + tl.load(base_ptr + k))
        tl.store(pre_ptr + row * 4 + k, gate + EPS, mask=here)
    if not HEAD:
        a = tl.load(scale_ptr + 1) * factor
        for k in tl.static_range(4):
            gate = _gate(_column(parts, 4 + k, here, PARTS) * a + tl.load(base_ptr + 4 + k))
            tl.store(post_ptr + row * 4 + k, 2.0 * gate, mask=here)
        a = tl.load(scale_ptr + 2) * factor
        c00, c01, c02, c03 = _softmax_columns(parts, here, 8, a, base_ptr, PARTS, EPS)
        c10, c11, c12, c13 = _softmax_columns(parts, here, 12, a, base_ptr, PARTS, EPS)
        c20, c21, c22, c23 = _softmax_columns(parts, here, 16, a, base_ptr, PARTS, EPS)
        c30, c31, c32, c33 = _softmax_columns(parts, here, 20, a, base_ptr, PARTS, EPS)
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
        comb = comb_ptr + row * 16
        _store_columns(comb, here, c00, c01, c02, c03)
        _store_columns(comb + 4, here, c10, c11, c12, c13)
        _store_columns(comb + 8, here, c20, c21, c22, c23)
        _store_columns(comb + 12, here, c30, c31, c32, c33)


@triton.jit
def _column(parts, column, here, PARTS: tl.constexpr):
    """One column's sum for a vector of tokens."""
    total = tl.load(parts + column * PARTS, mask=here, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + column * PARTS + part, mask=here, other=0.0)
    return total


@triton.jit
def _softmax_columns(parts, here, column, a, base_ptr, PARTS: tl.constexpr, EPS: tl.constexpr):
    """One row of comb before the Sinkhorn loop, for a vector of tokens."""
    r0 = _column(parts, column, here, PARTS) * a + tl.load(base_ptr + column)
    r1 = _column(parts, column + 1, here, PARTS) * a + tl.load(base_ptr + column + 1)
    r2 = _column(parts, column + 2, here, PARTS) * a + tl.load(base_ptr + column + 2)
    r3 = _column(parts, column + 3, here, PARTS) * a + tl.load(base_ptr + column + 3)
    return _softmax(r0, r1, r2, r3, EPS)


@triton.jit
def _store_columns(at, here, a, b, c, d):
    tl.store(at, a, mask=here)
    tl.store(at + 1, b, mask=here)
    tl.store(at + 2, c, mask=here)
    tl.store(at + 3, d, mask=here)


@triton.jit
def _total(parts, column, s, PARTS: tl.constexpr):
    """One column of the token's partial sums, added up."""
    return tl.sum(tl.load(parts + column * PARTS + s, mask=s < PARTS, other=0.0), 0)


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
        raw = _total(parts, 4 + k, s, PARTS) * a + tl.load(base_ptr + 4 + k)
        tl.store(post_ptr + k, 2.0 * _gate(raw))
    a = tl.load(scale_ptr + 2) * factor
    c00, c01, c02, c03 = _softmax_row(parts, s, 8, a, base_ptr, PARTS, EPS)
    c10, c11, c12, c13 = _softmax_row(parts, s, 12, a, base_ptr, PARTS, EPS)
    c20, c21, c22, c23 = _softmax_row(parts, s, 16, a, base_ptr, PARTS, EPS)
    c30, c31, c32, c33 = _softmax_row(parts, s, 20, a, base_ptr, PARTS, EPS)
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
    _store_row(comb_ptr, c00, c01, c02, c03)
    _store_row(comb_ptr + 4, c10, c11, c12, c13)
    _store_row(comb_ptr + 8, c20, c21, c22, c23)
    _store_row(comb_ptr + 12, c30, c31, c32, c33)


@triton.jit
def _softmax_row(parts, s, column, a, base_ptr, PARTS: tl.constexpr, EPS: tl.constexpr):
    """One row of comb before the Sinkhorn loop."""
    r0 = _total(parts, column, s, PARTS) * a + tl.load(base_ptr + column)
    r1 = _total(parts, column + 1, s, PARTS) * a + tl.load(base_ptr + column + 1)
    r2 = _total(parts, column + 2, s, PARTS) * a + tl.load(base_ptr + column + 2)
    r3 = _total(parts, column + 3, s, PARTS) * a + tl.load(base_ptr + column + 3)
    return _softmax(r0, r1, r2, r3, EPS)


@triton.jit
def _softmax(r0, r1, r2, r3, EPS: tl.constexpr):
    """Softmax of four numbers, plus eps each."""
    top = tl.maximum(tl.maximum(r0, r1), tl.maximum(r2, r3))
    e0, e1, e2, e3 = tl.exp(r0 - top), tl.exp(r1 - top), tl.exp(r2 - top), tl.exp(r3 - top)
    share = 1.0 / ((e0 + e1) + (e2 + e3))
    return e0 * share + EPS, e1 * share + EPS, e2 * share + EPS, e3 * share + EPS


@triton.jit
def _to_one(a, b, c, d, EPS: tl.constexpr):
    """Four numbers over their sum."""
    share = 1.0 / ((a + b) + (c + d) + EPS)
    return a * share, b * share, c * share, d * share


@triton.jit
def _store_row(at, a, b, c, d):
    tl.store(at, a)
    tl.store(at + 1, b)
    tl.store(at + 2, c)
    tl.store(at + 3, d)
