"""Streams break, processes restart: fences, adoption, kills, grace, watchdogs, resubmission."""

import dataclasses

import numpy as np
import pytest

from meshkit import frames as f
from meshkit.frames import Verdict
from meshkit.types import FinishReason
from scheduler_svc.core.config import SchedulerLimits
from tests.unit.scheduler.fake import MODEL, FakeWorker, reference
from tests.unit.scheduler.mesh import Mesh


def busy(depth=1, slots=4, pages=24, tails=8, steps=8, **kw):
    """A mesh with a decoding request, a shared prefill and a waiting one."""
    m = Mesh(depth=depth, chunk_tokens=120, **kw)
    m.worker(slots=slots, pages=pages, tails=tails)
    g = m.gate()
    js = [m.submit(g, prompt=30, max_tokens=60, ignore_eos=True)]
    m.steps(steps)
    js += [m.submit(g, prompt=300, n=2, max_tokens=20), m.submit(g, prompt=700, max_tokens=9)]
    js += [m.submit(g, prompt=900, max_tokens=9)]
    m.steps(3)
    return m, g, js


# ---- workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_worker_back_with_the_same_boot_goes_on_with_its_slots(depth, held):
    m, _, js = busy(depth)
    w = m.workers["w0"]
    inits = sum(len(fr.inits) for fr in w.log)
    m.redial(w, held=held)
    assert m.core.counters["slots_adopted"] >= 1
    m.run()
    m.expect(*js)
    m.idle()
    assert sum(len(fr.inits) for fr in w.log) <= inits + 5
    assert all(s.kills == 0 for j in js for s in j.streams), "a break is no crash"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_restarted_worker_starts_over_and_the_crash_counts_once(depth):
    m, _, js = busy(depth)
    m.lose(m.workers["w0"])
    kills = [s.kills for j in js for s in j.streams]
    assert kills[0] == 1 and kills[-1] == 0, "the waiting one was not running"
    m.worker(boot=2, slots=4, pages=24, tails=8)
    m.run()
    m.expect(*js)
    m.idle()
    assert not m.core.counters.get("slots_adopted")


def test_two_crashes_poison_what_was_running_at_both():
    m, _, js = busy()
    for boot in (2, 3):
        m.lose(m.workers["w0"])
        m.worker(boot=boot, slots=4, pages=24, tails=8)
        m.steps(2)
    assert js[0].streams[0].error == "request_poisoned"
    m.run()
    assert not js[-1].streams[0].error
    m.expect(js[-1])
    m.idle()


def test_two_breaks_poison_nobody():
    m, _, js = busy()
    for _ in range(4):
        m.redial(m.workers["w0"])
        m.steps(3)
    m.run()
    m.expect(*js)
    m.idle()


def test_a_request_lost_by_two_groups_waits_until_the_losses_are_understood():
    m, g, _ = busy()
    m.run()
    m.worker(group="w1", pages=24, boot=9)
    j = m.submit(g, prompt=40, max_tokens=400, ignore_eos=True)
    for _ in range(2):
        m.steps(3)
        holder = next(w for w in m.workers.values() if w.slots and w.conn in m.conns)
        m.lose(holder)
    m.worker(group="w2", pages=24)
    m.steps(5)
    assert not m.workers["w2"].slots, "a third worker is not risked"
    m.advance(6000)
    assert j.streams[0].error == "request_poisoned"
    m.idle()


def test_a_worker_back_late_with_the_same_boot_did_not_crash():
    m, _, js = busy()
    w = m.workers["w0"]
    for _ in range(3):
        m.lose(w)
        m.advance(8000)
        assert js[0].streams[0].kills == 1
        m.redial(w)
        assert js[0].streams[0].kills == 0
        m.steps(2)
    m.run()
    m.expect(*js)
    m.idle()


def test_with_a_second_group_the_lost_ones_move_at_once():
    m, _, js = busy()
    m.worker(group="w1", pages=24, tails=8)
    first = m.workers["w0"]
    m.lose(first)
    m.run()
    m.expect(*js)
    m.redial(first)
    m.idle()
    assert m.core.counters["slots_not_adopted"] + m.core.counters.get("orphans_expired", 0) >= 1 or not first.slots


def test_a_clean_bye_counts_no_crash():
    m, _, js = busy()
    m.up(m.workers["w0"], f.Bye("drain"))
    m.worker(boot=2, pages=24, tails=8)
    m.run()
    m.expect(*js)
    assert all(s.kills == 0 for j in js for s in j.streams)
    m.idle()


@pytest.mark.parametrize(
    "change, word",
    [
        ({"proto_rev": 99}, "proto_rev"),
        ({"model": dataclasses.replace(MODEL, kv_layout_id="other")}, "kv_layout_id"),
        ({"model": dataclasses.replace(MODEL, revision="other")}, "revision"),
        ({"model": dataclasses.replace(MODEL, max_context=5)}, "model"),
        ({"pages": 0}, "pages"),
        ({"max_verify": 0}, "max_verify"),
    ],
)
def test_a_worker_that_does_not_match_is_refused_with_the_reason(change, word):
    m, _, js = busy()
    w = FakeWorker(group="w1")
    w.hello = dataclasses.replace(w.hello, **change)
    m.worker(w)
    assert word in w.bye and w.conn not in m.conns and "w1" not in m.core.state.workers
    m.run()
    m.expect(*js)


def test_a_new_model_is_welcome_once_nothing_of_the_old_one_is_left():
    m = Mesh()
    w = m.worker()
    m.lose(w)
    new = FakeWorker(boot=2)
    new.hello = dataclasses.replace(new.hello, model=dataclasses.replace(MODEL, revision="r2"))
    m.worker(new)
    assert not new.bye and m.core.status().model.revision == "r2"


def test_an_upgrade_of_the_only_group_ends_what_its_predecessor_began():
    m, g, js = busy()
    new = FakeWorker(boot=2, pages=24)
    new.hello = dataclasses.replace(new.hello, model=dataclasses.replace(MODEL, revision="r2"))
    m.worker(new)
    assert {s.error for j in js for s in j.streams if not s.reason or s.error} == {"model_changed"}
    after = m.submit(g, max_tokens=5)
    m.run()
    m.expect(after)
    m.idle()


def test_a_gateway_of_another_revision_is_refused():
    m = Mesh()
    g = m.gate()
    old = g.conn
    del m.conns[old]
    m.open(g, "gateway")
    m.up(g, f.GatewayHello("g9", 1, "b", 99), 0)
    assert "proto_rev" in g.byes[-1] and g.conn not in m.conns


def test_the_first_frame_must_be_hello_and_silence_is_closed():
    m = Mesh()
    w = FakeWorker()
    w.attach_id, w.bye = 0, ""
    m.open(w, "worker")
    m.up(w, f.Heartbeat(), 0)
    assert "Hello" in w.bye
    m.open(w, "worker")
    m.advance(2500)
    assert w.conn not in m.conns


def test_results_of_an_old_attachment_change_nothing():
    m, _, js = busy(depth=2)
    w = m.workers["w0"]
    old, result = w.attach_id, w.run(w.frames.popleft())
    m.redial(w)
    before = m.core.load()
    m.up(w, result, attach_id=old)
    assert m.core.load() == {**before, "frames_stale": 1}
    m.run()
    m.expect(*js)
    m.idle()


def test_a_failed_step_ends_the_attachment_and_blames_its_chunks():
    m = Mesh(chunk_tokens=100)
    w = m.worker(pages=24)
    g = m.gate()
    calm = m.submit(g, prompt=10, max_tokens=80, ignore_eos=True)
    m.steps(3)
    bad = m.submit(g, prompt=350, max_tokens=9)
    m.steps(1)
    for boot_kills in (1, 2):
        frame = w.frames.popleft()
        chunked = {int(s) for s in frame.slots[frame.chunk_rows]}
        m.up(w, f.ResultFrame(step=frame.step, error="out of memory"))
        assert w.conn not in m.conns
        for slot in chunked | {i.slot for i in frame.inits}:
            w.slots.pop(slot, None)
        m.redial(w, held=False)
        if boot_kills == 1:
            assert (calm.streams[0].kills, bad.streams[0].kills) == (0, 1)
            m.steps(1)
    assert bad.streams[0].error == "request_poisoned"
    m.run()
    m.expect(calm)
    m.idle()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: dataclasses.replace(r, step=99),
        lambda r: dataclasses.replace(r, states=r.states[:-1]),
        lambda r: dataclasses.replace(r, tokens=np.append(r.tokens, np.int32(3))),
        lambda r: dataclasses.replace(
            r, spare_rows=np.array([77], np.int32), spare_positions=np.array([256], np.int32)
        ),
    ],
)
def test_a_malformed_result_closes_the_stream_and_nobody_notices(spoil):
    m, _, js = busy()
    w = m.workers["w0"]
    m.up(w, spoil(w.run(w.frames.popleft())))
    assert m.core.faults.pop("bad_result") == 1 and w.conn not in m.conns
    m.redial(w)
    m.run()
    m.expect(*js)
    m.idle()


def test_bad_dumps_are_refused():
    for change in ({"slot": 99}, {"pages": (0, 999)}, {"pages": ()}, {"spare": 50}):
        m, _, _ = busy()
        w = m.workers["w0"]
        m.lose(w)
        m.worker(w, dump=False)
        dump = w.dump()
        slot = dataclasses.replace(dump.slots[0], **change)
        m.up(w, dataclasses.replace(dump, slots=(slot, *dump.slots[1:])))
        assert "dump" in w.bye and m.core.faults == {"bad_dump": 1}


def test_pools_are_quarantined_until_the_dump_is_complete():
    m = Mesh()
    w = m.worker(dump=False)
    g = m.gate()
    j = m.submit(g, max_tokens=5)
    load = m.core.load()
    assert load["pages_quarantined"] == 16 and not load["pages_free"] and not g.status.ready
    m.up(w, f.Dump())
    assert not w.frames
    m.up(w, f.Dump(last=True))
    assert w.frames and not m.core.load()["pages_quarantined"]
    m.run()
    m.expect(j)
    m.idle()


def test_silence_kills_a_peer_after_two_seconds():
    m, _, js = busy()
    m.advance(1900, beats=False)
    assert m.workers["w0"].conn in m.conns
    m.advance(600, beats=False)
    assert not m.conns
    m.worker(m.workers["w0"])
    m.gate(m.gates["g0"])
    m.resubmit(m.gates["g0"], js)
    m.run()
    m.expect(*js)
    m.idle()


def test_a_step_past_its_deadline_kills_the_worker():
    m, _, js = busy()
    w = m.workers["w0"]
    m.up(w, f.Heartbeat(w.step + 1, 900))
    assert w.conn in m.conns
    m.up(w, f.Heartbeat(w.step + 1, 1100))
    assert w.conn not in m.conns and m.core.counters["steps_overdue"] == 1
    m.redial(w)
    m.run()
    m.expect(*js)
    m.idle()


def test_first_steps_may_take_long_and_a_lost_frame_is_noticed():
    m = Mesh()
    w = m.worker()
    g = m.gate()
    j = m.submit(g, max_tokens=5)
    m.up(w, f.Heartbeat(1, 30_000))
    assert w.conn in m.conns
    m.advance(11_000)
    assert w.conn not in m.conns and m.core.faults.pop("frame_lost") == 1
    m.redial(w, held=False)
    m.run()
    m.expect(j)
    m.idle()


def test_our_own_stall_is_not_our_peers_silence():
    m, _, js = busy()
    m.now += 60_000_000_000
    m.run()
    m.expect(*js)
    m.idle()


def test_heartbeats_and_status_go_out():
    m = Mesh()
    w = m.worker()
    m.gate()
    m.effects.clear()
    m.advance(3000)
    beats = [e for e in m.effects if hasattr(e, "envelope") and isinstance(e.envelope.frame, f.Heartbeat)]
    status = [e for e in m.effects if hasattr(e, "envelope") and isinstance(e.envelope.frame, f.SchedulerStatus)]
    assert len([b for b in beats if b.conn == w.conn]) == 6 and len(status) == 3


# ---- a new scheduler ------------------------------------------------------------------------------------------------


def restart(m, **limits):
    """Another scheduler process: same workers and gateways, nothing remembered."""
    new = Mesh(seed=99, depth=m.core.state.limits.depth, chunk_tokens=120, **limits)
    new.now = m.now + 300_000_000
    new.next_id = m.next_id
    for w in m.workers.values():
        while w.frames:
            w.run(w.frames.popleft())
    return new


@pytest.mark.parametrize("order", ["worker first", "gateway first"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_slots_survive_a_scheduler_restart(depth, order):
    m, g, js = busy(depth, steps=30)
    w = m.workers["w0"]
    n = restart(m)
    if order == "worker first":
        n.worker(w)
        n.gate(g)
        n.resubmit(g, js)
    else:
        n.gate(g)
        n.resubmit(g, js)
        assert not n.core.counters.get("steps")
        n.worker(w)
    assert n.core.counters["slots_adopted"] >= 2
    n.run()
    n.advance(1100)
    n.run()
    n.expect(*js)
    n.idle()


def test_resubmissions_wait_a_second_for_dumps_that_do_not_come():
    m, g, js = busy()
    n = restart(m)
    n.gate(g)
    n.resubmit(g, js)
    fresh = FakeWorker(group="other", pages=24)
    n.worker(fresh)
    assert not fresh.frames
    n.advance(1100)
    n.run()
    n.expect(*js)
    n.idle()


def test_they_do_not_wait_longer_than_the_configured_workers_need():
    m, g, js = busy()
    n = restart(m, workers=("w0",))
    n.gate(g)
    n.resubmit(g, js)
    n.worker(boot=5, pages=24)
    assert n.workers["w0"].frames, "at once: its dump was the last that could bring slots"
    n.run()
    n.expect(*js)
    n.idle()


def test_dumped_slots_that_nobody_claims_are_freed():
    m, _, _ = busy(steps=40)
    n = restart(m)
    n.worker(m.workers["w0"])
    assert m.workers["w0"].slots
    n.advance(5500)
    n.run()
    n.idle()


def test_logprobs_forbid_adoption_with_missing_ids():
    m = Mesh()
    w = m.worker()
    g = m.gate()
    j = m.submit(g, max_tokens=60, ignore_eos=True, top_logprobs=2)
    m.steps(10)
    lag = list(j.streams[0].ids)
    w.run(w.frames.popleft())  # its result never arrives
    n = restart(m)
    n.worker(w)
    n.gate(g)
    n.resubmit(g, [j])
    assert n.core.counters["slots_not_adopted"] == 1
    assert j.streams[0].ids == lag
    n.advance(1100)
    n.run()
    n.expect(j)
    n.idle()


def test_a_finished_dumped_slot_ends_its_request():
    m = Mesh()
    w = m.worker()
    g = m.gate()
    j = m.submit(g, max_tokens=4, ignore_eos=True)
    m.steps(3)
    w.run(w.frames.popleft())
    assert w.slots[0].finished
    n = restart(m)
    n.worker(w)
    n.gate(g)
    n.resubmit(g, [j])
    n.expect(j)
    assert n.core.counters["slots_adopted"] == 1
    n.idle()


# ---- gateways -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_gateway_back_in_time_gets_what_it_missed(depth):
    m, g, js = busy(depth, steps=20)
    m.lose(g)
    m.steps(6)
    m.gate(g)
    m.resubmit(g, js)
    assert m.core.counters["rebinds"] == len([j for j in js if not all(s.reason for s in j.streams)])
    assert not m.core.counters.get("preemptions"), "slots stay"
    m.run()
    m.expect(*js)
    m.idle()


def test_ends_it_missed_are_kept_for_it():
    m, g, js = busy()
    m.lose(g)
    m.run()
    assert m.core.load()["requests"] == len(js)
    m.gate(g)
    m.resubmit(g, js)
    m.expect(*js)
    m.idle()


def test_a_journal_ahead_of_us_is_the_truth():
    m = Mesh(depth=2)
    m.worker()
    g = m.gate()
    j = m.submit(g, max_tokens=40, ignore_eos=True)
    m.steps(8)
    full, _ = reference(j.prompt, j.params, j.seed, 0)
    j.streams[0].ids = full[:25]
    m.gate(g)
    m.resubmit(g, [j])
    m.run()
    m.expect(j)
    m.idle()


def test_a_journal_that_differs_is_a_fault_and_still_the_truth():
    m = Mesh()
    m.worker()
    g = m.gate()
    j = m.submit(g, max_tokens=12, ignore_eos=True)
    m.steps(6)
    ours = list(j.streams[0].ids)
    j.streams[0].ids = [t ^ 1 for t in ours]
    m.gate(g)
    m.resubmit(g, [j])
    m.run()
    assert m.core.faults.pop("ids_diverged") == 1
    assert len(j.streams[0].ids) == 12 and j.streams[0].reason is FinishReason.LENGTH
    m.idle()


def test_choices_the_new_attempt_does_not_name_are_freed():
    m = Mesh()
    w = m.worker()
    g = m.gate()
    j = m.submit(g, n=3, max_tokens=40, ignore_eos=True)
    m.steps(5)
    j.streams[1].reason = FinishReason.STOP  # closed in the gateway while it was away
    m.gate(g)
    m.resubmit(g, [j])
    m.steps(2)
    assert sorted(s.init.choice for s in w.slots.values()) == [0, 2]
    m.run()
    m.idle()


def test_rows_of_a_new_attachment_may_repeat_old_numbers():
    m = Mesh()
    w = m.worker()
    g = m.gate()
    j = m.submit(g, n=2, max_tokens=40, ignore_eos=True)
    m.steps(4)
    j.streams[0].reason = FinishReason.STOP
    m.gate(g)
    m.resubmit(g, [j])
    assert [(c.row, c.row_gen) for c in j.sub.choices] == [(0, 1)]
    m.close_choices(g, j)
    m.steps(2)
    assert not w.slots
    m.idle()


def test_an_absent_gateway_costs_its_requests_after_the_grace():
    m, g, _ = busy()
    m.lose(g)
    m.run()
    m.advance(29_000)
    assert m.core.load()["requests"]
    m.advance(1500)
    assert not m.core.load()["requests"]
    m.run()
    m.idle()


def test_a_gateway_that_is_back_gives_up_what_it_does_not_resubmit():
    m, g, _ = busy()
    m.lose(g)
    m.gate(g)
    m.advance(5500)
    assert not m.core.load()["requests"]
    m.run()
    m.idle()


def test_a_restarted_gateway_or_a_bye_frees_at_once():
    for how in ("boot", "bye"):
        m, g, _ = busy()
        if how == "boot":
            g.boot = 2
            m.gate(g)
        else:
            m.up(g, f.Bye("stop"))
        assert not m.core.load()["requests"]
        m.run()
        m.idle()


def test_a_finished_resubmission_ends_at_once():
    m = Mesh()
    m.worker()
    g = m.gate()
    m.advance(1100)
    j = m.journal(8, max_tokens=3, ignore_eos=True)
    ids, _ = reference(j.prompt, j.params, j.seed, 0)
    j.streams[0].ids = list(ids)
    m.submit(g, journal=j)
    assert j.streams[0].reason is FinishReason.LENGTH
    m.idle()


def test_logprobs_pass_through_to_the_row_that_asked():
    m = Mesh()
    w = m.worker()
    g = m.gate()
    plain, asked = (m.submit(g, max_tokens=3, ignore_eos=True, top_logprobs=k) for k in (-1, 1))
    m.steps(2)
    frame = w.frames.popleft()
    result = w.run(frame)
    index = 1
    columns = f.LogprobColumns(
        np.array([index], np.int32), np.array([2], np.uint8), np.array([5, 6], np.int32),
        np.array([-0.5, -1.5], np.float32),
    )  # fmt: skip
    m.up(w, dataclasses.replace(result, logprobs=columns))
    got = g.frames[-1].logprobs
    row = int(g.frames[-1].rows[got.rows[0]])
    assert row == asked.sub.choices[0].row != plain.sub.choices[0].row
    assert got.ids.tolist() == [5, 6] and got.values.tolist() == [-0.5, -1.5] and got.widths.tolist() == [2]


def test_unknown_frames_and_events_are_refused():
    m, g, _ = busy()
    m.up(g, f.ResultFrame(step=1))
    assert m.core.faults == {"unexpected_frame": 1} and g.conn not in m.conns
    with pytest.raises(TypeError, match="knows no event"):
        m.core.handle(object(), m.now)


def test_limits_name_the_wrong_value():
    with pytest.raises(ValueError, match="depth: 4"):
        SchedulerLimits(depth=4)
    with pytest.raises(ValueError, match="chunk_tokens: 0"):
        SchedulerLimits(chunk_tokens=0)


def test_a_stale_submit_answer_is_not_remembered():
    m = Mesh()
    m.worker()
    g = m.gate()
    sub = m.request(g, m.journal(8, max_tokens=3))
    wrong = dataclasses.replace(sub, attach_id=123)
    assert m.call(wrong).verdict is Verdict.STALE_ATTACH
    assert m.call(sub).verdict is Verdict.ACCEPTED
