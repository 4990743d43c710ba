"""All lists of one token by one program. Lists of C128 entries are rewritten in whole blocks up to the length only."""

# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from worker_svc.ops.step_lists import ChunkLists, DecodeLists

WINDOW = tl.constexpr(128)
BLOCK = 128


@triton.jit
def _written(position, table, write_from, RATIO: tl.constexpr, PER_PAGE: tl.constexpr):
    """Row of the entry that the token closes, or -1."""
    entry = position // RATIO
    closes = (position >= 0) & ((position + 1) % RATIO == 0) & (entry >= write_from // RATIO)
    page = tl.load(table + entry // PER_PAGE, mask=closes, other=0)
    return tl.where(closes, page * PER_PAGE + entry % PER_PAGE, -1)


@triton.jit
def _decode_lists(
    positions,
    slots,
    table,
    table_stride,
    fresh_from,
    write_from,
    window_rows,
    window_len,
    window_write,
    c4_len,
    c4_write,
    c4_rows,
    c128_rows,
    c128_len,
    c128_write,
    top_len,
    scored,
    pages,
    ring,
    top_k,
    width,
    pages_width,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    position = tl.load(positions + token)
    slot = tl.maximum(tl.load(slots + token), 0)
    table += slot.to(tl.int64) * table_stride
    first = tl.maximum(position - (WINDOW - 1), tl.maximum(tl.load(fresh_from + slot), 0))
    count = tl.where(position >= 0, position - first + 1, 0)
    place = tl.arange(0, WINDOW)
    rows = slot * ring + (first + place) % ring
    tl.store(window_rows + token.to(tl.int64) * WINDOW + place, tl.where(place < count, rows, -1))
    tl.store(window_len + token, count)
    tl.store(window_write + token, tl.where(position >= 0, slot * ring + position % ring, -1))
    oldest_written = tl.load(write_from + slot)
    visible = (position + 1) // 4
    tl.store(c4_len + token, visible)
    tl.store(top_len + token, tl.minimum(visible, top_k))
    tl.store(scored + token, tl.maximum(visible, 1))
    for begin in range(0, tl.cdiv(visible, 64), BLOCK):
        number = begin + tl.arange(0, BLOCK)
        kept = number < tl.minimum(tl.cdiv(visible, 64), pages_width)
        page = tl.load(table + number, mask=kept, other=0)
        tl.store(pages + token.to(tl.int64) * pages_width + number, page, mask=kept)
    tl.store(c4_write + token, _written(position, table, oldest_written, 4, 64))
    known = tl.where(visible <= top_k, visible, 0)
    for begin in range(0, top_k, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        page = tl.load(table + entry // 64, mask=entry < known, other=0)
        listed = tl.where(entry < known, page * 64 + entry % 64, -1)
        tl.store(c4_rows + token.to(tl.int64) * top_k + entry, listed, mask=entry < top_k)
    visible = (position + 1) // 128
    tl.store(c128_len + token, visible)
    tl.store(c128_write + token, _written(position, table, oldest_written, 128, 2))
    for begin in range(0, tl.maximum(visible, 1), BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        page = tl.load(table + entry // 2, mask=entry < visible, other=0)
        listed = tl.where(entry < visible, page * 2 + entry % 2, -1)
        tl.store(c128_rows + token.to(tl.int64) * width + entry, listed, mask=entry < width)


@triton.jit
def _chunk_lists(
    positions,
    slots,
    last_position,
    table,
    table_stride,
    fresh_from,
    write_from,
    own_row,
    c4_base,
    c128_base,
    window_index,
    window_write,
    c4_index,
    c4_len,
    c4_reach,
    c4_write,
    c128_index,
    c128_len,
    c128_write,
    ring,
    top_k,
    c4_width,
    c128_width,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    position = tl.load(positions + token)
    slot = tl.maximum(tl.load(slots + token), 0)
    table += slot.to(tl.int64) * table_stride
    first = tl.maximum(position - (WINDOW - 1), tl.maximum(tl.load(fresh_from + slot), 0))
    count = tl.where(position >= 0, position - first + 1, 0)
    place = tl.arange(0, WINDOW)
    window = tl.where(place < count, tl.load(own_row + token) - position + first + place, -1)
    c4_index += token.to(tl.int64) * c4_width
    c128_index += token.to(tl.int64) * c128_width
    tl.store(window_index + token.to(tl.int64) * WINDOW + place, window)
    tl.store(c4_index + place, window)
    tl.store(c128_index + place, window)
    kept = (position >= 0) & (position > tl.load(last_position + token) - ring)
    tl.store(window_write + token, tl.where(kept, slot * ring + position % ring, -1))
    oldest_written = tl.load(write_from + slot)
    visible = (position + 1) // 4
    tl.store(c4_len + token, visible)
    reach = WINDOW + tl.minimum(visible, top_k)
    tl.store(c4_reach + token, tl.where(position >= 0, reach, 0))
    tl.store(c4_write + token, _written(position, table, oldest_written, 4, 64))
    base = tl.load(c4_base + token)
    known = tl.where(visible <= top_k, visible, 0)
    for begin in range(0, c4_width - WINDOW, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        tl.store(c4_index + WINDOW + entry, tl.where(entry < known, base + entry, -1), mask=entry < c4_width - WINDOW)
    visible = (position + 1) // 128
    tl.store(c128_len + token, tl.where(position >= 0, WINDOW + visible, 0))
    tl.store(c128_write + token, _written(position, table, oldest_written, 128, 2))
    base = tl.load(c128_base + token)
    for begin in range(0, c128_width - WINDOW, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        listed = tl.where(entry < visible, base + entry, -1)
        tl.store(c128_index + WINDOW + entry, listed, mask=entry < c128_width - WINDOW)


def decode_lists(
    positions: Tensor,
    slots: Tensor,
    block_table: Tensor,
    fresh_from: Tensor,
    write_from: Tensor,
    *,
    ring: int,
    out: DecodeLists,
) -> None:
    """See the door."""
    _decode_lists[(positions.shape[0],)](
        positions,
        slots,
        block_table,
        block_table.stride(0),
        fresh_from,
        write_from,
        out.window_rows,
        out.window_len,
        out.window_write,
        out.c4_len,
        out.c4_write,
        out.c4_rows,
        out.c128_rows,
        out.c128_len,
        out.c128_write,
        out.top_len,
        out.scored,
        out.pages,
        ring,
        out.c4_rows.shape[1],
        out.c128_rows.shape[1],
        out.pages.shape[1],
        BLOCK=BLOCK,
        num_warps=4,
    )


def chunk_lists(
    positions: Tensor,
    slots: Tensor,
    last_position: Tensor,
    block_table: Tensor,
    fresh_from: Tensor,
    write_from: Tensor,
    own_row: Tensor,
    c4_base: Tensor,
    c128_base: Tensor,
    *,
    ring: int,
    out: ChunkLists,
) -> None:
    """See the door."""
    _chunk_lists[(positions.shape[0],)](
        positions,
        slots,
        last_position,
        block_table,
        block_table.stride(0),
        fresh_from,
        write_from,
        own_row,
        c4_base,
        c128_base,
        out.window_index,
        out.window_write,
        out.c4_index,
        out.c4_len,
        out.c4_reach,
        out.c4_write,
        out.c128_index,
        out.c128_len,
        out.c128_write,
        ring,
        out.top_k,
        out.c4_index.shape[1],
        out.c128_index.shape[1],
        BLOCK=BLOCK,
        num_warps=4,
    )
