"""The gateway's journal against a scripted scheduler: requests in, Submits out, tokens in, emissions out."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from gateway.journal import entry
from gateway.journal.events import AbortRequest, ClientGone, Emit, Ended, Refused, Start, StopChoice
from gateway.journal.journal import Journal, JournalConfig
from meshkit.core import Call, Close, Closed, Count, Dial, Opened, Received, Replied, Send, Tick, WakeAt
from meshkit.frames import (
    CancelRows,
    Envelope,
    GatewayHello,
    GatewayHelloAck,
    Heartbeat,
    LogprobColumns,
    MovedRows,
    RowError,
    SchedulerStatus,
    StopRows,
    SubmitReply,
    TokenFrame,
    Verdict,
)
from meshkit.types import FinishReason, GrammarKind, GrammarSource, RequestId, SamplingParams, TokenLogprobs

MS = 1_000_000
RID = RequestId(b"r" * 16)


def i32(*values):
    return np.array(values, np.int32)


def start(rid=RID, n=1, prompt=10, deadline_ms=60_000, grammar=None, **params):
    return Start(
        request_id=rid,
        prompt=np.arange(prompt, dtype=np.int32),
        page_keys=(),
        params=SamplingParams(**{"max_tokens": 100, **params}),
        seed=9,
        n=n,
        tenant="t",
        priority=0,
        deadline_ms=deadline_ms,
        grammar=grammar,
    )


def only(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects, kind):
    return [effect.envelope.frame for effect in only(effects, Send) if isinstance(effect.envelope.frame, kind)]


def counts(effects, fault=None):
    return [effect.name for effect in only(effects, Count) if fault is None or effect.fault is fault]


class Rig:
    """A journal with a hand on its stream and clock."""

    def __init__(self, **config):
        self.journal = Journal(JournalConfig(name="g", boot=1, build="b", **config), Random(3))
        self.now = 0
        self.conn = 0
        self.attach_id = 0

    def __call__(self, event):
        return self.journal.handle(event, self.now)

    def wait(self, ms):
        """Advance the clock in small steps, with ticks and a live scheduler, collecting effects."""
        out = []
        for _ in range(ms // 50):
            self.now += 50 * MS
            if self.journal.attached:
                out += self.receive(Heartbeat())
            out += self(Tick())
        return out

    def attach(self, attach_id=5):
        (dial,) = only(self(Tick()), Dial)
        self.conn, self.attach_id = dial.conn, attach_id
        self.hello = sent(self(Opened(self.conn, "scheduler")), GatewayHello)[0]
        return self.receive(GatewayHelloAck(2, "b"))

    def receive(self, frame, attach_id=None):
        return self(Received(self.conn, Envelope(self.attach_id if attach_id is None else attach_id, frame)))

    def submit(self, event=None):
        """Start a request that is accepted; returns its Submit."""
        (call,) = only(self(event or start()), Call)
        self(Replied(call.call, SubmitReply(Verdict.ACCEPTED)))
        return call.request

    def tokens(self, submit, base, ids, finish=0, choice=0, **more):
        named = submit.choices[choice]
        return self.receive(
            TokenFrame(
                step=1,
                rows=i32(named.row),
                row_gens=i32(named.row_gen),
                bases=i32(base),
                counts=i32(len(ids)),
                ids=i32(*ids),
                finishes=np.array([finish], np.uint8),
                cached=i32(0),
                **more,
            )
        )


@pytest.fixture
def rig():
    rig = Rig(deterministic=True)
    rig.attach()
    return rig


def test_a_request_runs_from_start_to_end(rig):
    submit = rig.submit()
    assert (submit.attach_id, submit.attempt, submit.seed, submit.remaining_ms) == (5, 1, 9, 60_000)
    assert only(rig.tokens(submit, 0, [7, 8]), Emit) == [Emit(RID, 0, 0, (7, 8))]
    out = rig.tokens(submit, 2, [9], finish=FinishReason.STOP)
    assert only(out, Emit) == [Emit(RID, 0, 2, (9,))]
    assert only(out, Ended) == [Ended(RID, 0, FinishReason.STOP)]
    assert not rig.journal.entries and rig.journal.bytes_used == 0
    assert counts(rig.tokens(submit, 3, [1])) == ["stale_row"]


def test_overlap_is_dropped_and_compared(rig):
    submit = rig.submit()
    rig.tokens(submit, 0, [7, 8, 9])
    out = rig.tokens(submit, 1, [8, 9, 10])
    assert only(out, Emit) == [Emit(RID, 0, 3, (10,))] and counts(out, True) == []
    assert counts(rig.tokens(submit, 1, [8, 5]), True) == ["overlap_mismatch"]
    assert not only(rig.tokens(submit, 0, [7]), Emit)


@pytest.mark.parametrize("base", [1, 5, -1])
def test_a_gap_restarts_the_attempt(rig, base):
    submit = rig.submit()
    out = rig.tokens(submit, base, [9])
    assert counts(out, True) == ["gap"] and not only(out, Emit)
    out = rig.wait(400)
    (cancel,) = sent(out, CancelRows)
    assert list(cancel.row_gens) == [submit.choices[0].row_gen]
    (call,) = only(out, Call)
    assert call.request.attempt == 2 and call.request.choices[0].row_gen != submit.choices[0].row_gen


def test_loss_of_the_scheduler_resubmits_open_choices_with_what_was_emitted(rig):
    submit = rig.submit(start(n=3))
    rig.tokens(submit, 0, [7, 8])
    rig.tokens(submit, 0, [5], finish=FinishReason.LENGTH, choice=1)
    rig(Closed(rig.conn))
    rig.now += 200 * MS
    rig.attach(6)
    (call,) = only(rig.wait(100), Call)
    request = call.request
    assert (request.attach_id, request.attempt, request.seed) == (6, 2, submit.seed)
    assert [(choice.choice, choice.emitted) for choice in request.choices] == [(0, (7, 8)), (2, ())]
    assert request.remaining_ms < 60_000
    assert only(rig.tokens(request, 2, [9]), Emit) == [Emit(RID, 0, 2, (9,))]


def test_frames_of_an_old_attachment_are_dropped(rig):
    submit = rig.submit()
    frame = TokenFrame(
        step=1,
        rows=i32(submit.choices[0].row),
        row_gens=i32(submit.choices[0].row_gen),
        bases=i32(0),
        counts=i32(1),
        ids=i32(4),
        finishes=np.zeros(1, np.uint8),
    )
    assert counts(rig.receive(frame, attach_id=4)) == ["stale_attach"]
    assert only(rig.receive(frame), Emit)


def test_first_closer_wins(rig):
    submit = rig.submit(start(n=2))
    rig.tokens(submit, 0, [7, 8])
    out = rig(StopChoice(RID, 0, 1))
    assert not only(out, Ended) and only(out, WakeAt)
    (stop,) = sent(rig(Tick()), StopRows)
    assert (list(stop.rows), list(stop.keeps)) == ([submit.choices[0].row], [1])
    assert counts(rig.tokens(submit, 2, [9], finish=FinishReason.LENGTH)) == ["stale_row"]
    assert not only(rig(StopChoice(RID, 0, 1)), Ended)
    assert only(rig.tokens(submit, 0, [3], finish=FinishReason.STOP, choice=1), Ended)
    assert not rig.journal.entries


def test_cancels_of_one_turn_travel_together(rig):
    first, second = rig.submit(), rig.submit(start(RequestId(b"s" * 16)))
    rig(ClientGone(first.request_id))
    rig(ClientGone(second.request_id))
    (cancel,) = sent(rig(Tick()), CancelRows)
    assert list(cancel.rows) == [first.choices[0].row, second.choices[0].row]
    assert not sent(rig(Tick()), CancelRows) and not rig.journal.entries


def test_abort_ends_every_open_choice(rig):
    submit = rig.submit(start(n=2))
    rig.tokens(submit, 0, [7], finish=FinishReason.STOP)
    assert only(rig(AbortRequest(RID)), Ended) == [Ended(RID, 1, FinishReason.ABORT)]
    assert len(sent(rig(Tick()), CancelRows)) == 1


def test_the_deadline_ends_a_request_once(rig):
    submit = rig.submit(start(deadline_ms=1000))
    rig.tokens(submit, 0, [7])
    out = rig.wait(1000)
    assert [(end.reason, end.error_code) for end in only(out, Ended)] == [(FinishReason.ERROR, "deadline")]
    assert sent(out, CancelRows) and not rig.journal.entries


@pytest.mark.parametrize("verdict", [Verdict.QUEUE_FULL, Verdict.NO_WORKER, Verdict.NEVER_FITS, Verdict.INVALID])
def test_a_first_refusal_is_told_and_nothing_is_kept(rig, verdict):
    (call,) = only(rig(start()), Call)
    out = rig(Replied(call.call, SubmitReply(verdict, "why", 700)))
    assert only(out, Refused) == [Refused(RID, verdict, "why", 700)]
    assert not rig.journal.entries and rig.journal.bytes_used == 0


def resumed(rig):
    submit = rig.submit()
    rig.tokens(submit, 0, [7])
    rig(Closed(rig.conn))
    rig.now += 200 * MS
    rig.attach(6)
    (call,) = only(rig.wait(100), Call)
    return call


@pytest.mark.parametrize("verdict", [Verdict.QUEUE_FULL, Verdict.NO_WORKER, Verdict.DRAINING, Verdict.GRAMMAR_LATER])
def test_a_later_refusal_is_tried_again_within_the_deadline(rig, verdict):
    call = resumed(rig)
    out = rig(Replied(call.call, SubmitReply(verdict, "busy", 1000)))
    assert not only(out, Refused) and not only(rig.wait(400), Call)
    (again,) = only(rig.wait(1200), Call)
    assert again.request.attempt == 3 and again.request.choices[0].emitted == (7,)


@pytest.mark.parametrize(
    ("verdict", "code"),
    [(Verdict.NEVER_FITS, "never_fits"), (Verdict.INVALID, "invalid"), (Verdict.POISONED, "request_poisoned")],
)
def test_a_later_final_refusal_is_a_typed_end(rig, verdict, code):
    call = resumed(rig)
    out = rig(Replied(call.call, SubmitReply(verdict, "why")))
    assert only(out, Ended) == [Ended(RID, 0, FinishReason.ERROR, code, "why")]


SOURCE = GrammarSource(kind=GrammarKind.REGEX, text="a+", thinking=True)


def test_a_constraint_keeps_its_revision_once_ids_were_made_under_it(rig):
    (call,) = only(rig(start(grammar=SOURCE, n=2)), Call)
    assert call.request.grammar == SOURCE and call.timeout_ms == rig.journal.config.verdict_timeout_ms
    assert not rig.journal.accepted(RID)
    rig(Replied(call.call, SubmitReply(Verdict.ACCEPTED, grammar_rev="r1")))
    assert rig.journal.accepted(RID) and rig.journal.accepted(RequestId(b"x" * 16))
    for conn, ids, rev in ((6, [], ""), (7, [7], "r1"), (8, [8], "r1")):
        if ids:
            rig.tokens(call.request, ids[0] - 7, ids)
        rig(Closed(rig.conn))
        rig.now += 200 * MS
        rig.attach(conn)
        (call,) = only(rig.wait(100), Call)
        assert (call.request.grammar.text, call.request.grammar.thinking) == ("a+", True)
        assert call.request.grammar.grammar_rev == rev
        rig(Replied(call.call, SubmitReply(Verdict.ACCEPTED, grammar_rev=rev or "r1")))


def test_a_bad_grammar_is_told_with_its_place_and_ends_a_resumed_request(rig):
    (call,) = only(rig(start(grammar=SOURCE)), Call)
    out = rig(Replied(call.call, SubmitReply(Verdict.BAD_GRAMMAR, "why", place="character 3")))
    assert only(out, Refused) == [Refused(RID, Verdict.BAD_GRAMMAR, "why", 0, "character 3")]
    assert rig.journal.bytes_used == 0
    call = resumed(rig)
    out = rig(Replied(call.call, SubmitReply(Verdict.BAD_GRAMMAR, "why")))
    assert only(out, Ended) == [Ended(RID, 0, FinishReason.ERROR, "bad_grammar", "why")]


def test_an_unknown_outcome_is_retried_with_the_same_key(rig):
    (call,) = only(rig(start()), Call)
    rig(Replied(call.call, None))
    (again,) = only(rig.wait(200), Call)
    assert again.call != call.call and again.request.attempt == 1
    assert again.request.choices == call.request.choices and again.request.remaining_ms < 60_000


def test_a_stale_attachment_is_given_up_at_once(rig):
    (call,) = only(rig(start()), Call)
    out = rig(Replied(call.call, SubmitReply(Verdict.STALE_ATTACH)))
    assert only(out, Close) and not rig.journal.attached and rig.journal.entries


@pytest.mark.parametrize("verdict", [Verdict.SUPERSEDED, Verdict.CANCELLED])
def test_a_lost_race_is_the_next_attempt(rig, verdict):
    (call,) = only(rig(start()), Call)
    assert not only(rig(Replied(call.call, SubmitReply(verdict))), Refused)
    (again,) = only(rig.wait(200), Call)
    assert again.request.attempt == 2


def test_replies_of_an_old_attachment_are_ignored(rig):
    (call,) = only(rig(start()), Call)
    rig(Closed(rig.conn))
    assert not only(rig(Replied(call.call, SubmitReply(Verdict.QUEUE_FULL))), Refused)
    assert rig.journal.entries


def test_requests_wait_for_a_scheduler_that_was_there_before(rig):
    rig(Closed(rig.conn))
    assert not only(rig(start()), Refused)
    rig.now += 200 * MS
    assert [call.request.attempt for call in only(rig.attach(6), Call)] == [1]


def test_waiting_is_bounded_in_number_and_time():
    assert only(Rig()(start()), Refused)[0].verdict == Verdict.NO_WORKER
    rig = Rig(max_waiting=1, wait_ns=500 * MS)
    rig.attach()
    rig(Closed(rig.conn))
    assert not only(rig(start()), Refused)
    assert only(rig(start(RequestId(b"s" * 16))), Refused)[0].verdict == Verdict.QUEUE_FULL
    (refused,) = only(rig.wait(550), Refused)
    assert (refused.request_id, refused.verdict) == (RID, Verdict.NO_WORKER)


def test_the_journal_is_bounded_in_bytes():
    rig = Rig(max_bytes=20_000, reserve_tokens=10)
    rig.attach()
    submit = rig.submit(start(max_tokens=5000))
    assert only(rig(start(RequestId(b"s" * 16), prompt=5000)), Refused)[0].verdict == Verdict.QUEUE_FULL
    assert only(rig.tokens(submit, 0, list(range(100))), Emit)
    assert 17_000 < rig.journal.bytes_used <= 20_000
    rig.tokens(submit, 100, [1] * 4000)
    out = rig.tokens(submit, 4100, [1] * 10)
    assert [end.error_code for end in only(out, Ended)] == ["journal_full"]
    assert rig.journal.bytes_used == 0


def test_a_request_id_in_use_is_refused(rig):
    rig.submit()
    assert only(rig(start()), Refused)[0].verdict == Verdict.INVALID
    assert len(rig.journal.entries) == 1


def test_logprobs_follow_their_ids_past_an_overlap(rig):
    submit = rig.submit(start(top_logprobs=1))

    def columns(*ids):
        return LogprobColumns(
            i32(*[0] * len(ids)),
            np.array([2] * len(ids), np.uint8),
            i32(*[token for pair in ids for token in (pair, 99)]),
            np.array([-0.5, -1.0] * len(ids), np.float32),
        )

    rig.tokens(submit, 0, [7, 8], logprobs=columns(7, 8))
    (emit,) = only(rig.tokens(submit, 1, [8, 9], logprobs=columns(8, 9)), Emit)
    assert (emit.base, emit.ids, emit.logprobs) == (2, (9,), (TokenLogprobs((9, 99), (-0.5, -1.0)),))
    assert counts(rig.tokens(submit, 3, [10]), True) == ["logprobs_missing"]


def test_an_error_row_carries_its_code(rig):
    submit = rig.submit()
    out = rig.tokens(submit, 0, [], finish=FinishReason.ERROR, errors=(RowError(0, "worker_lost", "gone"),))
    assert only(out, Ended) == [Ended(RID, 0, FinishReason.ERROR, "worker_lost", "gone")]


def test_the_latest_count_of_kills_goes_with_the_next_attempt(rig):
    submit = rig.submit()
    named = submit.choices[0]
    rig.receive(MovedRows(i32(named.row), i32(named.row_gen), i32(2)))
    rig.receive(MovedRows(i32(named.row), i32(named.row_gen), i32(1)))
    rig.receive(MovedRows(i32(named.row), i32(named.row_gen + 1), i32(2)))
    rig(Closed(rig.conn))
    rig.now += 200 * MS
    rig.attach(6)
    assert only(rig.wait(100), Call)[0].request.kill_count == 1


def test_status_is_kept_and_not_ready_without_a_scheduler(rig):
    assert not rig.journal.status.ready
    rig.receive(SchedulerStatus(ready=True, draining=True, running=3))
    assert rig.journal.status.ready
    rig(Closed(rig.conn))
    assert not rig.journal.status.ready and rig.journal.status.running == 3
    assert not rig.journal.status.draining, "requests may wait for the one that follows"


def test_a_silent_scheduler_is_given_up(rig):
    rig.now += 2000 * MS
    out = rig(Tick())
    assert only(out, Close) and not rig.journal.attached
    rig.now = only(out, WakeAt)[0].at_ns
    assert only(rig(Tick()), Dial)


def test_heartbeats_are_sent_twice_a_second(rig):
    assert len(sent(rig.wait(2000), Heartbeat)) == 4


def test_timers_do_not_pile_up(rig):
    for number in range(500):
        rid = RequestId(number.to_bytes(16, "little"))
        submit = rig.submit(start(rid))
        rig.tokens(submit, 0, [1], finish=FinishReason.STOP)
    assert len(rig.journal._timers) < 100


def test_a_request_that_began_elsewhere_goes_on(rig):
    source = GrammarSource(kind=GrammarKind.REGEX, text="a+", grammar_rev="v7")
    begun = replace(start(n=2, grammar=source), emitted=((4, 5), None), attempts=2, kills=1)
    (call,) = only(rig(begun), Call)
    (choice,) = call.request.choices
    assert (choice.choice, choice.emitted) == (0, (4, 5))
    assert (call.request.attempt, call.request.kill_count, call.request.grammar) == (3, 1, source)
    assert not only(rig(Replied(call.call, SubmitReply(Verdict.QUEUE_FULL))), Refused), "its client has tokens already"
    (call,) = only(rig.wait(500), Call)
    rig(Replied(call.call, SubmitReply(Verdict.ACCEPTED)))
    effects = rig.tokens(call.request, 1, [5, 6], FinishReason.STOP)
    assert [(effect.base, effect.ids) for effect in only(effects, Emit)] == [(2, (6,))]
    assert len(only(effects, Ended)) == 1 and not rig.journal.entries and not rig.journal.bytes_used


def test_what_is_taken_back_is_what_the_client_has(rig):
    submit = rig.submit(start(n=2))
    rig.tokens(submit, 0, [8], FinishReason.STOP, choice=1)
    rig.tokens(submit, 0, [4, 5])
    begun = entry.resumed(rig.journal.entries[RID], rig.now + 1000 * MS)
    assert (begun.emitted, begun.attempts, begun.deadline_ms) == (((4, 5), None), 1, 59_000)
