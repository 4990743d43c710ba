"""Booking results: what the rows of a frame did to their choices, and the token rows for the gateways.

Rows are matched by the frame's record, never by id: a row whose choice has ended, moved or been preempted and placed
again no longer has the generation it was sent with and is ignored. Decode rows of lanes that just go on are booked all
at once; every other row by itself.
"""

import numpy as np

from meshkit.frames import LogprobColumns, ResultFrame, RowState
from meshkit.types import PAGE_TOKENS, FinishReason
from scheduler_svc.core import finish
from scheduler_svc.core.grammar import refresh
from scheduler_svc.core.lanes import I64, Bools
from scheduler_svc.core.outbox import Entry
from scheduler_svc.core.request import Phase, Seq
from scheduler_svc.core.state import MS, Record, Row, State, Worker, emit

_TAKES_IDS = (RowState.SAMPLED, RowState.FINISHED)


def book(st: State, worker: Worker, record: Record, result: ResultFrame) -> None:
    """Book the oldest frame in flight; the caller has checked the result's shape and taken the record out."""
    st.step = record.step
    if result.jit_compiles:
        st.fault("jit_compiles")
    else:
        worker.cost.observe(record.shape, result.t_end_ns - result.t_start_ns)
    _spares(worker, record, result)
    entries = _logprob_entries(result.logprobs)
    faults = {fault.row_index: (fault.code, fault.message) for fault in result.faults}
    ends = np.cumsum(result.counts, dtype=np.int64)
    rows = [*_book_lanes(st, worker, record, result, ends), *zip(record.rows_at.tolist(), record.rows, strict=True)]
    for i, row in rows:
        end = int(ends[i])
        ids: list[int] = result.tokens[end - int(result.counts[i]) : end].tolist()
        seq = row.seq
        if seq.gen != row.gen or seq.worker != worker.name:
            st.total("stale_rows")
            continue
        if result.states[i] == RowState.FAILED:
            _fail_row(st, seq, faults.get(i))
            continue
        _book_row(st, worker, row, int(result.states[i]), ids, entries.get(i))
        if seq.lanes is None and seq.phase is Phase.DECODE:
            worker.lanes.enter(seq, finish.stops_of(st, seq))
    for seq in list(worker.preempting):
        if not seq.flying:
            finish.settle_preempted(st, worker, seq)
    st.total("tokens", len(result.tokens))


def _book_lanes(st: State, worker: Worker, record: Record, result: ResultFrame, ends: I64) -> list[tuple[int, Row]]:
    """Book the decode rows of lanes that sampled and go on. Returns the others with their places in the frame."""
    slots, lanes = record.slots, worker.lanes
    if not len(slots):
        return []
    if record.size == len(slots):  # nothing else in the frame
        states, counts, last = result.states, result.counts, ends - 1
    else:
        at = record.slots_at
        states, counts, last = result.states[at], result.counts[at], ends[at] - 1
    sampled = (states == RowState.SAMPLED) & (counts == 1)
    if not sampled.any():
        return _one_by_one(record, ~sampled)
    tokens = result.tokens[np.maximum(last, 0)].astype(np.int64)
    plain = sampled & lanes.goes_on(slots, record.gens, tokens)
    others = [] if plain.all() else _one_by_one(record, ~plain)
    if others:
        slots, tokens = slots[plain], tokens[plain]
    bases, lengths = lanes.book(slots, tokens)
    row, row_gen, cached = lanes.names(slots)
    attach = lanes.attach[slots]
    for attach_id in st.listeners:
        mine = attach == np.uint64(attach_id)
        if mine.any() and (out := st.outbox(attach_id)) is not None:
            every = slice(None) if mine.all() else mine
            out.add_many(row[every], row_gen[every], bases[every], tokens[every], cached[every])
    worker.sealing.extend(lanes.seqs[slots[lengths % PAGE_TOKENS == 0]])
    return others


def _one_by_one(record: Record, which: Bools) -> list[tuple[int, Row]]:
    """Rows of lanes as rows of their own, with their places in the frame."""
    left = np.flatnonzero(which).tolist()
    gens = record.gens.tolist()
    return [(int(record.slots_at[i]), Row(record.seqs[i], gens[i], False, 0, 1, True)) for i in left]


def _fail_row(st: State, seq: Seq, fault: tuple[str, str] | None) -> None:
    """The worker cannot go on with this row: nothing was sampled, and its choice ends."""
    st.count("rows_failed")
    if fault is None:
        st.fault("failure_without_reason")
    finish.end(st, seq, FinishReason.ERROR, fault or ("sampling_fault", "the worker did not say why"))


def _book_row(st: State, worker: Worker, row: Row, state: int, ids: list[int], logprobs: list[Entry] | None) -> None:
    seq = row.seq
    seq.flying -= 1
    seq.sampling -= row.sample
    if state not in _TAKES_IDS and ids:
        st.fault("ids_without_sample")
        ids = []
    if state in _TAKES_IDS:
        if not row.sample or (not ids and state == RowState.SAMPLED) or len(ids) > row.n:
            st.fault("unexpected_sample")
            finish.requeue(st, seq)
            return
        seq.length = row.start + row.n if row.chunk else seq.length + len(ids)
        seq.fed -= 0 if row.chunk else row.n - len(ids)
        _book_ids(st, worker, seq, ids, logprobs, ended=state == RowState.FINISHED)
    elif state == RowState.CHUNK and row.chunk and not row.sample:
        seq.length = row.start + row.n
    elif state == RowState.PARKED and row.sample:
        st.total("parked_rows")
        refresh(st, seq.req.grammar, st.limits.refresh_parked_ms * MS)
        if row.chunk:
            seq.length = row.start + row.n - 1  # the worker feeds its last id again, as a decode row
            seq.fed -= 1
        else:
            seq.fed -= row.n
    else:
        st.fault("unexpected_row_state")
        finish.requeue(st, seq)
        return
    if seq.length // PAGE_TOKENS > seq.sealed:
        worker.sealing.append(seq)


def _book_ids(
    st: State, worker: Worker, seq: Seq, ids: list[int], logprobs: list[Entry] | None, *, ended: bool
) -> None:
    base = seq.n_emitted
    seq.extend(ids)
    reason = finish.reason_for(st, seq)
    if ended and reason is FinishReason.NONE:
        st.fault("finish_without_reason")
        reason = FinishReason.STOP
    elif not ended and reason is not FinishReason.NONE:
        st.fault("finish_unseen")
        ended = True
    if ended:
        finish.end(st, seq, reason, base=base, ids=ids, logprobs=logprobs)
    else:
        emit(st, seq, base, ids, logprobs=logprobs)


def _spares(worker: Worker, record: Record, result: ResultFrame) -> None:
    """Spare tails the worker refreshed in this frame are current now."""
    for index, pos in zip(result.spare_rows.tolist(), result.spare_positions.tolist(), strict=True):
        seq, gen = record.at(index)
        if seq.gen == gen and seq.worker == worker.name and seq.spare >= 0:
            seq.spare_pos = pos


def deadline_ns(st: State, worker: Worker, record: Record) -> int:
    """How long this frame may run: a multiple of its predicted time, generous until like frames were timed."""
    limits = st.limits
    return worker.cost.deadline_ns(
        record.shape,
        least_ns=limits.step_deadline_ms * MS,
        factor=limits.step_deadline_factor,
        warm_steps=limits.warm_steps,
        warm_ns=limits.warm_deadline_ms * MS,
    )


def _logprob_entries(columns: LogprobColumns) -> dict[int, list[Entry]]:
    """Entries by row, in position order."""
    if not len(columns.rows):
        return {}
    by_row: dict[int, list[Entry]] = {}
    ends = np.cumsum(columns.widths, dtype=np.int64).tolist()
    start = 0
    for row, end in zip(columns.rows.tolist(), ends, strict=True):
        by_row.setdefault(row, []).append((columns.ids[start:end].tolist(), columns.values[start:end].tolist()))
        start = end
    return by_row


def rows_of_error(record: Record) -> list[Seq]:
    """Whose fault a failed step may be: its chunks, or all rows if it had none."""
    chunks = [(row.seq, row.gen) for row in record.rows if row.chunk]
    phases = (Phase.PREFILL, Phase.DECODE, Phase.PREEMPTING)
    return [seq for seq, gen in chunks or record.named() if seq.gen == gen and seq.phase in phases]


def check_result(record: Record, result: ResultFrame) -> str:
    """What is wrong with a worker's answer to this frame; empty when nothing is."""
    if result.step != record.step:
        return f"result of step {result.step}, expected {record.step}"
    if len(result.states) != record.size or len(result.counts) != record.size:
        return f"result has {len(result.states)} rows, the frame had {record.size}"
    if int(result.counts.sum()) != len(result.tokens):
        return "counts do not add up to the tokens"
    if len(result.spare_rows) != len(result.spare_positions):
        return "spare columns differ in length"
    rows = result.spare_rows
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < record.size:
        return "spare names a row that is not there"
    if any(not 0 <= fault.row_index < record.size for fault in result.faults):
        return "a fault names a row that is not there"
    return ""
