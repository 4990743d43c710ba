"""Booking results: what the rows of a frame did to their choices, and the token rows for the gateways.

Rows are matched by the frame's record, never by id: a row whose choice has ended, moved or been preempted and placed
again no longer has the generation it was sent with and is ignored.
"""

import numpy as np

from meshkit.frames import LogprobColumns, ResultFrame, RowState
from meshkit.types import PAGE_TOKENS, FinishReason
from scheduler_svc.core import finish
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
    states, counts, tokens = result.states.tolist(), result.counts.tolist(), result.tokens.tolist()
    at = 0
    for i, row in enumerate(record.rows):
        ids = tokens[at : at + counts[i]]
        at += counts[i]
        seq = row.seq
        if seq.gen != row.gen or seq.worker != worker.name:
            st.total("stale_rows")
            continue
        _book_row(st, worker, row, states[i], ids, entries.get(i))
    for seq in list(worker.preempting):
        if not seq.flying:
            finish.settle_preempted(st, worker, seq)
    st.total("tokens", len(tokens))


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
    base = len(seq.emitted)
    seq.emitted.extend(ids)
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
        row = record.rows[index]
        seq = row.seq
        if seq.gen == row.gen and seq.worker == worker.name and seq.spare >= 0:
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
    by_row: dict[int, list[Entry]] = {}
    ends = np.cumsum(columns.widths, dtype=np.int64).tolist()
    start = 0
    for row, end in zip(columns.rows.tolist(), ends, strict=True):
        by_row.setdefault(row, []).append((columns.ids[start:end].tolist(), columns.values[start:end].tolist()))
        start = end
    return by_row


def rows_of_error(record: Record) -> list[Seq]:
    """Whose fault a failed step may be: its chunks, or all rows if it had none."""
    chunks = [row for row in record.rows if row.chunk]
    seqs: list[Seq] = []
    for row in chunks or record.rows:
        if row.seq.gen == row.gen and row.seq.phase in (Phase.PREFILL, Phase.DECODE, Phase.PREEMPTING):
            seqs.append(row.seq)
    return seqs


def check_result(record: Record, result: ResultFrame) -> str:
    """What is wrong with a worker's answer to this frame; empty when nothing is."""
    if result.step != record.step:
        return f"result of step {result.step}, expected {record.step}"
    if len(result.states) != len(record.rows) or len(result.counts) != len(record.rows):
        return f"result has {len(result.states)} rows, the frame had {len(record.rows)}"
    if int(result.counts.sum()) != len(result.tokens):
        return "counts do not add up to the tokens"
    if len(result.spare_rows) != len(result.spare_positions):
        return "spare columns differ in length"
    if len(result.spare_rows) and not 0 <= int(result.spare_rows.min()) <= int(result.spare_rows.max()) < len(
        record.rows
    ):
        return "spare names a row that is not there"
    return ""
