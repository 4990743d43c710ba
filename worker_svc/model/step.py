"""What one forward is asked to do, and the index arithmetic that all its layers share.

`ForwardInputs` is the batch: the ids of all rows in one tensor and, for each row, where it sits. `plan_rows` turns a
row into ring, page and mask indices once per step, so that the layers only gather and scatter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshkit.types import PAGE_TOKENS
from worker_svc.kv.layout import C4_CARRY
from worker_svc.kv.pools import KvPools
from worker_svc.model.rope import RopeTable, Turns
from worker_svc.ops.sparse_attention import KEY_BLOCK

QUERY_TILE = 128
"""Queries of one row that share one key set: bounds the memory of the scores and the keys that are masked away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence's share of the batch: `length` tokens at positions start.. of `slot`.

    Positions below write_from write nothing to pages; window keys and states below fresh_from do not exist.
    `saves` are (position, tail) with start < position <= start + length.
    """

    slot: int
    start: int
    length: int
    pages: Sequence[int]
    write_from: int = 0
    fresh_from: int = 0
    num_samples: int = 1
    saves: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """A batch: ids int64 [S] of all rows one after the other, and the rows."""

    ids: Tensor
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class EntryPlan:
    """Compressed entries of one row in the layers of one ratio."""

    ratio: int
    visible: Tensor  # [T] int64: entries that each query sees
    read_rows: Tensor  # [n] page rows of entries 0..n-1, n as the last query sees them
    first_new: int  # entries first_new.. are closed, and written, by this row
    num_new: int
    old_states: Tensor  # state ring rows of the positions before the row that new entries need
    own_states: slice  # tokens of the row whose states new entries need
    no_past: bool  # C4: entry 0 is new, whose earlier group does not exist
    kept: slice  # tokens of the row whose states go into the ring
    state_rows: Tensor  # and where


@dataclass(frozen=True, slots=True)
class Tile:
    """Up to QUERY_TILE queries of a row and the window keys they share.

    `keys` is a slice of the row's window rows (old ones, then the row's own); lead and trail are masked zero rows
    that align the keys to blocks by position in deterministic mode. allowed [t, lead + keys + trail]; None = all.
    """

    queries: slice
    keys: slice
    lead: int
    trail: int
    allowed: Tensor | None


@dataclass(frozen=True, slots=True)
class BoundarySave:
    """C4 states and streams at a page boundary, to keep under a tail or mark number."""

    number: int
    old_states: Tensor  # state ring rows of the carried positions that lie before the row
    own_states: slice  # tokens of the row: the rest of them
    last_token: int  # of the batch: the token before the boundary


@dataclass(frozen=True, slots=True)
class WindowSave:
    """The window before a page boundary, to keep in a tail: a slice of the row's window rows, old ones first."""

    tail: int
    keys: slice


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row's indices for this step."""

    tokens: slice  # of the batch
    start: int
    length: int
    slot: int
    old_window: Tensor  # ring rows of the window keys before the row, ascending position
    num_old: int
    kept: slice  # tokens of the row that go into the window ring
    ring_rows: Tensor  # and where
    tiles: tuple[Tile, ...]
    entries: dict[int, EntryPlan]
    boundaries: tuple[BoundarySave, ...]
    windows: tuple[WindowSave, ...]
    sampled: slice  # of the batch


@dataclass(frozen=True, slots=True)
class Step:
    """The planned batch."""

    ids: Tensor
    positions: Tensor  # [S] int64
    rows: tuple[RowPlan, ...]
    sampled: Tensor  # [n] int64 tokens whose logits are wanted
    turns: dict[RopeTable, Turns]  # of `positions`, from each rotary table of the model


def plan_step(inputs: ForwardInputs, pools: KvPools, ropes: Sequence[RopeTable], *, deterministic: bool) -> Step:
    """Plan every row of the batch."""
    plans, offset = [], 0
    ratios = sorted({layer.ratio for layer in pools.layers} - {0})
    for row in inputs.rows:
        assert row.length > 0 and 0 <= row.num_samples <= row.length, row
        assert len(row.pages) * PAGE_TOKENS >= row.start + row.length, "a row needs pages for all its tokens"
        plans.append(_plan_row(row, offset, pools, ratios, deterministic))
        offset += row.length
    assert offset == inputs.ids.shape[0], (offset, inputs.ids.shape)
    positions = torch.cat([torch.arange(plan.start, plan.start + plan.length) for plan in plans])
    sampled = torch.cat([torch.arange(plan.sampled.start, plan.sampled.stop) for plan in plans])
    return Step(inputs.ids, positions, tuple(plans), sampled, {rope: rope.at(positions) for rope in ropes})


def _plan_row(row: Row, offset: int, pools: KvPools, ratios: list[int], deterministic: bool) -> RowPlan:
    start, end = row.start, row.start + row.length
    first_old = max(row.fresh_from, start - pools.layout.window + 1, 0)
    kept = min(row.length, pools.layout.window_ring)
    boundary = end // PAGE_TOKENS * PAGE_TOKENS
    marks = ((boundary, pools.tails + row.slot),) if boundary > start else ()
    return RowPlan(
        tokens=slice(offset, offset + row.length),
        start=start,
        length=row.length,
        slot=row.slot,
        old_window=pools.ring_rows(row.slot, torch.arange(first_old, start)),
        num_old=start - first_old,
        kept=slice(row.length - kept, row.length),
        ring_rows=pools.ring_rows(row.slot, torch.arange(end - kept, end)),
        tiles=_tiles(start, row.length, first_old, pools.layout.window, deterministic),
        entries={ratio: _plan_entries(row, ratio, pools) for ratio in ratios},
        boundaries=tuple(_boundary(row, pos, number, offset, pools) for pos, number in (*row.saves, *marks)),
        windows=tuple(_window_save(row, pos, tail, first_old, pools.layout.window) for pos, tail in row.saves),
        sampled=slice(offset + row.length - row.num_samples, offset + row.length),
    )


def _boundary(row: Row, pos: int, number: int, offset: int, pools: KvPools) -> BoundarySave:
    first = pos - C4_CARRY
    assert row.start < pos <= row.start + row.length and pos % PAGE_TOKENS == 0, (row, pos)
    old = pools.state_rows(4, row.slot, torch.arange(first, max(first, row.start)))
    return BoundarySave(number, old, slice(max(0, first - row.start), pos - row.start), offset + pos - 1 - row.start)


def _window_save(row: Row, pos: int, tail: int, first_old: int, window: int) -> WindowSave:
    assert pos - window >= first_old, "a tail needs a whole window before it"
    return WindowSave(tail, slice(pos - window - first_old, pos - first_old))


def _tiles(start: int, length: int, first_old: int, window: int, deterministic: bool) -> tuple[Tile, ...]:
    tiles = []
    for begin in range(0, length, QUERY_TILE):
        stop = min(begin + QUERY_TILE, length)
        first = max(first_old, start + begin - window + 1)
        last = start + stop
        lead = first % KEY_BLOCK if deterministic else 0
        trail = -last % KEY_BLOCK if deterministic else 0
        allowed = None
        if length > 1 or deterministic:  # the last tile of a long row can hold one query
            queries = torch.arange(start + begin, start + stop).unsqueeze(1)
            keys = torch.arange(first - lead, last + trail)
            allowed = (keys <= queries) & (keys > queries - window) & (keys >= first)
        tiles.append(Tile(slice(begin, stop), slice(first - first_old, last - first_old), lead, trail, allowed))
    return tuple(tiles)


def _plan_entries(row: Row, ratio: int, pools: KvPools) -> EntryPlan:
    start, end = row.start, row.start + row.length
    rows_per_page = PAGE_TOKENS // ratio
    count = end // ratio
    pages = torch.tensor(row.pages[: -(-count // rows_per_page)], dtype=torch.int64).unsqueeze(1)
    first_new = max(start, row.write_from) // ratio
    num_new = max(0, count - first_new)
    past = C4_CARRY if ratio == 4 else 0
    first_state = ratio * first_new - past
    assert num_new == 0 or first_state >= row.fresh_from or first_state < 0, "an entry needs states that do not exist"
    kept = min(row.length, pools.layout.state_ring(ratio))
    return EntryPlan(
        ratio=ratio,
        visible=torch.arange(start + 1, end + 1) // ratio,
        read_rows=(pages * rows_per_page + torch.arange(rows_per_page)).flatten()[:count],
        first_new=first_new,
        num_new=num_new,
        old_states=pools.state_rows(ratio, row.slot, torch.arange(max(0, first_state), max(start, first_state))),
        own_states=slice(max(0, first_state - start), row.length),
        no_past=first_state < 0,
        kept=slice(row.length - kept, row.length),
        state_rows=pools.state_rows(ratio, row.slot, torch.arange(end - kept, end)),
    )
