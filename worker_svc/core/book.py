"""Book what a step sampled: advance slots, test for their end, fill the ResultFrame with the spares that are current.

The same rules as the device's (`resident`). A slot that ends or is parked does not advance: its length stays at the
last token fed, so a parked row reruns exactly. Later steps may be under way, and the slot may have been freed by one:
its row is booked all the same.
"""

from dataclasses import dataclass, field

import numpy as np

from meshkit.frames import LogprobColumns, ResultFrame, RowFault, RowState
from meshkit.types import PAGE_TOKENS, TokenLogprobs
from worker_svc.core.plan import Prepared
from worker_svc.core.table import FrameError, Slot
from worker_svc.core.work import RowOutcome, RowWork, StepOutcome


@dataclass(slots=True)
class _Columns:
    states: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    spares: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)


def book(prepared: Prepared, outcome: StepOutcome, vocab_size: int) -> ResultFrame:
    """Advance every slot of the frame. Raises FrameError, before changing anything, if the outcome does not fit."""
    _check(prepared, outcome, vocab_size)
    columns = _Columns()
    outcomes = iter(outcome.rows)
    for index, row in enumerate(prepared.rows):
        slot = row.slot
        tokens = _skip(columns) if row.work is None else _book_row(index, slot, row.work, next(outcomes), columns)
        columns.counts.append(len(tokens))
        columns.tokens.extend(tokens)
        if row.spare < 0 or row.spare != slot.spare:
            continue  # it has none, or a later frame gave it another: what this one holds is not its concern any more
        if columns.states[-1] == RowState.SAMPLED and slot.length % PAGE_TOKENS == 0:
            slot.spare_pos = slot.length
            columns.spares.append((index, slot.length))
        elif row.spare_saved:
            slot.spare_pos = row.spare_saved
            columns.spares.append((index, row.spare_saved))
    return ResultFrame(
        step=prepared.frame.step,
        t_start_ns=outcome.t_start_ns,
        t_end_ns=outcome.t_end_ns,
        states=np.array(columns.states, np.uint8),
        counts=np.array(columns.counts, np.uint8),
        tokens=np.array(columns.tokens, np.int32),
        spare_rows=np.array([row for row, _ in columns.spares], np.int32),
        spare_positions=np.array([pos for _, pos in columns.spares], np.int32),
        logprobs=_pack_logprobs(columns.logprobs),
        faults=tuple(columns.faults),
        jit_compiles=outcome.jit_compiles,
    )


def _check(prepared: Prepared, outcome: StepOutcome, vocab_size: int) -> None:
    planned = [row for row in prepared.rows if row.work is not None]
    if len(outcome.rows) != len(planned):
        raise FrameError("executor", f"{len(outcome.rows)} outcomes for {len(planned)} rows")
    for row, came in zip(planned, outcome.rows):
        most = 0 if row.slot.finished or row.work is None else row.work.sample_last
        if len(came.tokens) > most or any(not 0 <= token < vocab_size for token in came.tokens):
            raise FrameError("executor", f"slot {row.slot.slot} sampled {came.tokens}, at most {most} were due")
        if came.fault is not None and (came.tokens or row.work is None or not row.work.sample_last):
            raise FrameError("executor", f"slot {row.slot.slot} has fault {came.fault.code} where none can be")


def _skip(columns: _Columns) -> tuple[int, ...]:
    columns.states.append(RowState.FINISHED_BEFORE)
    return ()


def _book_row(index: int, slot: Slot, work: RowWork, outcome: RowOutcome, columns: _Columns) -> tuple[int, ...]:
    slot.sampling -= work.sample_last
    if slot.finished:  # by a frame that was under way when this one was prepared
        return _skip(columns)
    last = work.ids[-1] if work.ids else slot.next
    end = work.start + len(work.ids) if work.ids else slot.length + 1
    if not work.sample_last:
        slot.length = end
        columns.states.append(RowState.CHUNK)
        return ()
    if not outcome.tokens:
        slot.length, slot.next = end - 1, last
        if outcome.fault is not None:
            slot.finished = slot.failed = True
            columns.states.append(RowState.FAILED)
            columns.faults.append(RowFault(index, *outcome.fault))
            return ()
        slot.fed -= 1
        columns.states.append(RowState.PARKED)
        return ()
    (token,) = outcome.tokens
    slot.n_emitted += 1
    slot.last_ids.append(token)
    if _ends(slot, token):
        slot.finished = True
        slot.length, slot.next = end - 1, last
        columns.states.append(RowState.FINISHED)
    else:
        slot.length, slot.next = end, token
        columns.states.append(RowState.SAMPLED)
    if slot.params.top_logprobs >= 0:
        columns.logprobs.extend((index, entry) for entry in outcome.logprobs)
    return outcome.tokens


def _ends(slot: Slot, token: int) -> bool:
    """EOS or a stop id (the sampler forbids both below min_tokens), or the last token allowed."""
    return token in slot.stops or slot.n_emitted >= slot.params.max_tokens


def _pack_logprobs(entries: list[tuple[int, TokenLogprobs]]) -> LogprobColumns:
    if not entries:
        return LogprobColumns()
    return LogprobColumns(
        np.array([row for row, _ in entries], np.int32),
        np.array([len(entry.ids) for _, entry in entries], np.uint8),
        np.array([token for _, entry in entries for token in entry.ids], np.int32),
        np.array([value for _, entry in entries for value in entry.values], np.float32),
    )
