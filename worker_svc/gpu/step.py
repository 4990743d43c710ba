"""What all layers of one forward share: positions, index lists, and how keys are laid out for attention.

A decode step has one token per row and reads keys from the pools; everything about it lives on the device, so a graph
can replay it. A chunk step has any number of tokens per row, known to the host, and reads keys from a BF16 workspace:
per row the window before the chunk and the chunk's own keys, behind all rows the compressed entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_svc import tuning
from worker_svc.gpu.pools import GpuPools
from worker_svc.gpu.send import send
from worker_svc.ops import invariant
from worker_svc.ops.index_scores import ScorePlan
from worker_svc.ops.slot_step import Field
from worker_svc.ops.sparse_attention import DecodePlan, decode_plans
from worker_svc.ops.step_lists import ChunkLists, DecodeLists, chunk_lists, decode_lists

Ints = npt.NDArray[np.int32]
JOINED_ROWS = 8
"""Up to so many rows attention, inverse rope and quantisation are two launches of ours; above, the library's kernel.
Deterministic mode never joins them: chunks cannot. `tuning` measures it anew."""


def joined(rows: int, *, on_gpu: bool) -> bool:
    """True if a decode step of so many rows runs our joined attention."""
    return not invariant.on() and rows <= (
        tuning.value("attention.joined_rows", JOINED_ROWS) if on_gpu else JOINED_ROWS
    )


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
    plans: dict[int, DecodePlan]  # by compression ratio; empty where attention is `joined`, and nobody asks
    score_plan: ScorePlan


def decode_step(
    ids: Tensor, slots: Tensor, positions: Tensor, tables: SlotTables, pools: GpuPools, lists: DecodeLists
) -> DecodeStep:
    """Fill the lists for these rows and describe the step."""
    decode_lists(positions, slots, tables.pages, tables.fresh_from, tables.write_from, ring=pools.ring, out=lists)
    plans: dict[int, DecodePlan] = {}
    if not joined(len(ids), on_gpu=ids.is_cuda):
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
    ids: Ints | Tensor, rows: Sequence[ChunkRow], sampled: Sequence[int], tables: SlotTables, pools: GpuPools
) -> ChunkStep:
    """Lay the batch out. `ids` may be on the device already; `sampled` are batch tokens. The rows' pages must be in
    `tables`. Everything that the host knows goes to the device in one copy."""
    lengths = [row.length for row in rows]
    offsets, tokens = _before(lengths)
    olds = [row.start - max(row.fresh_from, row.start - pools.layout.window, 0) for row in rows]
    bases, first = _before([old + length for old, length in zip(olds, lengths)])  # of a row's first window key
    own = [base + old for base, old in zip(bases, olds)]  # of its first token's key
    positions = _runs([row.start for row in rows], lengths)
    areas, size = _areas(rows, lengths, first, pools)
    saves = [
        _host_save(row, offsets[n], own[n], olds[n], pos, tail, pools)
        for n, row in enumerate(rows)
        for pos, tail in row.saves
    ]
    sent = iter(
        send(
            pools.device,
            *([] if isinstance(ids, Tensor) else [ids]),
            *(_each([row.slot for row in rows], lengths), positions, _each(offsets, lengths), _runs(own, lengths)),
            *(_each([row.end - 1 for row in rows], lengths), sampled),
            *(_old_rows(rows, olds, pools), _runs(bases, olds)),
            *(column for area in areas.values() for column in (area.pool_rows, area.base, area.key_first)),
            *(column for save in saves for column in (save.source, save.target, save.ring_rows)),
        )
    )
    token_ids = ids if isinstance(ids, Tensor) else next(sent)
    slots, at, first_token, own_rows, last_position, sampled_rows, old_ring, old_rows = islice(sent, 8)
    on_device = {
        ratio: EntryArea(next(sent), first, next(sent), next(sent), area.most) for ratio, area in areas.items()
    }
    saved = [(WindowSave(next(sent), next(sent)), _state_save(save, next(sent), pools)) for save in saves]
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
        areas=on_device,
        visible=(positions + 1) // 4,
        workspace_rows=size,
        window_saves=tuple(window for window, _ in saved),
        state_saves=tuple(state for _, state in saved),
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


def _before(counts: Sequence[int]) -> tuple[list[int], int]:
    """What lies in front of each, and all of it."""
    ends = list(accumulate(counts, initial=0))
    return ends[:-1], ends[-1]


def _each(values: Sequence[int], counts: Sequence[int]) -> Ints:
    """Every value so many times."""
    if len(values) == 1:
        return np.full(counts[0], values[0], np.int32)
    return np.repeat(np.array(values, np.int32), counts)


def _runs(starts: Sequence[int], counts: Sequence[int]) -> Ints:
    """So many numbers upwards from each start."""
    runs = [np.arange(start, start + count, dtype=np.int32) for start, count in zip(starts, counts)]
    return runs[0] if len(runs) == 1 else np.concatenate(runs)


@dataclass(frozen=True, slots=True)
class _HostArea:
    """An EntryArea before it is sent."""

    pool_rows: Ints
    base: Ints
    key_first: Ints
    most: int


def _areas(
    rows: Sequence[ChunkRow], lengths: Sequence[int], first: int, pools: GpuPools
) -> tuple[dict[int, _HostArea], int]:
    """Entries lie behind the window rows; layers of different ratios use the same place one after the other. Also the
    rows of the whole workspace."""
    areas, size = {}, first
    for ratio in sorted(set(pools.layout.ratios) - {0}):
        found = [entry_rows(row, ratio) for row in rows]
        counts = [len(one) for one in found]
        before, every = _before(counts)
        key_first = _each(before, lengths)
        areas[ratio] = _HostArea(np.concatenate(found), key_first + np.int32(first), key_first, max(counts))
        size = max(size, first + every)
    return areas, size


def entry_rows(row: ChunkRow, ratio: int) -> Ints:
    """Pool rows of all entries that the row sees at its end."""
    per_page, count = 256 // ratio, row.end // ratio
    pages = np.asarray(row.pages[: -(-count // per_page)], np.int32)
    assert len(pages) * per_page >= count, "a row has pages for all of its entries"
    every: Ints = np.add.outer(pages * per_page, np.arange(per_page, dtype=np.int32)).reshape(-1)
    return every[:count]


def _old_rows(rows: Sequence[ChunkRow], olds: Sequence[int], pools: GpuPools) -> Ints:
    """Ring rows of the window before each chunk."""
    return np.concatenate(
        [
            row.slot * pools.ring + np.arange(row.start - old, row.start, dtype=np.int32) % pools.ring
            for row, old in zip(rows, olds)
        ]
    )


@dataclass(frozen=True, slots=True)
class _HostSave:
    """A WindowSave and a StateSave before they are sent."""

    tail: int
    source: Ints
    target: Ints
    ring_rows: Ints
    last_token: int


def _host_save(row: ChunkRow, offset: int, own: int, old: int, pos: int, tail: int, pools: GpuPools) -> _HostSave:
    """`offset` is the batch token, `own` the workspace row of the chunk's first token, behind `old` window keys."""
    window, carried, ring = pools.layout.window, pools.carries.shape[2], pools.layout.state_ring(4)
    first = own + pos - window - row.start
    assert first >= own - old, "a tail needs a whole window before it"
    before = np.arange(pos - carried, max(pos - carried, row.start), dtype=np.int32)
    return _HostSave(
        tail=tail,
        source=np.arange(first, first + window, dtype=np.int32),
        target=np.arange(tail * window, (tail + 1) * window, dtype=np.int32),
        ring_rows=row.slot * ring + before % ring,
        last_token=offset + pos - 1 - row.start,
    )


def _state_save(save: _HostSave, ring_rows: Tensor, pools: GpuPools) -> StateSave:
    carried, before, end = pools.carries.shape[2], len(save.ring_rows), save.last_token + 1
    return StateSave(
        tail=save.tail,
        ring_rows=ring_rows,
        tokens=slice(end - carried + before, end),
        places=slice(before, carried),
        last_token=save.last_token,
    )
