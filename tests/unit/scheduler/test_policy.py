"""The order of waiting choices and the sharing of a step's prefill tokens, as arithmetic."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.mixed import Sharing
from scheduler_svc.core.policy import GRAIN, Turns, Work, growth_pages, split, tokens_for
from scheduler_svc.core.queue import WaitQueue


class Req:
    def __init__(self, arrival, tenant="t", priority=0):
        self.arrival, self.tenant, self.priority = arrival, tenant, priority
        self.prompt = np.zeros(100, np.int32)


class Choice:
    """What the queue and the policies read of a choice."""

    def __init__(self, arrival, tenant="t", priority=0, total=100, cached=0):
        self.req, self.choice, self.total, self.cached = Req(arrival, tenant, priority), 0, total, cached
        self.nbytes, self.phase, self.bypassed = 4 * total, None, 0

    @property
    def key(self):
        return (self.req.priority, self.req.arrival, self.choice)


def queue_of(*choices):
    queue = WaitQueue()
    for c in choices:
        queue.add(c)
    return queue


def order(turns, queue, most=100, match=None):
    return [c.req.arrival for c in turns.candidates(queue, most, lambda c: float(c.total), match)]


# ---- order ----------------------------------------------------------------------------------------------------------


def test_fcfs_is_by_priority_then_arrival():
    queue = queue_of(Choice(3), Choice(1), Choice(2, priority=-1), Choice(0, priority=4))
    assert order(Turns("fcfs", 100), queue) == [2, 1, 3, 0]


def test_tenants_take_turns_within_a_priority():
    heavy = [Choice(i, "heavy") for i in range(50)]
    light = [Choice(100 + i, "light") for i in range(3)]
    found = order(Turns("fcfs", 100), queue_of(*heavy, *light), most=12)
    assert {100, 101, 102} <= set(found[:6])
    assert [a for a in found if a < 100] == sorted(a for a in found if a < 100)


def test_turns_are_paid_for_by_what_starts():
    turns = Turns("fcfs", 100)
    queue = queue_of(*(Choice(i, "a") for i in range(20)), *(Choice(100 + i, "b") for i in range(20)))
    served = []
    for _ in range(20):
        seq = next(iter(turns.candidates(queue, 8, lambda c: float(c.total))))
        queue.remove(seq)
        turns.started(seq, 300.0 if seq.req.tenant == "a" else 100.0)
        served.append(seq.req.tenant)
    assert served.count("b") == pytest.approx(15, abs=1), "a's choices turned out three times as dear"


def test_lpm_takes_long_prefixes_first_and_passes_nobody_for_ever():
    cold = Choice(0)
    warm = [Choice(i, cached=256 * 200) for i in range(1, 1000)]
    turns = Turns("lpm", 1e9)
    queue = queue_of(cold, *warm[:10])
    assert order(turns, queue, match=lambda c: c.cached)[0] == 1
    passed = 0
    for i in range(10, 999):
        seq = next(iter(turns.candidates(queue, 8, lambda c: 1.0, lambda c: c.cached)))
        if seq is cold:
            break
        queue.remove(seq)
        queue.add(warm[i])
        passed += 1
    assert passed <= 4 * 64


def test_without_a_match_lpm_is_fcfs():
    queue = queue_of(*(Choice(i, cached=256 * (9 - i)) for i in range(9)))
    assert order(Turns("lpm", 100), queue) == list(range(9))


def test_lanes_add_up():
    rng, queue = random.Random(0), WaitQueue()
    held = []
    for i in range(300):
        if held and rng.random() < 0.45:
            queue.remove(held.pop(rng.randrange(len(held))))
        else:
            held.append(Choice(i, rng.choice("abc"), rng.randint(0, 2), rng.randint(1, 99)))
            queue.add(held[-1])
        assert list(queue) == sorted(held, key=lambda c: c.key)
        assert (queue.tokens, queue.nbytes) == (sum(c.total for c in held), sum(c.nbytes for c in held))
        for priority, tenants in queue.lanes().items():
            for tenant, lane in tenants.items():
                mine = [c for c in held if (c.req.priority, c.req.tenant) == (priority, tenant)]
                assert lane.seqs == sorted(mine, key=lambda c: c.key)
                assert lane.tokens == sum(c.total for c in mine)
        for tenant in "abc":
            mine = [c for c in held if c.req.tenant == tenant]
            assert queue.of_tenant(tenant) == (len(mine), sum(c.nbytes for c in mine))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["fcfs", "lpm", "priority"]),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2), st.integers(0, 50)), min_size=1, max_size=40),
    st.integers(1, 8),
)
def test_nobody_starves(policy, spec, most):
    """Whatever keeps arriving at the same priority, everyone who waits is served within a bounded number of starts."""
    turns, queue = Turns(policy, 200), WaitQueue()
    first = [Choice(i, t, p, cached=256 * pages) for i, (t, p, pages) in enumerate(spec)]
    for c in first:
        queue.add(c)
    waiting = set(first)
    for i in range(len(first) * 350):
        if not waiting:
            break
        seq = next(iter(turns.candidates(queue, most, lambda c: float(c.total), lambda c: c.cached)))
        queue.remove(seq)
        turns.started(seq, float(seq.total))
        waiting.discard(seq)
        queue.add(Choice(1000 + i, "a", 2, cached=256 * 64))
    assert not waiting


# ---- tokens of a step -----------------------------------------------------------------------------------------------


def test_a_lone_prefill_takes_everything():
    assert split(2000, 2000, [Work(10_000, 0)], share=0.125, context_weight=0) == [2000]
    assert split(2000, 2000, [Work(300, 0)], share=0.125, context_weight=0) == [300]


def test_short_prompts_pass_a_huge_one_which_keeps_its_share():
    grants = split(1600, 1600, [Work(900_000, 0), Work(700, 0), Work(500, 0)], share=0.125, context_weight=0)
    assert grants == [400, 700, 500]
    grants = split(800, 800, [Work(900_000, 0), Work(700, 0), Work(500, 0)], share=0.125, context_weight=0)
    assert grants == [100, 200, 500]


def test_a_resumed_prefill_is_passed_by_much_shorter_ones_only():
    works = [Work(9000, 0), Work(300, 0), Work(20, 0), Work(400, 0, resumed=True)]
    assert split(500, 500, works, share=0.0, context_weight=0) == [0, 80, 20, 400]


def test_nobody_is_placed_for_whom_there_is_no_room():
    """Tokens are given in order of service, places in the tenants' turns: a short one must not lose its few."""
    sharing = Sharing(tokens=100.0, room=17, context_weight=0.0)
    assert sharing.open()
    sharing.fresh += 8
    assert not sharing.open(), "another might take 16"
    sharing.room = 24
    assert sharing.open()
    assert split(100, 24, [Work(900, 0, fresh=True), Work(8, 256, fresh=True)], share=0.125, context_weight=0) == [
        16,
        8,
    ]


def test_who_is_placed_in_this_step_gets_something():
    works = [Work(900_000, 0), *(Work(4000, 0, fresh=True) for _ in range(4)), Work(90, 0)]
    assert all(split(200, 200, works, share=0.125, context_weight=0))


def test_deep_context_is_paid_for():
    """At a context where a token costs ten times as much, a tenth of the tokens is given."""
    grants = split(1000, 5000, [Work(900_000, 900_000)], share=0.125, context_weight=1e-5)
    assert 95 <= grants[0] <= 105


@given(st.floats(0, 1e6), st.integers(0, 10**6), st.floats(0, 1e-3))
def test_tokens_for_inverts_the_cost(cost, start, weight):
    n = tokens_for(cost, start, weight)
    assert Work(n, start).cost(weight) <= cost * (1 + 1e-9)
    assert Work(n + 1, start).cost(weight) >= cost * (1 - 1e-9)


works = st.lists(
    st.builds(Work, st.integers(1, 10**6), st.integers(0, 10**6), st.booleans(), st.booleans()), max_size=12
)


@settings(max_examples=200, deadline=None)
@given(works, st.floats(0, 20_000), st.integers(0, 20_000), st.floats(0, 1e-4), st.floats(0, 1))
def test_split_conserves(works, budget, room, weight, share):
    grants = split(budget, room, works, share=share, context_weight=weight)
    assert sum(grants) <= room
    assert all(0 <= g <= w.remaining for g, w in zip(grants, works, strict=True))
    spent = sum(Work(g, w.start).cost(weight) for g, w in zip(grants, works, strict=True) if g)
    dearest = max((1 + weight * (w.start + 1) for w in works), default=0)
    fresh = sum(w.fresh for w in works)
    assert spent <= max(budget, GRAIN) + (fresh + 1) * dearest + 1, "at most a token each beyond what was given"
    if works and room and budget >= GRAIN * (fresh + 1):
        assert any(grants)
    if weight == 0 and not fresh and works and share > 0:
        assert grants[0] >= min(works[0].remaining, room, int(share * budget))
    if weight == 0 and sum(w.remaining for w in works) <= min(max(budget, GRAIN), room):
        assert grants == [w.remaining for w in works], "nobody waits while there is room"


def test_growth_is_held_back_by_conservativeness():
    assert growth_pages(0.0, 1000, 1000, 0) == 0
    assert growth_pages(1.0, 1000, 4000, 0) == 4
    assert growth_pages(0.5, 1024, 4000, 0) == 2
    assert growth_pages(5.0, 1000, 4000, 0) == 4, "never more than what is expected"
    assert growth_pages(1.0, 1000, 300, 0) == 2
    assert growth_pages(1.0, 1000, 4000, 900) == 1
