"""Attention over numbered KV rows in Triton: split over the keys for few tokens, then one pass that joins the splits.

A tile of rows is dequantised once into shared memory, in the type of the queries, and serves as keys and as values.
FP16 queries make that cheapest (FP16 holds E4M3 values exactly, and their scales too with rows that a norm bounds);
BF16 queries work as well. The joining pass adds the sink; it can also turn the output back and quantise it, which saves
a launch and a trip through memory.

In deterministic mode (`ops.invariant`) a split is always SHARE tiles of a token's keys, and splits are joined one after
the other: what a token reads decides alone how it is added up, in decode and in chunks. Chunks read FP8 rows there, as
decode does: a program for BF16 rows has its products laid out otherwise, and adds them up in another order.
"""

# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc import tuning
from worker_svc.ops import invariant, kv_rows
from worker_svc.ops.kv_rows import BF16_PAGE_BYTES
from worker_svc.ops.launches import after_others, chained
from worker_svc.ops.triton_numbers import dot, pow2_scale, to_bf16
from worker_svc.ops.triton_rows import DATA_BYTES, PAGE, codes_of, inverse, pair_turns, turn_pairs

LOG2E = 1.4426950408889634
SM_FILL = 132
"""Programs that make a Hopper GPU busy; more splits than that only add work."""
JOIN_HEADS = 4
"""Heads of a program that joins splits in order."""
JOIN_VALUES = 8192
"""FP16 values that a joining program holds."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Keys and heads of one step of a program, its warps, and stages of the loop over keys."""

    keys: int = 64
    heads: int = 64
    warps: int = 8
    stages: int = 2


WINDOW = tl.constexpr(128)
"""Keys of a window list, whatever it holds of them."""
SHARE = 4
"""Tiles of a split in deterministic mode: three splits of an indexed layer's 640 keys."""
PART_BYTES = 1 << 29
"""Splits' outputs that exist at once there: a chunk's queries go in groups of so many bytes."""

FEW_TOKENS = 4
TILE_FEW, TILE_MANY = Tile(keys=32), Tile()
"""Measured on an H200 at 640 keys: few tokens want many short splits, many tokens whole tiles and loads ahead.
`tuning` measures them anew."""


@triton.jit
def _as(x, FP16: tl.constexpr):
    """FP32 or FP16 -> the type of the products."""
    if FP16:
        return x.to(tl.float16)
    else:
        return to_bf16(x.to(tl.float32))


@triton.jit
def _nope_tile(
    page, place, known, FIRST: tl.constexpr, BLOCKS: tl.constexpr, KEYS: tl.constexpr, FP8: tl.constexpr,
    FP16: tl.constexpr,
):  # fmt: skip
    """[KEYS, BLOCKS * 64] of unrotated columns from FIRST on: E4M3 times their scales, or BF16 as they are."""
    column = tl.arange(0, BLOCKS * 64)[None, :]
    if FP8:
        data = (page + place * DATA_BYTES + FIRST).to(tl.pointer_type(tl.float8e4nv))
        codes = tl.load(data[:, None] + column, mask=known[:, None], other=0.0).to(tl.float16)
        block = tl.arange(0, BLOCKS)[None, :]
        scale = (page + PAGE * DATA_BYTES + place * 8 + FIRST // 64)[:, None] + block
        bits = tl.load(scale, mask=known[:, None], other=127).to(tl.int32) << 23
        factor = bits.to(tl.float32, bitcast=True)
        if FP16:
            scaled = tl.reshape(codes, (KEYS, BLOCKS, 64)) * factor.to(tl.float16)[:, :, None]
        else:
            scaled = tl.reshape(codes.to(tl.float32), (KEYS, BLOCKS, 64)) * factor[:, :, None]
        return _as(tl.reshape(scaled, (KEYS, BLOCKS * 64)), FP16)
    else:
        data = (page + place * 1024 + FIRST * 2).to(tl.pointer_type(tl.bfloat16))
        return _as(tl.load(data[:, None] + column, mask=known[:, None], other=0.0).to(tl.float32), FP16)


@triton.jit
def _rope_tile(page, place, known, FP8: tl.constexpr, FP16: tl.constexpr):
    """[KEYS, 64] of the rotated columns, which are BF16 in both formats."""
    start = page + place * DATA_BYTES + 448 if FP8 else page + place * 1024 + 896
    source = start.to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, 64)[None, :]
    return _as(tl.load(source, mask=known[:, None], other=0.0).to(tl.float32), FP16)


@triton.jit
def _query_tile(q, head, heads, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    source = q + head[:, None] * 512 + FIRST + tl.arange(0, WIDTH)[None, :]
    return tl.load(source, mask=(head < heads)[:, None], other=0.0)


@triton.jit
def _store_part(target, head, heads, o, factor, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    place = target + head[:, None] * 512 + FIRST + tl.arange(0, WIDTH)[None, :]
    tl.store(place, (o * factor[:, None]).to(tl.float16), mask=(head < heads)[:, None])


@chained
@triton.jit(do_not_specialize=["splits"])
def _attend_rows(
    q, q_stride, heads, window, page_bytes, window_rows, window_stride, window_len,
    entries_after: tl.int64, entry_rows, entry_stride, entry_len, part, lse, factor, splits,
    FP8: tl.constexpr, FP16: tl.constexpr, ENTRIES: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """One token, one split, HEADS heads. `entries_after`: bytes from the window pool to the entry pool. SHARE 0: the
    token's tiles are spread over the splits; else that many go to each, and the window takes its full number."""
    after_others()
    token = tl.program_id(0)
    split = tl.program_id(1)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    q += token.to(tl.int64) * q_stride
    q0 = _query_tile(q, head, heads, 0, 256)
    q1 = _query_tile(q, head, heads, 256, 128)
    q2 = _query_tile(q, head, heads, 384, 64)
    q3 = _query_tile(q, head, heads, 448, 64)
    o0 = tl.zeros((HEADS, 256), tl.float32)
    o1 = tl.zeros((HEADS, 128), tl.float32)
    o2 = tl.zeros((HEADS, 64), tl.float32)
    o3 = tl.zeros((HEADS, 64), tl.float32)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    near = tl.load(window_len + token)
    far = 0
    if ENTRIES:
        far = tl.load(entry_len + token)
    if SHARE == 0:
        near_blocks = tl.cdiv(near, KEYS)
        blocks = near_blocks + tl.cdiv(far, KEYS)
        share = tl.cdiv(blocks, splits)
    else:
        near_blocks = WINDOW // KEYS
        blocks = near_blocks + tl.cdiv(far, KEYS)
        share = SHARE
    for block in range(split * share, tl.minimum((split + 1) * share, blocks)):
        number = block * KEYS + tl.arange(0, KEYS)
        row = tl.load(window_rows + token.to(tl.int64) * window_stride + number, mask=number < near, other=-1)
        page = window
        if ENTRIES:
            behind = number - near_blocks * KEYS
            listed = entry_rows + token.to(tl.int64) * entry_stride + behind
            row = tl.maximum(row, tl.load(listed, mask=(behind >= 0) & (behind < far), other=-1))
            page += tl.where(block < near_blocks, 0, entries_after)
        known = row >= 0
        row = tl.maximum(row, 0)
        page = page + (row // PAGE).to(tl.int64) * page_bytes
        place = row % PAGE
        k0 = _nope_tile(page, place, known, 0, 4, KEYS, FP8, FP16)
        s = dot(q0, tl.trans(k0), tl.zeros((HEADS, KEYS), tl.float32))
        k1 = _nope_tile(page, place, known, 256, 2, KEYS, FP8, FP16)
        s = dot(q1, tl.trans(k1), s)
        k2 = _nope_tile(page, place, known, 384, 1, KEYS, FP8, FP16)
        s = dot(q2, tl.trans(k2), s)
        k3 = _rope_tile(page, place, known, FP8, FP16)
        s = dot(q3, tl.trans(k3), s)
        s = tl.where(known[None, :], s * factor, float("-inf"))
        highest = tl.maximum(top, tl.max(s, 1))
        floor = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(s - floor[:, None])
        kept = tl.exp2(top - floor)
        total = total * kept + tl.sum(p, 1)
        weight = _as(p, FP16)
        o0 = dot(weight, k0, o0 * kept[:, None])
        o1 = dot(weight, k1, o1 * kept[:, None])
        o2 = dot(weight, k2, o2 * kept[:, None])
        o3 = dot(weight, k3, o3 * kept[:, None])
        top = highest
    line = token.to(tl.int64) * splits + split
    reached = total > 0
    tl.store(
        lse + line * heads + head,
        tl.where(reached, top + tl.log2(tl.where(reached, total, 1.0)), float("-inf")),
        mask=head < heads,
    )
    scale = tl.where(reached, 1.0 / tl.where(reached, total, 1.0), 0.0)
    target = part + line * heads * 512
    if SHARE != 0:  # nobody reads the output of a split without keys
        heads = tl.where(split * share < blocks, heads, 0)
    _store_part(target, head, heads, o0, scale, 0, 256)
    _store_part(target, head, heads, o1, scale, 256, 128)
    _store_part(target, head, heads, o2, scale, 384, 64)
    _store_part(target, head, heads, o3, scale, 448, 64)


@chained
@triton.jit(do_not_specialize=["scale_column"])
def _join_splits(
    part, lse, sink, out, turns, positions, codes, scale, scale_token, scale_group, scale_column,
    heads, per_group, splits,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token in blocks of 128 dims: weighted sum of the splits, as BF16 or turned back as E4M3."""
    after_others()
    token = tl.program_id(0)
    block = tl.program_id(1) * HEADS * 4 + tl.arange(0, HEADS * 4)
    head = block // 4
    known = block < heads * 4
    own = tl.load(sink + head, mask=known, other=0.0) * 1.4426950408889634
    split = tl.arange(0, SPLITS)
    inside = (split < splits)[:, None] & known[None, :]
    line = lse + (token.to(tl.int64) * splits + split)[:, None] * heads + head[None, :]
    each = tl.load(line, mask=inside, other=float("-inf"))
    place = tl.arange(0, 128)
    source = part + (token.to(tl.int64) * splits + split)[:, None, None] * heads * 512
    source += block[None, :, None] * 128 + place[None, None, :]
    x = tl.load(source, mask=inside[:, :, None], other=0.0).to(tl.float32)
    top = tl.maximum(own, tl.max(each, 0))
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(each - top[None, :])
    total = tl.exp2(own - top) + tl.sum(weight, 0)
    y = tl.sum(x * weight[:, :, None], 0) * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    place = place[None, :]
    row = (token.to(tl.int64) * heads * 4 + block)[:, None] * 128
    if QUANTISE:
        turn = turns + tl.maximum(tl.load(positions + token), 0).to(tl.int64) * 64
        cos, sin = pair_turns(turn, tl.arange(0, 64), 32)
        last = (block % 4 == 3)[:, None]
        cos, sin = tl.where(last, cos[None, :], 1.0), tl.where(last, -sin[None, :], 0.0)
        y = tl.reshape(turn_pairs(tl.reshape(y, (HEADS * 4, 64, 2)), cos, sin), (HEADS * 4, 128))
        factor = pow2_scale(tl.max(tl.abs(y), 1))
        tl.store(codes + row + place, codes_of(y, inverse(factor)[:, None]), mask=known[:, None])
        group = block // (per_group * 4)
        column = block % (per_group * 4)
        address = scale + token.to(tl.int64) * scale_token + group.to(tl.int64) * scale_group
        tl.store(address + column.to(tl.int64) * scale_column, factor, mask=known)
    else:
        tl.store(out + row + place, to_bf16(y), mask=known[:, None])


@triton.jit(do_not_specialize=["splits"])
def _join_in_order(part, lse, sink, out, heads, splits, HEADS: tl.constexpr):
    """As `_join_splits` to BF16, one split after the other; those without keys change nothing."""
    token = tl.program_id(0)
    block = tl.program_id(1) * HEADS * 4 + tl.arange(0, HEADS * 4)
    head = block // 4
    known = block < heads * 4
    place = tl.arange(0, 128)[None, :]
    own = tl.load(sink + head, mask=known, other=0.0) * 1.4426950408889634
    top = own
    for split in range(splits):
        line = lse + (token.to(tl.int64) * splits + split) * heads
        top = tl.maximum(top, tl.load(line + head, mask=known, other=float("-inf")))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp2(own - top)
    y = tl.zeros((HEADS * 4, 128), tl.float32)
    for split in range(splits):
        line = token.to(tl.int64) * splits + split
        each = tl.load(lse + line * heads + head, mask=known, other=float("-inf"))
        seen = (each != float("-inf"))[:, None] & (place >= 0)
        source = part + line * heads * 512 + block[:, None] * 128 + place
        weight = tl.exp2(each - top)
        y += tl.load(source, mask=seen, other=0.0).to(tl.float32) * weight[:, None]
        total += weight
    y = y * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    row = (token.to(tl.int64) * heads * 4 + block)[:, None] * 128
    tl.store(out + row + place, to_bf16(y), mask=known[:, None])


def tile_for(tokens: int, heads: int) -> Tile:
    """The built-in tile of a launch; models with few heads have smaller ones."""
    return _fit(TILE_FEW if tokens <= FEW_TOKENS else TILE_MANY, heads)


def tuned_tile(tokens: int, heads: int) -> Tile:
    """As `tile_for`, with what was measured on this machine: for decode from FP8 rows, where it was."""
    few = tokens <= tuning.value("sparse_attention.few_tokens", FEW_TOKENS)
    tile = tuning.value("sparse_attention.tile_few" if few else "sparse_attention.tile_many", None)
    return _fit((TILE_FEW if few else TILE_MANY) if tile is None else Tile(*tile), heads)


def _fit(tile: Tile, heads: int) -> Tile:
    return replace(tile, heads=min(tile.heads, max(16, 1 << (heads - 1).bit_length())))


def num_splits(tokens: int, heads: int, most_keys: int, tile: Tile) -> int:
    """Key splits for a launch: as many as fill the GPU, none shorter than a tile."""
    groups = tokens * _blocks(heads, tile.heads)
    return max(1, min(_blocks(most_keys, tile.keys), SM_FILL // groups, 32))


def _blocks(size: int, tile: int) -> int:
    return -(-size // tile)


def attend(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    window_len: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    entry_len: Tensor | None,
    scale: float,
    splits: int | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """q FP16 or BF16 -> FP16 [T, splits, H, 512] outputs of the splits, each normalised, and FP32 [T, splits, H] log2
    of their sums."""
    fp8 = window.shape[1] != BF16_PAGE_BYTES
    tile = tile or (tuned_tile if fp8 and not invariant.on() else tile_for)(q.shape[0], q.shape[1])
    most = window_rows.shape[1] + (0 if entry_rows is None else entry_rows.shape[1])
    splits = splits or num_splits(q.shape[0], q.shape[1], most, tile)
    assert entries is None or entries.stride(0) == window.stride(0), "both pools have one row format"
    near = (window, window.stride(0), window_rows, window_len)
    if entries is None or entry_rows is None or entry_len is None:
        return _launch(q, near, None, scale, splits, tile, fp8=fp8)
    return _launch(q, near, (entries, entry_rows, entry_len), scale, splits, tile, fp8=fp8)


def _launch(
    q: Tensor,
    near: tuple[Tensor, int, Tensor, Tensor],
    far: tuple[Tensor, Tensor, Tensor] | None,
    scale: float,
    splits: int,
    tile: Tile,
    *,
    fp8: bool,
    share: int = 0,
) -> tuple[Tensor, Tensor]:
    """near: pool, bytes of its pages, rows, lengths; far: pool, rows, lengths."""
    tokens, heads = q.shape[:2]
    window, page_bytes, window_rows, window_len = near
    entries, entry_rows, entry_len = (window, window_rows, window_len) if far is None else far
    assert q.stride(2) == 1 and q.stride(1) == 512 and window_rows.stride(1) == entry_rows.stride(1) == 1, q.stride()
    part = torch.empty(tokens, splits, heads, 512, dtype=torch.float16, device=q.device)
    lse = torch.empty(tokens, splits, heads, device=q.device)
    _attend_rows[(tokens, splits, _blocks(heads, tile.heads))](
        q, q.stride(0), heads, window, page_bytes, window_rows, window_rows.stride(0), window_len,
        entries.data_ptr() - window.data_ptr(), entry_rows, entry_rows.stride(0), entry_len,
        part, lse, scale * LOG2E, splits,
        FP8=fp8, FP16=q.dtype == torch.float16, ENTRIES=far is not None, KEYS=tile.keys, HEADS=tile.heads,
        SHARE=share, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return part, lse


def _in_order(
    q: Tensor,
    near: tuple[Tensor, int, Tensor, Tensor],
    far: tuple[Tensor, Tensor, Tensor] | None,
    sink: Tensor,
    scale: float,
    out: Tensor,
    *,
    fp8: bool,
) -> None:
    """Deterministic mode: one tile and SHARE of them to a split, whatever there is to do. Rows of `near` are a window's
    list; tokens go in groups, of which none has more than PART_BYTES of splits' outputs."""
    tokens, heads = q.shape[:2]
    tile = tile_for(FEW_TOKENS + 1, heads)
    window, page_bytes, window_rows, window_len = near
    assert window_rows.shape[1] == WINDOW.value and WINDOW.value % tile.keys == 0, window_rows.shape
    tiles = WINDOW.value // tile.keys + (0 if far is None else _blocks(far[1].shape[1], tile.keys))
    splits = _blocks(tiles, SHARE)
    group = max(64, PART_BYTES // (splits * heads * 1024) // 64 * 64)
    for first in range(0, tokens, group):
        some = slice(first, first + group)
        part, lse = _launch(
            q[some],
            (window, page_bytes, window_rows[some], window_len[some]),
            None if far is None else (far[0], far[1][some], far[2][some]),
            scale,
            splits,
            tile,
            fp8=fp8,
            share=SHARE,
        )
        grid = lse.shape[0], _blocks(heads, JOIN_HEADS)
        _join_in_order[grid](part, lse, sink, out[some], heads, splits, HEADS=JOIN_HEADS, num_warps=4)


def join(part: Tensor, lse: Tensor, sink: Tensor, out: Tensor) -> None:
    """out BF16 [T, H, 512] of the splits and the sink FP32 [H]."""
    tokens, splits, heads = lse.shape
    grid, tiles = _join_shape(tokens, splits, heads)
    _join_splits[grid](
        part, lse, sink, out, lse, lse, out, lse, 0, 0, 0, heads, 1, splits, **tiles, QUANTISE=False, num_warps=4
    )


def join_quantised(
    part: Tensor, lse: Tensor, sink: Tensor, turns: Tensor, positions: Tensor, codes: Tensor, scale: Tensor
) -> None:
    """The joined output as `ops.attention_output` leaves it: codes E4M3 [T, G, H / G * 512], scale FP32 [T, G, ...]."""
    tokens, splits, heads = lse.shape
    grid, tiles = _join_shape(tokens, splits, heads)
    _join_splits[grid](
        part, lse, sink, codes, turns, positions, codes, scale, *scale.stride(), heads, heads // codes.shape[1], splits,
        **tiles, QUANTISE=True, num_warps=4,
    )  # fmt: skip


def _join_shape(tokens: int, splits: int, heads: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and tile of the joining pass: all splits of as many heads as fit."""
    padded = 1 << (splits - 1).bit_length()
    tile = max(1, min(4, JOIN_VALUES // (512 * padded)))
    return (tokens, _blocks(heads, tile)), {"SPLITS": padded, "HEADS": tile}


def sparse_decode(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    window_len: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    entry_len: Tensor | None,
    sink: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """See `decode_attention` of the door."""
    if invariant.on():
        near = (window, window.stride(0), window_rows, window_len)
        far = None
        if entries is not None and entry_rows is not None and entry_len is not None:
            far = (entries, entry_rows, entry_len)
        _in_order(q, near, far, sink, scale, out, fp8=window.shape[1] != BF16_PAGE_BYTES)
        return
    part, lse = attend(q, window, window_rows, window_len, entries, entry_rows, entry_len, scale)
    join(part, lse, sink, out)


def sparse_prefill(
    q: Tensor,
    keys: Tensor,
    index: Tensor,
    sink: Tensor,
    scale: float,
    out: Tensor,
    reach: Tensor | None = None,
    *,
    fp8: bool = False,
) -> None:
    """See `chunk_attention` of the door. A BF16 matrix of rows is a pool of BF16 pages as it stands.

    In deterministic mode the first 128 of a list are a window's, and the pool has decode's format."""
    assert keys.is_contiguous() and keys.dtype == torch.bfloat16, (keys.dtype, keys.stride())
    pool = keys.view(torch.uint8)
    if invariant.on():
        window, page_bytes = WINDOW.value, BF16_PAGE_BYTES
        if fp8:
            pool = _fp8_pool(keys)
            page_bytes = pool.stride(0)
        length = torch.full((q.shape[0],), window, dtype=torch.int32, device=q.device)
        near, far = (pool, page_bytes, index[:, :window], length), None
        if index.shape[1] > window:
            most = index.shape[1] - window
            behind = torch.full_like(length, most) if reach is None else (reach - window).clamp(min=0, max=most)
            far = (pool, index[:, window:], behind)
        _in_order(q, near, far, sink, scale, out, fp8=fp8)
        return
    length = torch.full((q.shape[0],), index.shape[1], dtype=torch.int32, device=q.device)
    near = (pool, BF16_PAGE_BYTES, index, length)
    tile = tile_for(q.shape[0], q.shape[1])
    splits = num_splits(q.shape[0], q.shape[1], index.shape[1], tile)
    part, lse = _launch(q, near, None, scale, splits, tile, fp8=False)
    join(part, lse, sink, out)


def _fp8_pool(keys: Tensor) -> Tensor:
    """Rows that were read from FP8 rows, as FP8 rows again: exact, for their scale is the old one, or half of it where
    all codes are at most half the format's largest."""
    pool = kv_rows.allocate(len(keys), keys.device)
    kv_rows.insert_rows(keys, pool, torch.arange(len(keys), dtype=torch.int32, device=keys.device))
    return pool
