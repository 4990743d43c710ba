"""Chunk rows: the next part of a prefill, and the tails that are saved on its way."""

from meshkit.frames import TailSave
from scheduler_svc.core.fork import fork
from scheduler_svc.core.request import Saved, Seq, tokens_of
from scheduler_svc.core.room import take_tail
from scheduler_svc.core.rows import Draft, add_row, give_spare, grow
from scheduler_svc.core.state import Row, State, Worker


def chunk(st: State, worker: Worker, draft: Draft, seq: Seq, most: int) -> None:
    """The next part of a prefill: up to `most` tokens, up to the fork point if siblings wait there."""
    last_prompt = len(seq.req.prompt) - 1
    if seq.followers and seq.fed == last_prompt:
        fork(st, worker, draft, seq)
    n = min((last_prompt if seq.followers else seq.total) - seq.fed, draft.budget, most)
    if n <= 0 or not grow(st, worker, draft, seq, seq.fed + n):
        return
    start, end = seq.fed, seq.fed + n
    give_spare(st, worker, draft, seq)
    _save_tails(st, worker, draft, seq, end)
    add_row(draft, Row(seq, seq.gen, True, start, n, end == seq.total))
    draft.chunk_ids[seq.rank].append(tokens_of(seq, start, end))


def _save_tails(st: State, worker: Worker, draft: Draft, seq: Seq, end: int) -> None:
    """Save what lies in this chunk of the places where this prefill is to be resumable."""
    while seq.points and seq.points[0][0] <= end:
        pos, reasons = seq.points.pop(0)
        if pos <= seq.fed:
            continue
        tail = take_tail(st, worker, worker.ranks[seq.rank], reasons)
        if tail >= 0:
            seq.saved.append(Saved(pos, tail, reasons))
            draft.saves.append(TailSave(seq.slot, pos, tail))
