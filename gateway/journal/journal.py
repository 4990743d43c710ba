"""The gateway's journal: keeps each open request until it ends, resubmits it when its scheduler is lost.

Pure: `handle(event, now_ns) -> effects`. Every id is appended before it is emitted; what arrives again is dropped, what
is missing restarts the attempt; the first closer of a choice wins and there is one terminal effect. Text, stop strings
and HTTP are the caller's; token ids are all this knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from gateway.journal.entry import Choice, Entry, Phase, build_submit, new_entry
from gateway.journal.events import AbortRequest, ClientGone, Emit, Ended, Refused, Start, StopChoice
from gateway.journal.rows import RowTable
from gateway.journal.timers import Alarm, Timers
from meshkit.core import Call, Closed, Count, Opened, Received, Replied, Tick, WakeAt
from meshkit.frames import (
    GatewayHello,
    Heartbeat,
    LogprobColumns,
    MovedRows,
    SchedulerStatus,
    SubmitReply,
    TokenFrame,
    Verdict,
)
from meshkit.types import PROTO_REV, FinishReason, RequestId, TokenLogprobs
from meshkit.uplink import MS, NEVER, Change, LinkTiming, Uplink

Event = Start | ClientGone | StopChoice | AbortRequest | Opened | Received | Closed | Replied | Tick

CANNOT_HAPPEN: Final = (
    "bad_finish",
    "bad_hello_ack",
    "gap",
    "logprobs_missing",
    "overlap_mismatch",
    "unexpected_frame",
)
"""Counters of what only a bug of ours explains."""
GROWTH_TOKENS = 4096
MAX_BYTES = 1 << 30
_AGAIN = {Verdict.SUPERSEDED, Verdict.CANCELLED}
_BUSY = {Verdict.QUEUE_FULL, Verdict.NO_WORKER, Verdict.DRAINING, Verdict.GRAMMAR_LATER}


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    """Who the gateway is and its bounds. Times in nanoseconds unless the name says otherwise."""

    name: str
    boot: int
    build: str
    deterministic: bool = False  # repeated ids must be equal: a difference is a fault
    max_bytes: int = MAX_BYTES
    reserve_tokens: int = 16_384  # output ids per choice counted at admission; more are counted as they come
    max_waiting: int = 1024  # new requests held while no scheduler is attached
    wait_ns: int = 10_000 * MS  # for how long
    submit_timeout_ms: int = 5_000
    verdict_timeout_ms: int = 25_000  # the same where a grammar's verdict comes first
    retry_ns: int = 100 * MS  # pause before a retry, varied by half; a refusal's own retry_after_ms if longer
    resubmit_jitter_ns: int = 50 * MS  # spreads resubmissions after a new attachment
    retry_after_ms: int = 1_000  # told to clients that are refused here
    timing: LinkTiming = field(default_factory=LinkTiming)


class Journal:
    """See the module's docstring. The shell delivers one Tick at start, which makes the journal dial."""

    def __init__(self, config: JournalConfig, rng: Random) -> None:
        self.config = config
        self.status = SchedulerStatus()
        self.bytes_used = 0
        self.entries: dict[RequestId, Entry] = {}
        self._rng = rng
        self._link = Uplink(self._hello, lambda now_ns: Heartbeat(), rng, config.timing)
        self._rows = RowTable()
        self._timers = Timers()
        self._calls: dict[int, Entry] = {}
        self._last_call = 0
        self._ever_attached = False
        self._wish_ns = NEVER

    @property
    def attached(self) -> bool:
        """True while the stream to a scheduler is up."""
        return self._link.attached

    @property
    def cannot_happen(self) -> Sequence[str]:
        """See meshkit.core.Core."""
        return CANNOT_HAPPEN

    def accepted(self, request_id: RequestId) -> bool:
        """Whether a request has got past all that could refuse it, or has ended."""
        entry = self.entries.get(request_id)
        return entry is None or entry.accepted

    def handle(self, event: Event, now_ns: int) -> list[Any]:
        """One event in, effects to carry out in order. Never raises on what a peer sent."""
        out: list[Any] = []
        match event:
            case Received(conn=conn, envelope=envelope):
                change, frame = self._link.received(conn, envelope, now_ns, out)
                self._attachment(change, now_ns)
                if isinstance(frame, TokenFrame):
                    self._tokens(frame, now_ns, out)
                elif isinstance(frame, SchedulerStatus):
                    self.status = frame
                elif isinstance(frame, MovedRows):
                    self._moved(frame)
                elif frame is not None:
                    out.append(Count("unexpected_frame", fault=True))
            case Replied(call=call, reply=reply):
                self._replied(call, reply, now_ns, out)
            case Start():
                self._start(event, now_ns, out)
            case ClientGone(request_id=request_id):
                self._client_gone(request_id)
            case StopChoice():
                self._stop_choice(event)
            case AbortRequest(request_id=request_id):
                self._end_all(self.entries.get(request_id), FinishReason.ABORT, "", "", out)
            case Opened(conn=conn):
                self._link.opened(conn, now_ns, out)
            case Closed(conn=conn):
                self._attachment(self._link.closed(conn, now_ns), now_ns)
            case Tick():
                self._wish_ns = NEVER
                self._flush(out)
        self._advance(now_ns, out)
        return out

    # ---- the attachment ---------------------------------------------------------------------------------------------

    def _hello(self) -> GatewayHello:
        return GatewayHello(self.config.name, self.config.boot, self.config.build, PROTO_REV)

    def _attachment(self, change: Change, now_ns: int) -> None:
        if change is Change.ATTACHED:
            self._ever_attached = True
            for entry in self.entries.values():
                jitter = self._rng.uniform(0, self.config.resubmit_jitter_ns) if entry.attempt else 0
                self._delay(entry, now_ns + int(jitter))
        elif change is Change.LOST:
            self.status = replace(self.status, ready=False, draining=False)  # the next one need not leave too
            self._rows.clear()
            self._calls.clear()
            for entry in self.entries.values():
                self._wait(entry, now_ns)

    def _advance(self, now_ns: int, out: list[Any]) -> None:
        """Carry out what is due, then say when to come back. Row commands go out in the next turn, as one batch."""
        self._attachment(self._link.poll(now_ns, out), now_ns)
        for at_ns, alarm, request_id in self._timers.due(now_ns):
            entry = self.entries.get(request_id)
            if entry is not None:
                self._alarm(entry, alarm, at_ns, now_ns, out)
        wish = min(self._link.next_wake_ns(), self._timers.next_ns())
        if self._rows.pending:
            wish = min(self._wish_ns, now_ns)
        if wish != self._wish_ns:
            self._wish_ns = wish
            out.append(WakeAt(wish))

    def _flush(self, out: list[Any]) -> None:
        if self._link.attached:
            for frame in self._rows.take_batches():
                self._link.send(frame, out)

    def _alarm(self, entry: Entry, alarm: Alarm, at_ns: int, now_ns: int, out: list[Any]) -> None:
        if alarm is Alarm.DEADLINE:
            message = f"the request did not finish within {entry.start.deadline_ms} ms"
            self._end_all(entry, FinishReason.ERROR, "deadline", message, out)
        elif alarm is Alarm.SUBMIT and entry.phase is Phase.DELAYED and entry.submit_ns == at_ns:
            self._submit(entry, now_ns, out)
        elif alarm is Alarm.WAIT and entry.phase is Phase.WAITING and entry.wait_ns == at_ns and not entry.attempt:
            self._refuse(entry, Verdict.NO_WORKER, "no scheduler is attached", self.config.retry_after_ms, out)

    def _set_timer(self, at_ns: int, alarm: Alarm, entry: Entry) -> None:
        self._timers.set(at_ns, alarm, entry.request_id, self.entries, len(self.entries))

    # ---- requests in ------------------------------------------------------------------------------------------------

    def _start(self, start: Start, now_ns: int, out: list[Any]) -> None:
        entry = new_entry(start, self.config.reserve_tokens, now_ns)
        refusal = self._admission_error(entry)
        if refusal is not None:
            out.append(Refused(start.request_id, *refusal, self.config.retry_after_ms))
            return
        self.entries[start.request_id] = entry
        self.bytes_used += entry.bytes
        self._set_timer(entry.deadline_ns, Alarm.DEADLINE, entry)
        if self._link.attached:
            self._submit(entry, now_ns, out)
        else:
            self._wait(entry, now_ns)

    def _admission_error(self, entry: Entry) -> tuple[Verdict, str] | None:
        if entry.request_id in self.entries:
            return Verdict.INVALID, "request_id is in use"
        if self.bytes_used + entry.bytes > self.config.max_bytes:
            return Verdict.QUEUE_FULL, "the gateway's journal is full"
        if self._link.attached:
            return None
        if not self._ever_attached:
            return Verdict.NO_WORKER, "no scheduler has attached yet"
        waiting = sum(other.attempt == 0 for other in self.entries.values())
        return (Verdict.QUEUE_FULL, "too many requests wait") if waiting >= self.config.max_waiting else None

    def _client_gone(self, request_id: RequestId) -> None:
        entry = self.entries.get(request_id)
        if entry is not None:
            self._cancel_rows(entry)
            self._remove(entry)

    def _stop_choice(self, event: StopChoice) -> None:
        entry = self.entries.get(event.request_id)
        if entry is None or not 0 <= event.choice < len(entry.choices) or not entry.choices[event.choice].open:
            return
        choice = entry.choices[event.choice]
        self._rows.stop(choice, event.keep)
        self._close(entry, choice)

    # ---- submission -------------------------------------------------------------------------------------------------

    def _wait(self, entry: Entry, now_ns: int) -> None:
        entry.phase, entry.call, entry.submit = Phase.WAITING, 0, None
        entry.wait_ns = now_ns + self.config.wait_ns
        if not entry.attempt:
            self._set_timer(entry.wait_ns, Alarm.WAIT, entry)

    def _delay(self, entry: Entry, at_ns: int) -> None:
        entry.phase, entry.submit_ns = Phase.DELAYED, at_ns
        self._set_timer(at_ns, Alarm.SUBMIT, entry)

    def _pause_ns(self, retry_after_ms: int = 0) -> int:
        return int(max(self.config.retry_ns, retry_after_ms * MS) * self._rng.uniform(0.5, 1.5))

    def _submit(self, entry: Entry, now_ns: int, out: list[Any]) -> None:
        """Send the attempt in hand again, or the next one."""
        remaining_ms = max(1, (entry.deadline_ns - now_ns) // MS)
        if entry.submit is None:
            entry.attempt += 1
            for choice in entry.choices:
                if choice.open:
                    self._rows.bind(entry, choice)
            entry.submit = build_submit(entry, self._link.attach_id, remaining_ms)
        else:
            entry.submit = replace(entry.submit, remaining_ms=remaining_ms)
        self._last_call += 1
        entry.phase, entry.call = Phase.CALLING, self._last_call
        self._calls[entry.call] = entry
        constrained = entry.start.grammar is not None
        timeout_ms = self.config.verdict_timeout_ms if constrained else self.config.submit_timeout_ms
        out.append(Call(entry.call, entry.submit, min(remaining_ms, timeout_ms)))

    def _replied(self, call: int, reply: SubmitReply | None, now_ns: int, out: list[Any]) -> None:
        entry = self._calls.pop(call, None)
        if entry is None or entry.call != call or entry.request_id not in self.entries:
            return
        entry.call = 0
        if reply is None:
            out.append(Count("submit_unknown"))
            self._delay(entry, now_ns + self._pause_ns())
        elif reply.verdict == Verdict.ACCEPTED:
            entry.phase, entry.accepted = Phase.OPEN, True
            entry.grammar_rev = reply.grammar_rev or entry.grammar_rev
        else:
            self._turned_down(entry, reply, now_ns, out)

    def _turned_down(self, entry: Entry, reply: SubmitReply, now_ns: int, out: list[Any]) -> None:
        verdict = reply.verdict
        if verdict is Verdict.STALE_ATTACH:  # of the attachment in force: the scheduler knows sooner that it is gone
            out.append(Count("submit_stale_attach"))
            self._attachment(self._link.drop("the scheduler has given this attachment up", now_ns, out), now_ns)
        elif verdict in _AGAIN:
            out.append(Count(f"submit_{verdict.name.lower()}"))
            self._cancel_rows(entry)
            self._restart(entry, now_ns + self._pause_ns())
        elif entry.untouched and verdict is not Verdict.POISONED:
            self._refuse(entry, verdict, reply.message, reply.retry_after_ms, out, reply.place)
        elif verdict in _BUSY:
            out.append(Count("resubmit_busy"))
            self._restart(entry, now_ns + self._pause_ns(reply.retry_after_ms))
        else:
            code = "request_poisoned" if verdict is Verdict.POISONED else verdict.name.lower()
            self._end_all(entry, FinishReason.ERROR, code, reply.message, out)

    def _restart(self, entry: Entry, at_ns: int) -> None:
        """Give the attempt up; the next one goes out at `at_ns`."""
        self._release_rows(entry)
        self._calls.pop(entry.call, None)
        entry.call, entry.submit = 0, None
        self._delay(entry, at_ns)

    def _refuse(
        self, entry: Entry, verdict: Verdict, message: str, retry_after_ms: int, out: list[Any], place: str = ""
    ) -> None:
        self._release_rows(entry)
        self._remove(entry)
        out.append(Refused(entry.request_id, verdict, message, retry_after_ms, place))

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def _tokens(self, frame: TokenFrame, now_ns: int, out: list[Any]) -> None:
        """Most rows bring the one id that comes next: those take the short branch, all others `_book`."""
        ids = frame.ids.tolist()
        logprobs = _by_row(frame.logprobs)
        errors = {error.row_index: error for error in frame.errors}
        cached = frame.cached.tolist() or [0] * len(frame.rows)
        waited = dict(zip(frame.waited_rows.tolist(), frame.waited_ms.tolist()))
        columns = (frame.rows, frame.row_gens, frame.bases, frame.counts, frame.finishes)
        find = self._rows.find
        at = 0
        for index, (row, row_gen, base, count, finish) in enumerate(zip(*[column.tolist() for column in columns])):
            start, at = at, at + count
            found = find(row, row_gen)
            if found is None:
                out.append(Count("stale_row"))
                continue
            entry, choice = found
            if choice.cached_tokens < 0:
                choice.cached_tokens = cached[index]
            if count == 1 and choice.plain and base == len(choice.ids) < choice.reserved:
                token = ids[start]
                choice.ids.append(token)
                waited_ms = waited.get(index, -1) if waited else -1
                out.append(Emit(choice.request_id, choice.index, base, (token,), (), choice.cached_tokens, waited_ms))
            elif not self._book(
                entry, choice, base, ids[start:at], logprobs.get(index, []), waited.get(index, -1), now_ns, out
            ):
                continue
            if finish:
                error = errors.get(index)
                code, message = (error.code, error.message) if error is not None else ("", "")
                self._finish(entry, choice, finish, code, message, out)

    def _book(
        self,
        entry: Entry,
        choice: Choice,
        base: int,
        ids: list[int],
        logprobs: list[TokenLogprobs],
        waited_ms: int,
        now_ns: int,
        out: list[Any],
    ) -> bool:
        """Append what is new and emit it. False if the choice cannot go on from this row."""
        have = len(choice.ids)
        if not 0 <= base <= have:
            out.append(Count("gap", fault=True))
            self._cancel_rows(entry)
            self._restart(entry, now_ns + self._pause_ns())
            return False
        seen = have - base
        if seen and ids:
            out.append(Count("overlap_ids", min(seen, len(ids))))
            if self.config.deterministic and ids[:seen] != choice.ids[base : base + len(ids)].tolist():
                out.append(Count("overlap_mismatch", fault=True))
        new = ids[seen:]
        if not new:
            return True
        if not self._grow(choice, entry, len(new)):
            self._rows.cancel(choice)
            out.append(self._ended(entry, choice, FinishReason.ERROR, "journal_full", "the gateway's journal is full"))
            self._close(entry, choice)
            return False
        choice.ids.extend(new)
        asked = entry.start.params.top_logprobs >= 0
        chosen = tuple(logprobs[seen:]) if asked else ()
        if asked and len(chosen) != len(new):
            out.append(Count("logprobs_missing", fault=True))
            chosen = ()
        choice.sent_logprobs += len(chosen)
        cached = max(0, choice.cached_tokens)
        out.append(Emit(entry.request_id, choice.index, have, tuple(new), chosen, cached, waited_ms))
        return True

    def _grow(self, choice: Choice, entry: Entry, count: int) -> bool:
        while len(choice.ids) + count > choice.reserved:
            if self.bytes_used + 4 * GROWTH_TOKENS > self.config.max_bytes:
                return False
            choice.reserved += GROWTH_TOKENS
            entry.bytes += 4 * GROWTH_TOKENS
            self.bytes_used += 4 * GROWTH_TOKENS
        return True

    def _moved(self, frame: MovedRows) -> None:
        """The latest word counts: a loss that was suspected to be a crash may turn out to be none."""
        for row, row_gen, kills in zip(frame.rows.tolist(), frame.row_gens.tolist(), frame.kills.tolist()):
            found = self._rows.find(row, row_gen)
            if found is not None:
                found[0].kills = kills

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _finish(self, entry: Entry, choice: Choice, finish: int, code: str, message: str, out: list[Any]) -> None:
        if finish not in FinishReason.__members__.values():
            out.append(Count("bad_finish", fault=True))
            finish, code, message = FinishReason.ERROR, "internal", f"unknown finish reason {finish}"
        if finish == FinishReason.ERROR and not code:
            code = "internal"
        self._rows.release(choice)
        out.append(self._ended(entry, choice, FinishReason(finish), code, message))
        self._close(entry, choice)

    def _end_all(self, entry: Entry | None, reason: FinishReason, code: str, message: str, out: list[Any]) -> None:
        if entry is None:
            return
        self._cancel_rows(entry)
        out.extend(self._ended(entry, choice, reason, code, message) for choice in entry.choices if choice.open)
        self._remove(entry)

    def _ended(self, entry: Entry, choice: Choice, reason: FinishReason, code: str, message: str) -> Ended:
        return Ended(entry.request_id, choice.index, reason, code, message)

    def _close(self, entry: Entry, choice: Choice) -> None:
        choice.open = False
        if not entry.is_open:
            self._remove(entry)

    def _cancel_rows(self, entry: Entry) -> None:
        for choice in entry.choices:
            self._rows.cancel(choice)

    def _release_rows(self, entry: Entry) -> None:
        for choice in entry.choices:
            self._rows.release(choice)

    def _remove(self, entry: Entry) -> None:
        del self.entries[entry.request_id]
        self._calls.pop(entry.call, None)
        self.bytes_used -= entry.bytes


def _by_row(columns: LogprobColumns) -> dict[int, list[TokenLogprobs]]:
    """Logprob entries of each row index, in position order."""
    found: dict[int, list[TokenLogprobs]] = {}
    if not len(columns.rows):
        return found
    ids, values = columns.ids.tolist(), columns.values.tolist()
    at = 0
    for row, width in zip(columns.rows.tolist(), columns.widths.tolist()):
        entry = TokenLogprobs(tuple(ids[at : at + width]), tuple(values[at : at + width]))
        found.setdefault(row, []).append(entry)
        at += width
    return found
