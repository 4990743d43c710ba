"""What all layers of one forward share: positions, index lists, and how keys are laid out for attention.

A decode step has one token per row and reads keys from the pools; everything about it lives on the device, so a graph
can replay it. A chunk step has any number of tokens per row, known to the host, and reads keys from a BF16 workspace:
per row the window before the chunk and the chunk's own keys, behind all rows the compressed entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_svc.gpu.pools import GpuPools
from worker_svc.gpu.send import send
from worker_svc.ops import invariant
from worker_svc.ops.index_scores import ScorePlan
from worker_svc.ops.slot_step import Field
from worker_svc.ops.sparse_attention import DecodePlan, decode_plans
from worker_svc.ops.step_lists import ChunkLists, DecodeLists, chunk_lists, decode_lists

Ints = npt.NDArray[np.int64]
JOINED_ROWS = 8
"""Up to so many rows attention, inverse rope and quantisation are two launches of ours; above, the library's kernel.
Deterministic mode never joins them: chunks cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTables:
    """Device memory that outlives a step: fields of every slot (see ops.slot_step) and its pages in order."""

    fields: Tensor  # int32 [FIELDS, slots + 1]
    pages: Tensor  # int32 [slots + 1, pages per sequence]

    @property
    def fresh_from(self) -> Tensor:
        """Window keys below do not exist."""
        return self.fields[Field.FRESH_FROM]

    @property
    def write_from(self) -> Tensor:
        """Entries below are read from retained pages, not written."""
        return self.fields[Field.WRITE_FROM]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """One token per row; all int32 [B] on the device. Padding and ended rows stand at position -1."""

    ids: Tensor
    slots: Tensor
    positions: Tensor
    first_token: Tensor  # each is its own row: 0 .. B - 1
    sampled: Tensor  # tokens whose logits are wanted: all of them
    lists: DecodeLists
    tables: SlotTables
    most_entries: int  # C4 entries of the longest sequence that may come
    plans: dict[int, DecodePlan]  # by compression ratio; empty where `JOINED_ROWS` says that nobody asks
    score_plan: ScorePlan


def decode_step(
    ids: Tensor, slots: Tensor, positions: Tensor, tables: SlotTables, pools: GpuPools, lists: DecodeLists
) -> DecodeStep:
    """Fill the lists for these rows and describe the step."""
    decode_lists(positions, slots, tables.pages, tables.fresh_from, tables.write_from, ring=pools.ring, out=lists)
    plans: dict[int, DecodePlan] = {}
    if len(ids) > JOINED_ROWS or invariant.on():
        heads = pools.layout.config.num_attention_heads
        plans = decode_plans(lists.window_len, lists.top_len, lists.c128_len, heads)
    return DecodeStep(
        ids=ids,
        slots=slots,
        positions=positions,
        first_token=lists.every,
        sampled=lists.every,
        lists=lists,
        plans=plans,
        score_plan=ScorePlan(lists.scored, lists.pages),
        tables=tables,
        most_entries=tables.pages.shape[1] * 64,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRow:
    """One row of a chunk step, as the host knows it. `saves` are (position, tail) with start < position <= end."""

    slot: int
    start: int
    length: int
    pages: Sequence[int]
    fresh_from: int = 0
    saves: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class WindowSave:
    """Window rows before a boundary, to keep in a tail: workspace rows and rows of the tail pool, int32 [128] each."""

    source: Tensor
    target: Tensor


@dataclass(frozen=True, slots=True)
class StateSave:
    """The C4 states before a boundary: ring rows [o] of those before the chunk, then a slice of the batch's tokens."""

    tail: int
    ring_rows: Tensor
    tokens: slice
    places: slice  # of the tail's four, that the tokens fill
    last_token: int  # the token before the boundary


@dataclass(frozen=True, slots=True)
class EntryArea:
    """Where the entries of one ratio are in the workspace, and in the pool: rows int32 [n] each, all sequences."""

    pool_rows: Tensor
    first_row: int
    base: Tensor  # int32 [T]: workspace row of entry 0 of the token's sequence
    key_first: Tensor  # int32 [T]: the same counted from the area's first row
    most: int  # entries of the longest sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkStep:
    """Tokens of all rows one after the other; ids, slots and positions int32 [T]."""

    ids: Tensor
    slots: Tensor
    positions: Tensor
    first_token: Tensor  # int32 [T]: batch token at which the token's row begins
    last_position: Tensor  # int32 [T]: position at which it ends
    sampled: Tensor
    lists: ChunkLists
    own_rows: Tensor  # int32 [T]: workspace row of each token's own key
    old_ring_rows: Tensor  # ring rows of the keys before each chunk, and where they go in the workspace
    old_rows: Tensor
    areas: dict[int, EntryArea]
    visible: Ints  # [T] on the host: C4 entries that each token sees
    workspace_rows: int
    window_saves: tuple[WindowSave, ...]
    state_saves: tuple[StateSave, ...]
    tables: SlotTables


def chunk_step(
    ids: Ints, rows: Sequence[ChunkRow], sampled: Sequence[int], tables: SlotTables, pools: GpuPools
) -> ChunkStep:
    """Lay the batch out. `sampled` are batch tokens. The rows' pages must be in `tables` already."""
    starts, lengths = np.array([row.start for row in rows]), np.array([row.length for row in rows])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = int(offsets[-1])
    of_row = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(tokens) - offsets[of_row] + starts[of_row]
    olds = np.array([row.start - max(row.fresh_from, row.start - pools.layout.window, 0) for row in rows])
    bases = np.concatenate([[0], np.cumsum(olds + lengths)])  # first window row of each row in the workspace
    own = bases[of_row] + olds[of_row] + np.arange(tokens) - offsets[of_row]
    areas, size = _areas(rows, of_row, int(bases[-1]), pools)
    columns = send(
        pools.device,
        *(ids, np.array([row.slot for row in rows])[of_row], positions, offsets[of_row], own),
        *((starts + lengths - 1)[of_row], np.array(sampled), *_old_rows(rows, olds, bases, pools)),
    )
    token_ids, slots, at, first_token, own_rows, last_position, sampled_rows, old_ring, old_rows = columns
    saves = [(row, number, pos, tail) for number, row in enumerate(rows) for pos, tail in row.saves]
    step = ChunkStep(
        ids=token_ids,
        slots=slots,
        positions=at,
        first_token=first_token,
        last_position=last_position,
        sampled=sampled_rows,
        lists=ChunkLists.allocate(
            tokens, max(row.end for row in rows), pools.device, top_k=pools.layout.config.index_topk
        ),
        own_rows=own_rows,
        old_ring_rows=old_ring,
        old_rows=old_rows,
        areas={ratio: _on_device(area, pools.device) for ratio, area in areas.items()},
        visible=(positions + 1) // 4,
        workspace_rows=size,
        window_saves=tuple(
            _window_save(row, int(bases[n] + olds[n]), pos, tail, int(olds[n]), pools) for row, n, pos, tail in saves
        ),
        state_saves=tuple(_state_save(row, int(offsets[n]), pos, tail, pools) for row, n, pos, tail in saves),
        tables=tables,
    )
    fill_chunk_lists(step, pools)
    return step


def fill_chunk_lists(step: ChunkStep, pools: GpuPools) -> None:
    """The step's lists from its other tensors."""
    tables = step.tables
    chunk_lists(
        *(step.positions, step.slots, step.last_position, tables.pages, tables.fresh_from, tables.write_from),
        step.own_rows,
        *(step.areas[ratio].base if ratio in step.areas else torch.zeros_like(step.slots) for ratio in (4, 128)),
        ring=pools.ring,
        out=step.lists,
    )


@dataclass(frozen=True, slots=True)
class _HostArea:
    """An EntryArea before it is sent."""

    pool_rows: Ints
    first_row: int
    base: Ints
    key_first: Ints
    most: int


def _on_device(area: _HostArea, device: torch.device) -> EntryArea:
    pool_rows, base, key_first = send(device, area.pool_rows, area.base, area.key_first)
    return EntryArea(pool_rows, area.first_row, base, key_first, area.most)


def _areas(rows: Sequence[ChunkRow], of_row: Ints, first: int, pools: GpuPools) -> tuple[dict[int, _HostArea], int]:
    """Entries lie behind the window rows; layers of different ratios use the same place one after the other."""
    areas, size = {}, first
    for ratio in sorted(set(pools.layout.ratios) - {0}):
        pool_rows = [entry_rows(row, ratio) for row in rows]
        counts = np.array([len(found) for found in pool_rows])
        before = np.concatenate([[0], np.cumsum(counts)])
        base = before[of_row]
        areas[ratio] = _HostArea(np.concatenate(pool_rows), first, first + base, base, int(counts.max()))
        size = max(size, first + int(before[-1]))
    return areas, size


def entry_rows(row: ChunkRow, ratio: int) -> Ints:
    """Pool rows of all entries that the row sees at its end."""
    per_page, entry = 256 // ratio, np.arange(row.end // ratio)
    found: Ints = np.asarray(row.pages, np.int64)[entry // per_page] * per_page + entry % per_page
    return found


def _old_rows(rows: Sequence[ChunkRow], olds: Ints, bases: Ints, pools: GpuPools) -> tuple[Ints, Ints]:
    """Ring rows of the window before each chunk, and their workspace rows."""
    ring = [
        row.slot * pools.ring + np.arange(row.start - old, row.start) % pools.ring
        for row, old in zip(rows, olds.tolist())
    ]
    places = [np.arange(base, base + old) for base, old in zip(bases.tolist(), olds.tolist())]
    return np.concatenate(ring), np.concatenate(places)


def _window_save(row: ChunkRow, own: int, pos: int, tail: int, old: int, pools: GpuPools) -> WindowSave:
    """`own` is the workspace row of the chunk's first token."""
    window, device = pools.layout.window, pools.device
    first = own + pos - window - row.start
    assert first >= own - old, "a tail needs a whole window before it"
    source = torch.arange(first, first + window, dtype=torch.int32, device=device)
    return WindowSave(source, torch.arange(tail * window, (tail + 1) * window, dtype=torch.int32, device=device))


def _state_save(row: ChunkRow, offset: int, pos: int, tail: int, pools: GpuPools) -> StateSave:
    carried = pools.carries.shape[2]
    before = max(0, row.start - (pos - carried))
    ring = pools.layout.state_ring(4)
    old = [row.slot * ring + position % ring for position in range(pos - carried, pos - carried + before)]
    last = offset + pos - 1 - row.start
    return StateSave(
        tail=tail,
        ring_rows=torch.tensor(old, dtype=torch.int64, device=pools.device),
        tokens=slice(last + 1 - carried + before, last + 1),
        places=slice(before, carried),
        last_token=last,
    )
