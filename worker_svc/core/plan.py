"""Turn one StepFrame into executor work: check it, apply its operations in the documented order, describe its rows.

Works while earlier frames are under way: a decode row takes its token and its length from the device, pages are checked
for the length it can have at most. Every mistake a peer can make raises FrameError; the caller then drops the slots
this frame touched. Sampling results are booked in `book`.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from meshkit.frames import SlotInit, StepFrame
from meshkit.types import PAGE_TOKENS, SamplingParams
from worker_svc.core.table import LAST_IDS, FrameError, Slot, SlotTable
from worker_svc.core.work import CopyWork, RowWork, StepWork, TailWork
from worker_svc.core.work import SlotInit as InitWork

MAX_GEN = (1 << 63) - 1
ID_BYTES = 16


@dataclass(slots=True)
class PlannedRow:
    """One row of the frame. `work` is None for a slot known to have finished: the row is skipped."""

    slot: Slot
    work: RowWork | None
    spare: int = -1  # the slot's spare in this frame
    spare_saved: int = 0  # position at which the forward saves this slot's spare, 0 = not


@dataclass(slots=True)
class Prepared:
    """A checked frame, ready to run."""

    frame: StepFrame
    work: StepWork
    rows: list[PlannedRow] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing for the device in it."""
        work = self.work
        return not (work.rows or work.inits or work.copies or work.tail_loads or work.saves)


@dataclass(frozen=True, slots=True)
class _Chunk:
    start: int
    ids: tuple[int, ...]
    write_from: int
    sample: bool


def touched_slots(frame: StepFrame) -> list[int]:
    """Slots whose device state is unknown if this frame fails: chunks, inits, copies and loads."""
    rows = [int(frame.slots[row]) for row in frame.chunk_rows.tolist() if 0 <= row < len(frame.slots)]
    rows += [init.slot for init in frame.inits]
    rows += [copy.dst for copy in frame.copies]
    rows += [load.slot for load in frame.tail_loads]
    return list(dict.fromkeys(rows))


def named_slots(frame: StepFrame) -> list[int]:
    """All slots that a frame has rows of or touches: unknown if what came back makes no sense."""
    return list(dict.fromkeys([*frame.slots.tolist(), *touched_slots(frame)]))


def must_wait(table: SlotTable, frame: StepFrame) -> bool:
    """Whether this frame can only be checked once those under way are booked: it needs to know where a slot stands."""
    if not len(frame.chunk_rows) and not frame.copies:
        return False
    freed = {free.slot for free in frame.frees}
    numbers = [int(frame.slots[row]) for row in frame.chunk_rows.tolist() if 0 <= row < len(frame.slots)]
    numbers += [copy.src for copy in frame.copies]
    return any(n in table.slots and table.slots[n].sampling and n not in freed for n in numbers)


def highest_gen(frame: StepFrame) -> int:
    """The largest slot or page generation a frame mints."""
    return max([init.slot_gen for init in frame.inits] + [entry.page_gen for entry in frame.publishes], default=0)


def prepare(table: SlotTable, frame: StepFrame) -> Prepared:
    """Apply everything before the forward and describe the forward. Raises FrameError."""
    chunks = _chunks(table, frame)
    _retire(table, frame)
    for free in frame.frees:
        table.free(free.slot, free.slot_gen)
    table.check_unused(frame.retire_pages)
    inits = tuple(_init(table, init) for init in frame.inits)
    for spare in frame.spares:
        slot = table.slot(spare.slot, "spare.slot")
        table.check_writable_tail(spare.tail, "spare.tail")
        slot.spare, slot.spare_pos, slot.decode = spare.tail, 0, None
    copies = tuple(_copy(table, *copy) for copy in frame.copies)
    for append in frame.appends:
        table.append(table.slot(append.slot, "page_append.slot"), append.page)
    loads = tuple(_load(table, load.slot, load.tail, chunks) for load in frame.tail_loads)
    rows = _rows(table, frame, chunks)
    saves = [_save(table, save.slot, save.pos, save.tail, chunks) for save in frame.tail_saves]
    saves += [TailWork(row.slot.slot, row.spare_saved, row.slot.spare) for row in rows if row.spare_saved]
    work = StepWork(
        inits=inits,
        copies=copies,
        tail_loads=loads,
        rows=tuple(row.work for row in rows if row.work is not None),
        saves=tuple(saves),
    )
    return Prepared(frame, work, rows)


def publish(table: SlotTable, frame: StepFrame) -> None:
    """The last operations of a frame. Raises FrameError.

    Announced when it is launched, so that the frames behind it can be checked; in force once it is booked.
    """
    for entry in frame.publishes:
        table.publish(entry)
    for tail in frame.publish_tails:
        table.publish_tail(tail.tail, tail.page)


def _chunks(table: SlotTable, frame: StepFrame) -> dict[int, _Chunk]:
    """Chunks by slot, with every column and id checked."""
    rows, count = len(frame.slots), len(frame.chunk_rows)
    columns = (frame.chunk_starts, frame.chunk_lens, frame.chunk_write_froms, frame.chunk_samples)
    if any(len(column) != count for column in columns):
        raise FrameError("columns", f"chunk columns differ in length from chunk_rows ({count})")
    _check_ranks(table, frame)
    slots = frame.slots.tolist()
    if len(set(slots)) != rows:
        raise FrameError("columns", "a slot stands twice in slots")
    lens = frame.chunk_lens.tolist()
    if any(length < 1 for length in lens) or sum(lens) != len(frame.chunk_ids):
        raise FrameError("columns", f"chunk_lens must be >= 1 and sum to the {len(frame.chunk_ids)} chunk_ids")
    if sum(lens) + rows - count > table.pools.max_step_tokens:
        raise FrameError("too_many_tokens", f"{sum(lens) + rows - count} tokens; {table.pools.max_step_tokens} fit")
    ids = frame.chunk_ids.tolist()
    if ids and not (min(ids) >= 0 and max(ids) < table.model.vocab_size):
        raise FrameError("out_of_range", f"chunk_ids must lie in 0..{table.model.vocab_size - 1}")
    chunks: dict[int, _Chunk] = {}
    at = 0
    for index, row in enumerate(frame.chunk_rows.tolist()):
        if not 0 <= row < rows or slots[row] in chunks:
            raise FrameError("columns", f"chunk_rows[{index}] is {row}; rows are 0..{rows - 1}, each once")
        start, write_from = int(frame.chunk_starts[index]), int(frame.chunk_write_froms[index])
        if start < 0 or write_from < 0:
            raise FrameError("columns", f"chunk {index} starts at {start} and writes from {write_from}")
        chunks[slots[row]] = _Chunk(
            start, tuple(ids[at : at + lens[index]]), write_from, bool(frame.chunk_samples[index])
        )
        at += lens[index]
    return chunks


def _check_ranks(table: SlotTable, frame: StepFrame) -> None:
    ranks, per_rank, count = table.pools.ranks, table.pools.slots, len(frame.slots)
    offsets = frame.rank_off.tolist()
    if not offsets and (ranks == 1 or count == 0):
        return
    if len(offsets) != ranks + 1 or offsets[0] != 0 or offsets[-1] != count or offsets != sorted(offsets):
        raise FrameError("columns", f"rank_off must rise from 0 to {count} in {ranks + 1} numbers")
    for rank in range(ranks if ranks > 1 else 0):
        part = frame.slots[offsets[rank] : offsets[rank + 1]]
        if np.any(part // per_rank != rank):
            raise FrameError("columns", f"rank_off gives rank {rank} a slot of another rank")


def _retire(table: SlotTable, frame: StepFrame) -> None:
    for page in frame.retire_pages:
        table.retire(page)
    for tail in frame.retire_tails:
        table.retire_tail(tail)


def _stops(table: SlotTable, params: SamplingParams) -> frozenset[int]:
    return frozenset(params.stop_ids if params.ignore_eos else (*params.stop_ids, *table.model.eos_ids))


def _init(table: SlotTable, init: SlotInit) -> InitWork:
    if not 0 < init.slot_gen <= MAX_GEN or init.start < 0 or init.n_emitted < 0 or init.params.max_tokens < 1:
        raise FrameError("bad_init", f"slot_init of slot {init.slot}: gen, start, n_emitted or max_tokens out of range")
    if init.grammar_id and not (len(init.grammar_id) == ID_BYTES and len(init.emitted) == init.n_emitted):
        raise FrameError(
            "bad_init",
            f"slot_init of slot {init.slot}: a grammar needs {ID_BYTES} bytes of id ({len(init.grammar_id)} came) and "
            f"all {init.n_emitted} emitted ids ({len(init.emitted)} came)",
        )
    table.add(
        Slot(
            slot=init.slot,
            gen=init.slot_gen,
            request_id=init.request_id,
            attempt=init.attempt,
            choice=init.choice,
            params=init.params,
            stops=_stops(table, init.params),
            grammar_id=init.grammar_id,
            length=init.start,
            fed=init.start,
            n_emitted=init.n_emitted,
            last_ids=deque(init.emitted, maxlen=LAST_IDS),
            pages=[],
            fresh_from=init.start,
        )
    )
    return InitWork(
        slot=init.slot,
        slot_gen=init.slot_gen,
        params=init.params,
        seed=init.seed,
        choice=init.choice,
        n_emitted=init.n_emitted,
        start=init.start,
        stops=table.slots[init.slot].stops,
        emitted=init.emitted,
        prompt=init.prompt,
        grammar_id=init.grammar_id,
        thinking=init.thinking,
    )


def _copy(table: SlotTable, src: int, dst: int, src_page: int, dst_page: int) -> CopyWork:
    source, target = table.slot(src, "slot_copy.src"), table.slot(dst, "slot_copy.dst")
    if source is target or source.finished or target.pages:
        raise FrameError("bad_copy", f"slot_copy {src} -> {dst}: dst must be a fresh slot, src a running one")
    index = source.fed // PAGE_TOKENS
    partial = source.pages[index] if source.fed % PAGE_TOKENS and index < len(source.pages) else -1
    if src_page != partial or (src_page < 0) != (dst_page < 0):
        raise FrameError("bad_copy", f"slot_copy {src} -> {dst} names pages {src_page}, {dst_page}; partial: {partial}")
    if dst_page >= 0:
        table.check_range(dst_page, table.pools.pages, "slot_copy.dst_page")
        if table.is_published(dst_page):
            raise FrameError("page_published", f"slot_copy would write into published page {dst_page}")
    target.length = target.fed = source.fed
    target.fresh_from = source.fresh_from
    return CopyWork(src, dst, src_page, dst_page)


def _load(table: SlotTable, number: int, tail: int, chunks: dict[int, _Chunk]) -> TailWork:
    slot = table.slot(number, "tail_load.slot")
    table.check_range(tail, table.pools.tails, "tail_load.tail")
    chunk = chunks.get(number)
    if chunk is None or chunk.start % PAGE_TOKENS or not chunk.start:
        raise FrameError("bad_load", f"tail_load into slot {number} needs a chunk that starts at a page boundary")
    slot.fresh_from = 0
    return TailWork(number, chunk.start, tail)


def _save(table: SlotTable, number: int, pos: int, tail: int, chunks: dict[int, _Chunk]) -> TailWork:
    table.slot(number, "tail_save.slot")
    table.check_writable_tail(tail, "tail_save.tail")
    chunk = chunks.get(number)
    if chunk is None or pos % PAGE_TOKENS or not chunk.start < pos <= chunk.start + len(chunk.ids):
        raise FrameError("bad_save", f"tail_save of slot {number} at {pos} is no page boundary inside its chunk")
    return TailWork(number, pos, tail)


def _rows(table: SlotTable, frame: StepFrame, chunks: dict[int, _Chunk]) -> list[PlannedRow]:
    rows = []
    for number in frame.slots.tolist():
        slot = table.slot(number, "slots")
        chunk = chunks.get(number)
        row = _decode_row(table, slot) if chunk is None else _chunk_row(table, slot, chunk)
        if row.work is not None:
            slot.sampling += row.work.sample_last
        rows.append(row)
    return rows


def _decode_row(table: SlotTable, slot: Slot) -> PlannedRow:
    if slot.finished:
        return PlannedRow(slot, None)
    if slot.next < 0 and not slot.sampling:
        raise FrameError("not_ready", f"slot {slot.slot} has no next token: its prompt is not through")
    least = slot.fed - slot.sampling  # where it feeds if every step under way parks it
    slot.fed += 1
    _check_pages(slot, slot.fed)
    table.check_writable(slot, least, slot.fed)
    if slot.decode is None:
        slot.decode = RowWork(slot=slot.slot, pages=slot.pages, fresh_from=slot.fresh_from, spare=slot.spare)
    return PlannedRow(slot, slot.decode, slot.spare)


def _chunk_row(table: SlotTable, slot: Slot, chunk: _Chunk) -> PlannedRow:
    end = chunk.start + len(chunk.ids)
    if slot.finished or chunk.start != slot.fed:
        raise FrameError("bad_start", f"chunk of slot {slot.slot} starts at {chunk.start}; its length is {slot.fed}")
    if slot.next >= 0 and chunk.ids[0] != slot.next:
        raise FrameError("bad_chunk", f"chunk of slot {slot.slot} feeds {chunk.ids[0]}; its next token is {slot.next}")
    _check_pages(slot, end)
    if chunk.write_from < end:
        table.check_writable(slot, max(chunk.start, chunk.write_from), end)
    slot.fed, slot.decode = end, None
    work = RowWork(
        slot=slot.slot,
        start=chunk.start,
        ids=chunk.ids,
        pages=slot.pages,
        write_from=chunk.write_from,
        fresh_from=slot.fresh_from,
        sample_last=int(chunk.sample),
        out_pos=slot.n_emitted,
        spare=slot.spare,
    )
    # What the forward may save: positions that are committed whatever sampling does (a parked chunk gives up its last).
    certain = (end - int(chunk.sample)) // PAGE_TOKENS * PAGE_TOKENS
    return PlannedRow(slot, work, slot.spare, certain if slot.spare >= 0 and certain > chunk.start else 0)


def _check_pages(slot: Slot, end: int) -> None:
    if end > len(slot.pages) * PAGE_TOKENS:
        raise FrameError("no_page", f"slot {slot.slot} needs {end} tokens, its {len(slot.pages)} pages hold fewer")
