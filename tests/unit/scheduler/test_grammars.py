"""Constrained requests: they queue while their grammar is compiled, hold no slot until it is there, and go on after."""

import dataclasses

import pytest

from meshkit.frames import Verdict
from meshkit.types import FinishReason, GrammarKind, GrammarSource
from scheduler_svc.core.events import Outcome
from scheduler_svc.core.request import Phase
from tests.unit.scheduler.mesh import Mesh, id_of

SOURCE = GrammarSource(kind=GrammarKind.REGEX, text="a+")
OTHER = GrammarSource(kind=GrammarKind.REGEX, text="b+")
LATER = (Verdict.GRAMMAR_LATER, 1_000)


def ready(**limits):
    m = Mesh(grammar=True, **limits)
    m.worker()
    return m, m.gate()


def replied(m, journal):
    return m.replies.get(journal.call)


def accept(m, *journals, **how):
    """Answer the oldest compile; these requests run under it."""
    grammar_id = m.answer(**how)
    for j in journals:
        assert replied(m, j).verdict is Verdict.ACCEPTED
        j.grammar_id = grammar_id


def inits(m):
    return [init for w in m.workers.values() for frame in (*w.log, *w.frames) for init in frame.inits]


def test_a_pending_request_waits_without_a_slot_and_runs_under_its_grammar():
    m, g = ready()
    j = m.submit(g, grammar=dataclasses.replace(SOURCE, thinking=True), max_tokens=6)
    plain = m.submit(g, max_tokens=5)
    m.run()
    m.expect(plain)
    assert replied(m, j) is None and not j.streams[0].ids
    (seq,) = m.core.state.requests[j.request_id].choices
    status = m.core.status()
    assert seq.phase is Phase.PENDING and m.core.load()["grammar_queue"] == 1
    assert (status.waiting, status.grammar_queue) == (1, 1)
    accept(m, j)
    assert replied(m, j).grammar_rev == "rev1"
    m.run()
    m.expect(j)
    (init,) = [i for i in inits(m) if i.request_id == j.request_id]
    assert init.grammar_id == id_of(SOURCE.kind, SOURCE.text, "rev1") and init.thinking
    m.idle()


def test_one_compile_serves_all_who_name_the_source():
    m, g = ready()
    first, second = (m.submit(g, grammar=SOURCE, max_tokens=40, ignore_eos=True) for _ in range(2))
    assert len(m.compiles) == 1
    accept(m, first, second)
    third = m.submit(g, grammar=SOURCE, max_tokens=3)
    assert not m.compiles and third.verdict == replied(m, first), "a live grammar need not be asked for"
    third.grammar_id = first.grammar_id
    m.run()
    m.expect(first, second, third)
    m.submit(g, grammar=SOURCE, max_tokens=3)
    assert len(m.compiles) == 1, "nobody used it any more: the service may have evicted it"
    m.answer()
    m.idle()


def test_arrival_decides_once_the_grammar_is_there():
    m, g = ready(depth=1)
    m.workers["w0"].hello = dataclasses.replace(m.workers["w0"].hello, slots=1)
    m.worker(m.workers["w0"])
    running = m.submit(g, max_tokens=10, ignore_eos=True)
    j = m.submit(g, grammar=SOURCE, max_tokens=4)
    younger = m.submit(g, max_tokens=4)
    accept(m, j)
    m.run()
    assert [i.request_id for i in inits(m)] == [r.request_id for r in (running, j, younger)]
    m.expect(running, j, younger)
    m.idle()


def test_the_same_submit_again_waits_for_the_same_verdict():
    m, g = ready()
    j = m.submit(g, grammar=SOURCE, max_tokens=4)
    calls = []
    for _ in range(9):
        assert m.call(j.sub) is None or len(calls) >= 7
        calls.append(m.last_call)
    assert m.replies[j.call].verdict is Verdict.GRAMMAR_LATER, "only so many may wait; the oldest have given up"
    accept(m, compile=m.compiles[0])
    j.grammar_id = id_of(SOURCE.kind, SOURCE.text, "rev1")
    assert {m.replies[call] for call in calls[1:]} == {m.call(j.sub)}
    m.run()
    m.expect(j)
    assert m.call(j.sub).grammar_rev == "rev1"
    m.idle()


@pytest.mark.parametrize("outcome", [Outcome.INVALID, Outcome.TOO_LARGE])
def test_a_grammar_that_can_never_work_is_refused_with_its_place(outcome):
    m, g = ready()
    j = m.submit(g, grammar=SOURCE)
    m.answer(outcome, message="no such keyword", place="/properties/a")
    reply = replied(m, j)
    assert (reply.verdict, reply.place, reply.message) == (Verdict.BAD_GRAMMAR, "/properties/a", "no such keyword")
    assert m.call(j.sub) == reply
    assert not g.frames and not inits(m)
    m.idle()


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.CRASHED])
def test_a_compile_that_broke_is_refused_for_now(outcome):
    m, g = ready()
    j = m.submit(g, grammar=SOURCE)
    m.answer(outcome)
    assert (replied(m, j).verdict, replied(m, j).retry_after_ms) == LATER
    m.idle()


@pytest.mark.parametrize("outcome", [Outcome.BUSY, None])
def test_a_busy_or_absent_service_is_asked_again(outcome):
    m, g = ready()
    j = m.submit(g, grammar=SOURCE, max_tokens=4)
    for _ in range(3):
        m.answer(outcome)
        assert replied(m, j) is None and not m.compiles
        m.advance(2_100)
        assert len(m.compiles) == 1
    accept(m, j)
    m.run()
    m.expect(j)
    m.idle()


def test_who_was_refused_as_too_many_is_asked_for_when_a_compile_ends():
    m, g = ready()
    sources = [dataclasses.replace(SOURCE, text=text) for text in "abcd"]
    first, *others = [m.submit(g, grammar=source, max_tokens=4) for source in sources]
    for compile in m.compiles[1:]:
        m.answer(Outcome.BUSY, compile=compile)
    assert [c.text for c in m.compiles] == ["a"]
    accept(m, first)
    for j, text in zip(others, "bcd", strict=True):
        assert [c.text for c in m.compiles] == [text]
        accept(m, j)
    m.run()
    m.expect(first, *others)
    m.idle()


def test_a_new_request_waits_only_so_long():
    m, g = ready(grammar_wait_ms=3_000)
    lost, away = m.submit(g, grammar=SOURCE), m.submit(g, grammar=OTHER)
    m.answer(None, compile=m.compiles[1])
    m.advance(3_200)
    assert [(replied(m, j).verdict, replied(m, j).retry_after_ms) for j in (lost, away)] == [LATER] * 2
    for _ in range(len(m.compiles)):
        m.answer()
    m.idle()


def test_a_request_accepted_once_is_tried_until_its_deadline():
    m, g = ready(grammar_wait_ms=1_000)
    j = m.journal(8, max_tokens=5)
    j.streams[0].ids = [7]
    j.attempt = 1
    m.submit(g, journal=j, grammar=dataclasses.replace(SOURCE, grammar_rev="rev1"), remaining_ms=9_000)
    assert m.compiles[0].grammar_rev == "rev1"
    for outcome in (Outcome.TIMEOUT, Outcome.BUSY, None, Outcome.CRASHED):
        m.answer(outcome)
        m.advance(2_000)
        assert replied(m, j) is None
    m.advance(1_100)
    assert replied(m, j).verdict is Verdict.ACCEPTED and j.streams[0].error == "deadline"
    m.answer(None)
    m.idle()


def test_a_deadline_while_pending_is_told_once():
    m, g = ready()
    j = m.submit(g, grammar=SOURCE, n=2, remaining_ms=500)
    m.advance(600)
    assert replied(m, j).verdict is Verdict.ACCEPTED
    assert [s.error for s in j.streams] == ["deadline"] * 2
    assert m.call(j.sub).verdict is Verdict.ACCEPTED and not m.core.state.requests
    m.answer()
    m.idle()


@pytest.mark.parametrize("outcome", [Outcome.INVALID, Outcome.TIMEOUT, Outcome.OK, None])
def test_what_ended_while_nobody_listened_keeps_its_verdict_whatever_the_service_says(outcome):
    m, g = ready(grammar_wait_ms=30_000)
    j = m.submit(g, grammar=SOURCE, remaining_ms=1_000)
    m.lose(g)
    m.advance(1_500)
    assert replied(m, j).verdict is Verdict.ACCEPTED and not j.streams[0].error
    m.answer(outcome)
    m.advance(500)
    assert m.call(j.sub).verdict is Verdict.ACCEPTED
    m.gate(g)
    m.submit(g, journal=j, remaining_ms=1_000)
    assert j.verdict.verdict is Verdict.ACCEPTED and j.streams[0].error == "deadline"
    while m.compiles:
        m.answer()
    m.idle()


def test_a_cancel_while_pending_answers_and_is_remembered():
    m, g = ready()
    j = m.submit(g, grammar=SOURCE, n=2)
    m.close_choices(g, j, [0])
    assert replied(m, j) is None
    m.close_choices(g, j)
    assert replied(m, j).verdict is Verdict.CANCELLED and m.call(j.sub) == replied(m, j)
    m.answer()
    assert not inits(m)
    m.idle()


def test_a_higher_attempt_takes_over_a_pending_request():
    m, g = ready()
    j = m.submit(g, grammar=SOURCE, max_tokens=4)
    old = j.call
    m.gate(g)
    m.resubmit(g, [j])
    assert m.replies[old].verdict is Verdict.SUPERSEDED and replied(m, j) is None and len(m.compiles) == 1
    accept(m, j)
    m.run()
    m.expect(j)
    m.idle()


def test_without_a_service_constrained_requests_are_refused():
    m = Mesh()
    m.worker()
    g = m.gate()
    j = m.submit(g, grammar=SOURCE)
    assert j.verdict.verdict is Verdict.BAD_GRAMMAR and j.verdict.place == "scheduler.grammar"
    m.idle()


def test_pending_requests_count_as_waiting():
    m, g = ready(queue_requests=2, tenant_choices=0)
    m.submit(g, grammar=SOURCE, n=2)
    assert m.submit(g, grammar=SOURCE, n=2).verdict.verdict is Verdict.QUEUE_FULL
    assert m.core.state.queue.of_tenant("t")[0] == 2
    m.answer(Outcome.INVALID)
    assert m.core.state.queue.of_tenant("t") == (0, 0)
    m.idle()
    m, g = ready(grammar_bytes=10)
    assert m.submit(g, grammar=dataclasses.replace(SOURCE, text="a" * 11)).verdict.verdict is Verdict.INVALID


def test_resumed_and_copied_slots_get_all_ids_that_were_emitted():
    m, g = ready(depth=2)
    w = m.worker(group="w1", slots=3, pages=5)
    m.lose(m.workers["w0"])
    many = [m.submit(g, prompt=200, n=2, grammar=SOURCE, max_tokens=120, ignore_eos=True, seed=i) for i in range(2)]
    accept(m, *many)
    m.run()
    assert m.core.counters["preemptions"] and any(i.emitted for i in inits(m))
    m.expect(*many)
    again = [m.submit(g, grammar=OTHER, max_tokens=60, ignore_eos=True, seed=i) for i in range(2)]
    accept(m, *again)
    m.steps(20)
    m.lose(w)  # it crashes
    m.worker(group="w1", boot=2)
    m.run()
    m.expect(*again)
    assert all(len(i.emitted) == i.n_emitted for i in inits(m))
    m.idle()


def test_a_dumped_slot_waits_for_the_grammar_of_its_request():
    m, g = ready()
    w = m.workers["w0"]
    j = m.submit(g, grammar=SOURCE, max_tokens=50, ignore_eos=True)
    accept(m, j)
    m.steps(10)
    fresh = Mesh(grammar=True)  # the scheduler crashes
    fresh.next_id = m.next_id
    fresh.worker(w)
    g2 = fresh.gate()
    fresh.submit(g2, journal=j, grammar=dataclasses.replace(SOURCE, grammar_rev="rev1"))
    fresh.advance(1_500)
    assert not w.frames and w.slots, "the slot is kept, and not run"
    accept(fresh, j)
    fresh.run()
    fresh.expect(j)
    assert fresh.core.counters["slots_adopted"] == 1
    fresh.idle()


def test_a_dumped_slot_of_another_revision_is_not_adopted():
    m, g = ready()
    w = m.workers["w0"]
    j = m.submit(g, grammar=SOURCE, max_tokens=50, ignore_eos=True)
    accept(m, j)  # it runs, but its gateway has no id of it yet
    bound = w.frames[0].inits[0].grammar_id
    while w.frames:
        w.run(w.frames.popleft())
    fresh = Mesh(grammar=True)  # the scheduler crashes, and the grammar service is upgraded
    fresh.next_id = m.next_id
    fresh.worker(w)
    fresh.submit(fresh.gate(), journal=j, grammar=SOURCE)
    j.grammar_id = fresh.answer(rev="rev2")
    assert j.grammar_id != bound
    fresh.advance(1_500)
    fresh.run()
    fresh.expect(j)
    assert fresh.core.counters["slots_not_adopted"] == 1 and not fresh.core.counters.get("slots_adopted")
    fresh.idle()


def test_another_grammar_process_gets_all_live_grammars():
    m, g = ready()
    m.grammar_boot(1)
    live = m.submit(g, grammar=SOURCE, max_tokens=60, ignore_eos=True)
    accept(m, live)
    pending = m.submit(g, grammar=OTHER, max_tokens=4)
    m.steps(3)
    m.grammar_boot(2)
    again, asked = m.compiles[1], m.compiles[0]
    assert (again.text, again.grammar_rev) == (SOURCE.text, "rev1")
    m.answer(compile=again)
    accept(m, pending, compile=asked)
    (late,) = m.compiles
    assert late.text == OTHER.text, "asked before the new process was known: its answer may be the old one's"
    m.answer()
    m.grammar_boot(2)
    assert not m.compiles, "the same process needs nothing"
    m.run()
    m.expect(live, pending)
    m.idle()


def test_a_service_under_another_revision_ends_what_it_cannot_serve():
    m, g = ready()
    j = m.submit(g, grammar=SOURCE, max_tokens=60, ignore_eos=True)
    accept(m, j)
    m.steps(3)
    m.grammar_boot(2)
    m.answer(Outcome.INVALID, message="another revision")
    assert j.streams[0].reason is FinishReason.ERROR and j.streams[0].error == "grammar_failed"
    m.idle()


def test_a_row_that_waits_for_masks_has_its_grammar_asked_for_again():
    m, g = ready()
    j = m.submit(g, grammar=SOURCE, max_tokens=6, ignore_eos=True)
    accept(m, j)
    w = m.workers["w0"]
    w.park = lambda row: bool(row[1].out)
    m.steps(3)
    assert not m.compiles
    m.now += 1_100 * 10**6
    m.steps(3)
    assert [c.grammar_rev for c in m.compiles] == ["rev1"]
    w.park = lambda row: False
    m.run()
    m.expect(j)
    m.answer()
    m.idle()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_failed_row_ends_its_choice_with_the_workers_reason(depth):
    m, g = ready(depth=depth)
    w = m.workers["w0"]
    j = m.submit(g, prompt=300, n=2, grammar=SOURCE, max_tokens=30, ignore_eos=True)
    other = m.submit(g, max_tokens=30, ignore_eos=True)
    accept(m, j)
    w.fail = lambda row: ("grammar_failed", "dead end") if row[1].init.choice == 1 and len(row[1].out) == 4 else None
    m.run()
    assert [(len(s.ids), s.reason, s.error) for s in j.streams] == [
        (30, FinishReason.LENGTH, ""),
        (4, FinishReason.ERROR, "grammar_failed"),
    ]
    m.expect(other)
    assert m.core.counters["rows_failed"] == 1
    m.idle()


def test_a_fault_of_the_first_sample_ends_the_choice():
    m, g = ready()
    m.workers["w0"].fail = lambda row: ("sampling_fault", "not a number")
    j = m.submit(g, prompt=300)
    m.run()
    assert j.streams[0].error == "sampling_fault" and not j.streams[0].ids
    m.idle()
