"""Policies at work: who runs when, who gives way, who is turned away; with real frames, or in virtual time."""

import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks._virtual import NanoOnCpu, S, VirtualMesh
from meshkit.core import Called, Reply
from meshkit.frames import SubmitChoice, Verdict
from meshkit.types import RequestId
from scheduler_svc.core.config import SchedulerLimits
from tests.unit.scheduler.mesh import Mesh


def virtual(seed=1, slots=64, pages=16_384, **limits):
    return VirtualMesh(seed, slots=slots, pages=pages, limits=SchedulerLimits(depth=2, chunk_tokens=8192, **limits))


def warm(mesh):
    """Steps of every kind, so that the cost model knows its machine."""
    for n in (300, 3000, 8000):
        for _ in range(8):
            mesh.submit(n, 40)
    mesh.run(30)
    assert not mesh.jobs


# ---- priority -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_urgent_request_takes_the_slot_of_a_patient_one(depth):
    m = Mesh(depth=depth, policy="priority")
    m.worker(slots=2, pages=16)
    g = m.gate()
    patient = [m.submit(g, prompt=20, max_tokens=200, ignore_eos=True, priority=3) for _ in range(2)]
    m.steps(10)
    urgent = m.submit(g, prompt=20, max_tokens=5, ignore_eos=True, priority=0)
    m.steps(5 + 3 * depth)
    assert urgent.streams[0].reason, "it did not wait for them"
    assert not any(j.streams[0].reason for j in patient)
    m.run()
    m.expect(urgent, *patient)
    m.idle()
    assert m.core.counters["preempted_for_priority"] == m.core.status().preemptions == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_an_urgent_request_takes_pages(depth):
    m = Mesh(depth=depth, policy="priority")
    m.worker(slots=4, pages=8, tails=8)
    g = m.gate()
    patient = [m.submit(g, prompt=600, max_tokens=60, ignore_eos=True, priority=3) for _ in range(2)]
    m.steps(6)
    urgent = m.submit(g, prompt=900, max_tokens=5, ignore_eos=True, priority=0)
    m.steps(8 + 3 * depth)
    assert urgent.streams[0].reason
    m.run()
    m.expect(urgent, *patient)
    m.idle()
    assert m.core.counters["preempted_for_priority"] >= 1


@pytest.mark.parametrize(("policy", "priority"), [("fcfs", 0), ("lpm", 0), ("priority", 3)])
def test_otherwise_nobody_gives_way(policy, priority):
    m = Mesh(depth=1, policy=policy)
    m.worker(slots=2, pages=16)
    g = m.gate()
    first = [m.submit(g, prompt=20, max_tokens=50, ignore_eos=True, priority=3) for _ in range(2)]
    m.steps(5)
    late = m.submit(g, prompt=20, max_tokens=5, ignore_eos=True, priority=priority)
    m.run()
    m.expect(late, *first)
    assert m.core.status().preemptions == 0


def test_nobody_is_preempted_in_vain():
    """What may give way is not enough: the urgent one waits for its equals."""
    m = Mesh(depth=1, policy="priority")
    m.worker(slots=4, pages=8)
    g = m.gate()
    equal = m.submit(g, prompt=1200, max_tokens=30, ignore_eos=True, priority=0)
    m.steps(2)
    patient = m.submit(g, prompt=200, max_tokens=60, ignore_eos=True, priority=3)
    m.steps(3)
    urgent = m.submit(g, prompt=1200, max_tokens=5, ignore_eos=True, priority=0)
    m.steps(6)
    assert m.core.status().preemptions == 0
    m.run()
    m.expect(equal, patient, urgent)
    m.idle()


# ---- room -----------------------------------------------------------------------------------------------------------


def grown(conservativeness):
    m = Mesh(depth=1, conservativeness=conservativeness)
    m.worker(slots=4, pages=6, tails=8)
    g = m.gate()
    js = [m.submit(g, prompt=200, max_tokens=300, ignore_eos=True) for _ in range(4)]
    m.run()
    m.expect(*js)
    m.idle()
    return m.core.status().preemptions


def test_conservativeness_keeps_room_for_growth():
    assert grown(0.0) >= 1
    assert grown(1.0) == 0


def test_lpm_starts_with_what_is_cached():
    m = Mesh(depth=1, policy="lpm")
    m.worker(slots=1, pages=24, tails=8)
    g = m.gate()
    ids = list(range(100, 900))
    first = m.submit(g, journal=m.journal(ids, max_tokens=3, ignore_eos=True))
    m.run()
    running = m.submit(g, prompt=20, max_tokens=20, ignore_eos=True)
    m.steps(3)
    cold = m.submit(g, prompt=700, max_tokens=3, ignore_eos=True)
    cached = m.submit(g, journal=m.journal([*ids, 7, 8], max_tokens=3, ignore_eos=True))
    while not (cached.streams[0].reason or cold.streams[0].reason):
        m.steps(1)
    assert cached.streams[0].reason
    m.run()
    m.expect(first, running, cold, cached)
    assert cached.streams[0].cached >= 512


# ---- sharing a step -------------------------------------------------------------------------------------------------


def test_short_prompts_pass_a_long_one():
    mesh = virtual()
    warm(mesh)
    long = mesh.submit(400_000, 4)
    mesh.run(1)
    short = [mesh.submit(500, 4) for _ in range(8)]
    mesh.run(2)
    assert all(job.token_ns and job.ttft_s < 1 for job in short)
    assert not long.token_ns
    mesh.run(200)
    assert long.token_ns, "and it ends"


def test_a_long_prompt_ends_under_a_steady_load_of_short_ones():
    mesh = virtual()
    warm(mesh)

    def again(job):
        mesh.submit(1500, 20, on_end=again)

    for _ in range(16):
        mesh.submit(1500, 20, on_end=again)
    long = mesh.submit(40_000, 4)
    mesh.run(80)
    assert long.token_ns


def test_prefill_does_not_double_the_time_between_tokens():
    mesh = virtual(slots=128)
    jobs = [mesh.submit(500, 10_000) for _ in range(64)]
    mesh.run(20)
    begin = mesh.now

    def gaps():
        return [(b - a) / 1e6 for j in jobs for a, b in pairwise(j.token_ns) if a >= begin]

    mesh.run(5)
    alone = statistics.quantiles(gaps(), n=100)[98]
    flood = [mesh.submit(8000, 1) for _ in range(16)]
    begin = mesh.now
    mesh.run(8)
    assert statistics.quantiles(gaps(), n=100)[98] <= 2 * alone
    assert sum(bool(job.token_ns) for job in flood) >= 8, "and prefill goes on"


def test_nobody_starves_on_a_machine_that_is_too_slow():
    """Decode steps alone fill `step_ms`, and short prompts keep coming: a middling one takes its turn all the same."""
    limits = SchedulerLimits(depth=1, chunk_tokens=256)
    mesh = VirtualMesh(1, slots=32, pages=640, limits=limits, cost=NanoOnCpu(slow=8))
    jobs = []

    def ask(_=None):
        jobs.append(mesh.submit(*((20, 42), (40, 64), (150, 64))[len(jobs) % 3], on_end=ask))

    for i in range(31):
        mesh.after(i * 0.05, ask)
    mesh.run(120)
    middling = mesh.submit(330, 4)
    mesh.run(60)
    assert middling.token_ns and middling.ttft_s < 45, "its prefill alone takes 3 s"  # 250 s by shortest first alone
    gaps = [b - a for job in jobs for a, b in pairwise(job.token_ns)]
    worker = next(iter(mesh.core.state.workers.values()))
    assert statistics.quantiles(gaps, n=100)[98] <= 2.1 * worker.cost.alone(31, 31 * 150), "at what itl_factor allows"


def test_who_was_accepted_before_a_restart_is_first():
    m = Mesh(depth=1)
    m.worker(slots=1, pages=24)
    g = m.gate()
    m.submit(g, max_tokens=30)
    new, known = m.journal(8, max_tokens=4), m.journal(8, max_tokens=4)
    known.attempt = 1  # at the scheduler that was here before
    m.submit(g, journal=new)
    m.submit(g, journal=known)
    assert [seq.req.request_id for seq in m.core.state.queue] == [known.request_id, new.request_id]
    m.advance(1500)
    m.run()
    m.expect(new, known)


def test_after_a_restart_the_first_step_is_for_those_who_read():
    """Nothing is known of the worker's pace then: a prompt that fills the step would hold them all up."""
    m = Mesh(depth=1)
    w, g = m.worker(pages=24), m.gate()
    reading = [m.submit(g, max_tokens=40, ignore_eos=True) for _ in range(3)]
    m.steps(6)
    waiting = m.submit(g, prompt=900, max_tokens=2)
    m.steps(1)
    w.run(w.frames.popleft())
    new = Mesh(seed=99, depth=1)
    new.now, new.next_id = m.now, m.next_id
    new.gate(g)
    new.resubmit(g, [*reading, waiting])
    new.worker(w)
    assert sorted(w.frames[0].chunk_lens.tolist())[:3] == [1, 1, 1]
    assert int(w.frames[0].chunk_lens.sum()) <= 3 + 16
    new.run()
    new.expect(*reading, waiting)


def test_a_lone_prefill_takes_full_chunks():
    mesh = virtual()
    warm(mesh)
    steps = mesh.core.counters["steps"]
    job = mesh.submit(65_536, 1)
    mesh.run(10)
    assert job.token_ns
    assert mesh.core.counters["steps"] - steps <= 12


def test_siblings_share_a_prefill_in_parts():
    m = Mesh(depth=2, chunk_tokens=64)
    m.worker(slots=8, pages=24)
    g = m.gate()
    js = [m.submit(g, prompt=700, n=3, max_tokens=12), m.submit(g, prompt=90, n=2, max_tokens=12)]
    m.run()
    m.expect(*js)
    m.idle()


# ---- the door -------------------------------------------------------------------------------------------------------


def test_a_light_tenant_is_served_beside_a_heavy_one():
    mesh = virtual(slots=16)
    warm(mesh)
    for _ in range(400):
        mesh.submit(1000, 100, tenant="heavy")
    mesh.run(5)
    light = mesh.submit(1000, 100, tenant="light")
    mesh.run(10)
    assert light.token_ns and light.ttft_s < 4
    assert len(mesh.core.state.queue) > 200


def test_a_full_queue_has_a_place_for_who_has_little_waiting():
    mesh = virtual(slots=4, queue_requests=64)
    for _ in range(200):
        mesh.submit(1000, 2000, tenant="heavy")
    assert mesh.submit(10, 10, tenant="heavy").refused is not None
    assert mesh.submit(10, 10).refused is not None, "who has no name has no claim"
    light = [mesh.submit(10, 10, tenant="light").refused for _ in range(8)]
    assert light[:4] == [None] * 4
    assert light[4] is not None and light[4].verdict is Verdict.QUEUE_FULL


def test_limits_of_one_key():
    mesh = virtual(slots=2, tenant_choices=3, tenant_queue_bytes=40_000)
    mine = [mesh.submit(100, 50, tenant="a") for _ in range(4)]
    assert [job.refused is None for job in mine] == [True, True, True, False]
    reply = mine[3].refused
    assert reply.verdict is Verdict.QUEUE_FULL and "3 choices in flight" in reply.message and reply.retry_after_ms > 0
    assert mesh.submit(100, 50, tenant="b").refused is None
    mesh.run(20)
    assert mesh.submit(100, 50, tenant="a").refused is None, "it counts what is in flight"
    big = [mesh.submit(8000, 5, tenant="c") for _ in range(3)]
    assert [job.refused is None for job in big] == [True, True, False] or "bytes waiting" in big[1].refused.message


def overloaded():
    mesh = virtual(slots=8)
    warm(mesh)
    jobs = [mesh.submit(12_000, 100) for _ in range(80)]
    mesh.run(5)
    assert all(job.refused is None for job in jobs)
    return mesh


def test_a_request_that_would_miss_its_deadline_is_turned_away_at_once():
    mesh = overloaded()
    late = mesh.submit(12_000, 10, remaining_s=10)
    assert late.refused is not None and late.refused.verdict is Verdict.QUEUE_FULL
    assert 1_000 <= late.refused.retry_after_ms <= 600_000
    assert mesh.submit(500, 10, remaining_s=60).refused is None, "a short one passes those that wait"
    patient = mesh.submit(12_000, 10, remaining_s=3600)
    assert patient.refused is None
    asked = mesh.now
    told = (late.refused.retry_after_ms / 1000 + 10) * S
    mesh.run(180)
    assert patient.token_ns
    waited = patient.token_ns[0] - asked
    assert 0.4 * waited < told < 2.5 * waited, "the forecast was about right"
    assert mesh.submit(12_000, 10, remaining_s=10).refused is None


def test_what_was_accepted_once_is_never_turned_away():
    mesh = overloaded()
    late = mesh.submit(12_000, 10, remaining_s=5)
    assert late.refused is not None
    choices = (SubmitChoice(0, 9999, 1, ()),)
    elsewhere = replace(late.sub, request_id=RequestId(b"accepted by another"[:16]), attempt=2, choices=choices)
    (reply,) = (e.reply for e in mesh.core.handle(Called(-1, elsewhere), mesh.now) if isinstance(e, Reply))
    assert reply.verdict is Verdict.ACCEPTED


def test_an_idle_mesh_lets_a_hopeless_deadline_try():
    mesh = virtual()
    warm(mesh)
    assert mesh.submit(200_000, 10, remaining_s=1).refused is None


def test_status_says_when_to_come_back():
    mesh = overloaded()
    mesh.run(1)
    busy = mesh.core.status()
    assert busy.waiting > 50 and busy.retry_after_ms > 5_000
    mesh.run(180)
    assert mesh.core.status().retry_after_ms == 0
