"""Step lists in plain torch, whole batch at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from worker_svc.ops.step_lists import ChunkLists, DecodeLists

WINDOW = 128
ENTRIES_PER_PAGE = {4: 64, 128: 2}


def decode_lists(
    positions: Tensor,
    slots: Tensor,
    block_table: Tensor,
    fresh_from: Tensor,
    write_from: Tensor,
    ring: int,
    out: DecodeLists,
) -> None:
    """See the door."""
    live, safe_slots = positions >= 0, slots.clamp(min=0).long()
    first, count = _window(positions, fresh_from[safe_slots])
    place = torch.arange(WINDOW, dtype=torch.int32)
    rows = slots.unsqueeze(1) * ring + (first.unsqueeze(1) + place) % ring
    out.window_rows.copy_(torch.where(place < count.unsqueeze(1), rows, -1))
    out.window_len.copy_(count)
    out.window_write.copy_(torch.where(live, slots * ring + positions % ring, -1))
    for ratio, length, write, listed in (
        (4, out.c4_len, out.c4_write, out.c4_rows),
        (128, out.c128_len, out.c128_write, out.c128_rows),
    ):
        visible = (positions + 1) // ratio
        length.copy_(visible)
        write.copy_(_written(positions, safe_slots, block_table, write_from, ratio))
        entry = torch.arange(listed.shape[1], dtype=torch.int32).expand_as(listed)
        taken = entry < visible.unsqueeze(1)
        if ratio == 4:
            taken = taken & (visible <= listed.shape[1]).unsqueeze(1)
            out.top_len.copy_(visible.clamp(max=listed.shape[1]))
            out.scored.copy_(visible.clamp(min=1))
            _copy_pages(block_table[safe_slots], visible, out.pages)
        listed.copy_(torch.where(taken, entry_rows(block_table, safe_slots, entry, ratio), -1))


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
    ring: int,
    out: ChunkLists,
) -> None:
    """See the door."""
    live, safe_slots = positions >= 0, slots.clamp(min=0).long()
    first, count = _window(positions, fresh_from[safe_slots])
    place = torch.arange(WINDOW, dtype=torch.int32)
    rows = (own_row - positions + first).unsqueeze(1) + place
    window = torch.where(place < count.unsqueeze(1), rows, -1)
    out.window_index.copy_(window)
    kept = live & (positions > last_position - ring)
    out.window_write.copy_(torch.where(kept, slots * ring + positions % ring, -1))
    for ratio, write, listed, base in (
        (4, out.c4_write, out.c4_index, c4_base),
        (128, out.c128_write, out.c128_index, c128_base),
    ):
        visible = (positions + 1) // ratio
        write.copy_(_written(positions, safe_slots, block_table, write_from, ratio))
        entry = torch.arange(listed.shape[1] - WINDOW, dtype=torch.int32).expand(listed.shape[0], -1)
        taken = entry < visible.unsqueeze(1)
        if ratio == 4:
            taken = taken & (visible <= out.top_k).unsqueeze(1)
            out.c4_len.copy_(visible)
            out.c4_reach.copy_(torch.where(live, WINDOW + visible.clamp(max=out.top_k), 0))
        else:
            out.c128_len.copy_(torch.where(live, WINDOW + visible, 0))
        listed[:, :WINDOW] = window
        listed[:, WINDOW:] = torch.where(taken, base.unsqueeze(1) + entry, -1)


def _copy_pages(table: Tensor, visible: Tensor, pages: Tensor) -> None:
    """The first ceil(visible / 64) columns of `table` [T, n] into `pages`; the rest stays."""
    width = min(table.shape[1], pages.shape[1])
    kept = torch.arange(width) < -(-visible // 64).unsqueeze(1)
    pages[:, :width] = torch.where(kept, table[:, :width], pages[:, :width])


def entry_rows(block_table: Tensor, slots: Tensor, entry: Tensor, ratio: int) -> Tensor:
    """Pool rows int32 [T, n] of entries [T, n] of the sequences in slots [T]."""
    per_page = ENTRIES_PER_PAGE[ratio]
    page = (entry // per_page).clamp(max=block_table.shape[1] - 1).long()
    return block_table[slots].gather(1, page) * per_page + entry % per_page


def _window(positions: Tensor, fresh_from: Tensor) -> tuple[Tensor, Tensor]:
    """First position and number of window keys of each token."""
    first = torch.maximum(positions - (WINDOW - 1), fresh_from.clamp(min=0))
    return first, torch.where(positions >= 0, positions - first + 1, 0)


def _written(positions: Tensor, slots: Tensor, block_table: Tensor, write_from: Tensor, ratio: int) -> Tensor:
    entry = positions.clamp(min=0) // ratio
    closes = (positions >= 0) & ((positions + 1) % ratio == 0) & (entry >= write_from[slots] // ratio)
    return torch.where(closes, entry_rows(block_table, slots, entry.unsqueeze(1), ratio)[:, 0], -1)
