"""Verdicts: idempotency, attempts, tombstones, bounds, deadlines, drain."""

import dataclasses

import numpy as np

from meshkit import frames as f
from meshkit.frames import Verdict
from meshkit.types import FinishReason, GrammarKind, GrammarSource
from scheduler_svc.core.submit import SPARE_DEADLINES
from tests.unit.scheduler.mesh import Mesh


def ready(**limits):
    m = Mesh(**limits)
    m.worker()
    return m, m.gate()


def test_the_same_key_gets_the_same_answer_for_a_minute():
    m, g = ready()
    j = m.submit(g, max_tokens=5)
    assert m.call(j.sub) == j.verdict
    m.run()
    m.expect(j)
    assert m.call(j.sub) == j.verdict, "finished meanwhile: still the same"
    assert m.core.counters["submits_accepted"] == 1
    m.advance(61_000)
    m.idle()


def test_a_live_request_outlives_its_remembered_answer():
    m, g = ready(tombstones=1)
    j = m.submit(g, max_tokens=50, ignore_eos=True)
    m.steps(3)
    for _ in range(3):
        m.submit(g, max_tokens=1)
    assert j.request_id not in m.core.state.known
    assert m.call(j.sub).verdict is Verdict.ACCEPTED
    assert m.call(dataclasses.replace(j.sub, attempt=0)).verdict is Verdict.SUPERSEDED
    m.run()
    m.expect(j)
    assert not m.core.counters.get("rebinds")
    m.idle()


def test_lower_attempts_are_superseded_even_after_the_end():
    m, g = ready()
    j = m.journal(8, max_tokens=5)
    first = m.request(g, j)
    m.submit(g, journal=j)
    assert m.call(first).verdict is Verdict.SUPERSEDED
    m.advance(1100)  # a resubmission waits for dumps at first
    m.run()
    m.expect(j)
    assert m.call(first).verdict is Verdict.SUPERSEDED
    m.idle()


def test_an_old_attachment_is_stale_and_its_frames_are_dropped():
    m, g = ready()
    j = m.submit(g, max_tokens=50, ignore_eos=True)
    old = g.attach_id
    sub = j.sub
    m.gate(g)
    assert m.call(dataclasses.replace(sub, attempt=5)).verdict is Verdict.STALE_ATTACH
    row, gen = sub.choices[0].row, sub.choices[0].row_gen
    m.up(g, f.CancelRows(np.array([row], np.int32), np.array([gen], np.int32)), attach_id=old)
    assert m.core.counters["frames_stale"] == 1
    m.resubmit(g, [j])
    m.run()
    m.expect(j)
    m.idle()


def test_a_cancel_before_its_submit_is_a_tombstone():
    m, g = ready()
    j = m.journal(8, n=2, max_tokens=5)
    sub = m.request(g, j)
    rows = np.array([c.row for c in sub.choices], np.int32)
    gens = np.array([c.row_gen for c in sub.choices], np.int32)
    m.up(g, f.CancelRows(rows, gens))
    assert m.call(sub).verdict is Verdict.CANCELLED
    m.run()
    m.idle()
    assert not m.core.counters.get("steps")
    m.advance(61_000)
    assert not m.core.state.tombstones and not m.core.state.known


def test_a_tombstone_of_one_choice_leaves_the_others():
    m, g = ready()
    j = m.journal(8, n=2, max_tokens=5)
    sub = m.request(g, j)
    gone = sub.choices[0]
    m.up(g, f.CancelRows(np.array([gone.row], np.int32), np.array([gone.row_gen], np.int32)))
    g.rows = {k: (j, c) for k, c in j.rows.items() if c == 1}
    assert m.call(sub).verdict is Verdict.ACCEPTED
    m.run()
    assert not j.streams[0].ids and j.streams[1].reason
    m.idle()


def test_tombstones_are_bounded():
    m, g = ready(tombstones=10)
    m.up(g, f.CancelRows(np.arange(50, dtype=np.int32), np.arange(50, dtype=np.int32)))
    assert len(m.core.state.tombstones) == 10
    for _ in range(30):
        m.submit(g, max_tokens=1)
    assert len(m.core.state.known) == 10
    m.run()
    m.idle()


def test_queue_bounds_by_count_and_bytes():
    m, g = ready(queue_requests=6)
    js = []
    for _ in range(12):
        js.append(m.submit(g, max_tokens=500, ignore_eos=True))
        m.steps(1)
    verdicts = [j.verdict.verdict for j in js]
    assert verdicts == [Verdict.ACCEPTED] * 10 + [Verdict.QUEUE_FULL] * 2, "four run, six wait"
    assert 250 <= js[-1].verdict.retry_after_ms <= 30_000
    m, g = ready(queue_bytes=10_000)
    js = [m.submit(g, prompt=1000, max_tokens=500) for _ in range(8)]
    assert [j.verdict.verdict for j in js][-1] is Verdict.QUEUE_FULL


def test_never_fits_names_the_limit():
    m, g = ready()
    over = m.submit(g, prompt=10, max_tokens=100_000)
    assert over.verdict.verdict is Verdict.NEVER_FITS and "context of 100000" in over.verdict.message


def test_no_worker_ever():
    m = Mesh(no_worker_grace_ms=1000)
    g = m.gate()
    early = m.submit(g, max_tokens=5)
    assert early.verdict.verdict is Verdict.ACCEPTED, "a worker may still come"
    m.advance(1500)
    assert m.submit(g, max_tokens=5).verdict.verdict is Verdict.NO_WORKER
    assert not g.status.ready
    m.worker()
    assert g.status.ready and g.status.model is not None
    m.run()
    m.expect(early)
    m.idle()


def test_requests_wait_for_a_configured_worker_and_are_measured_when_it_comes():
    m = Mesh(workers=("w0",))
    g = m.gate()
    m.advance(60_000)
    fits = m.submit(g, max_tokens=5)
    huge = m.submit(g, prompt=256 * 20, max_tokens=5)
    assert fits.verdict.verdict is huge.verdict.verdict is Verdict.ACCEPTED
    m.worker(pages=16)
    assert huge.streams[0].error == "never_fits"
    m.run()
    m.expect(fits)
    m.idle()


def test_invalid_submits_name_the_field():
    m, g = ready()
    good = m.request(g, m.journal(300, n=2, max_tokens=5))
    bad = {
        "prompt": {"prompt": np.empty(0, np.int32)},
        "choices": {"choices": ()},
        "page_keys": {"page_keys": (b"x" * 16, b"y" * 16)},
        "max_tokens": {"params": dataclasses.replace(good.params, max_tokens=0)},
        "prompt: an id": {"prompt": np.array([60_000], np.int32)},
        "twice": {"choices": (good.choices[0], good.choices[0])},
    }
    for i, (word, change) in enumerate(bad.items()):
        reply = m.call(dataclasses.replace(good, request_id=bytes([i]) * 16, **change))
        assert reply.verdict is Verdict.INVALID and word in reply.message
    assert not m.core.load()["requests"]


def test_deadlines_end_queued_and_running_requests():
    m, g = ready()
    running = [m.submit(g, max_tokens=3000, ignore_eos=True, remaining_ms=700) for _ in range(4)]
    queued = m.submit(g, max_tokens=5, remaining_ms=300)
    m.steps(3)
    m.advance(400)
    assert queued.streams[0].error == "deadline"
    assert not running[0].streams[0].reason
    assert m.wake <= m.now + 250_000_000
    m.advance(400)
    assert {j.streams[0].error for j in running} == {"deadline"}
    assert all(j.streams[0].ids for j in running)
    m.run()
    m.idle()


def test_cancel_frees_in_the_next_frame_in_any_phase():
    m = Mesh(depth=2, chunk_tokens=100)
    w = m.worker(slots=2, pages=12)
    g = m.gate()
    decoding = m.submit(g, prompt=5, max_tokens=500, ignore_eos=True)
    m.steps(3)
    prefilling = m.submit(g, prompt=600, max_tokens=5)
    queued = m.submit(g, prompt=600, max_tokens=5)
    m.steps(3)
    assert len(w.slots) == 2
    for j in (decoding, prefilling, queued):
        m.close_choices(g, j)
    m.steps(3)
    assert not w.slots
    m.run()
    m.idle()


def test_cancel_of_one_choice_during_a_shared_prefill():
    for victim in (0, 1, 2):
        m = Mesh(depth=2, chunk_tokens=100)
        m.worker(slots=4, pages=20)
        g = m.gate()
        j = m.submit(g, prompt=600, n=3, max_tokens=9)
        m.steps(2)
        m.close_choices(g, j, [victim])
        m.run()
        for c, s in enumerate(j.streams):
            assert bool(s.reason) == (c != victim)
        m.idle()


def test_stop_rows_end_a_choice_without_a_word():
    m = Mesh(depth=2)
    w = m.worker()
    g = m.gate()
    j = m.submit(g, max_tokens=100, ignore_eos=True)
    m.steps(6)
    frames = len(g.frames)
    m.close_choices(g, j, stop=True)
    m.run()
    assert len(g.frames) == frames and not w.slots
    m.idle()


def test_finish_meets_cancel():
    m = Mesh(depth=2)
    m.worker()
    g = m.gate()
    j = m.submit(g, max_tokens=3, ignore_eos=True)
    key = next(iter(g.rows))
    m.run()
    m.expect(j)
    m.up(g, f.CancelRows(np.array([key[0]], np.int32), np.array([key[1]], np.int32)))
    assert m.core.counters["closes_unknown"] == 1
    m.idle()


def test_drain_refuses_new_ones_and_finishes_the_rest():
    m, g = ready()
    j = m.submit(g, max_tokens=40, ignore_eos=True)
    m.steps(3)
    m.drain()
    assert g.status.draining and not g.status.ready and not m.drained
    late = m.submit(g, max_tokens=5)
    assert late.verdict.verdict is Verdict.DRAINING and late.verdict.retry_after_ms
    m.gate(g)
    m.resubmit(g, [j])
    m.run()
    m.expect(j)
    m.advance(300)
    assert m.drained
    m.idle()


def test_poisoned_submits_are_refused():
    m, g = ready()
    j = m.submit(g, max_tokens=5, kills=2)
    assert j.verdict.verdict is Verdict.POISONED


def test_stop_ids_and_min_tokens_name_the_reason():
    m, g = ready()
    probe = m.submit(g, max_tokens=30, ignore_eos=True, seed=5, prompt=[7, 8])
    m.run()
    token = probe.streams[0].ids[10]
    stopped = m.submit(g, max_tokens=30, ignore_eos=True, seed=5, prompt=[7, 8], stop_ids=(token,))
    later = m.submit(g, max_tokens=30, ignore_eos=True, seed=5, prompt=[7, 8], stop_ids=(token,), min_tokens=12)
    m.run()
    m.expect(stopped, later)
    assert stopped.streams[0].reason is FinishReason.STOP and len(stopped.streams[0].ids) == 11
    assert len(later.streams[0].ids) == 30
    m.idle()


def test_penalties_carry_the_ids_they_read():
    m, g = ready()
    w = m.workers["w0"]
    m.submit(g, prompt=[5, 6, 7], max_tokens=4, repetition_penalty=1.1)
    m.submit(g, prompt=[5, 6, 7], max_tokens=4, presence_penalty=0.5)
    m.submit(g, prompt=[5, 6, 7], max_tokens=4)
    m.run()
    assert [i.prompt for fr in w.log for i in fr.inits] == [(5, 6, 7), (), ()]
    m.idle()


def test_deadlines_of_ended_requests_do_not_pile_up_and_those_of_living_ones_stay():
    m, g = ready(grammar=True, grammar_wait_ms=10**9)
    living = m.submit(g, grammar=GrammarSource(kind=GrammarKind.REGEX, text="a+"), remaining_ms=5_000)
    for _ in range(2 * SPARE_DEADLINES):
        m.submit(g, max_tokens=1)
        m.run()
        assert len(m.core.state.deadlines) <= SPARE_DEADLINES + 6
    m.advance(6_000)
    assert living.streams[0].error == "deadline"
    m.answer()
    m.idle()
