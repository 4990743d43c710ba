"""Deficit round robin: nobody starves, shares of those who always wait stay equal, idling saves nothing."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.fair import FairShare


def serve(fair: FairShare, queues: dict[str, list[float]], count: int) -> list[tuple[str, float]]:
    """Start choices one by one, as admission does when each frame has room for one."""
    out = []
    for _ in range(count):
        waiting = {t: q for t, q in queues.items() if q}
        tenant = next(iter(fair.order(waiting, 1)), None)
        if tenant is None:
            break
        cost = queues[tenant].pop(0)
        fair.charge(tenant, cost)
        out.append((tenant, cost))
    return out


def test_ten_times_the_load_does_not_get_more():
    fair = FairShare(1000)
    queues = {"heavy": [500.0] * 1000, "light": [500.0] * 100}
    served = serve(fair, queues, 200)
    assert sum(t == "light" for t, _ in served) == 100


def test_a_tenant_of_small_requests_is_not_held_up_by_one_of_large():
    fair = FairShare(1000)
    served = serve(fair, {"large": [50_000.0] * 10, "small": [100.0] * 2000}, 1000)
    work = {t: sum(c for name, c in served if name == t) for t in ("large", "small")}
    assert work["small"] >= work["large"] - 51_000
    assert work["large"] >= work["small"] - 51_000


def test_who_was_idle_has_saved_nothing():
    fair = FairShare(100)
    serve(fair, {"a": [1000.0] * 50}, 50)
    served = serve(fair, {"a": [1000.0] * 20, "late": [1000.0] * 20}, 20)
    assert sum(t == "late" for t, _ in served) == 10


def test_order_looks_ahead_without_paying():
    fair = FairShare(100)
    costs = {"a": [100.0] * 5, "b": [100.0] * 5}
    first = list(fair.order(costs, 10))
    assert first == list(fair.order(costs, 10))
    assert sorted(first[:2]) == sorted(first[2:4]) == ["a", "b"]
    assert len(first) == 10


def test_who_cannot_start_saves_a_bounded_amount():
    fair = FairShare(100)
    waiting = {"blocked": [100.0], "b": [100.0] * 1000}
    list(fair.order(waiting, 2))
    for _ in range(1000):
        fair.charge("b", 100.0)
    assert fair.deficit("blocked") <= 200


def test_a_quantum_must_be_positive():
    with pytest.raises(ValueError, match="quantum"):
        FairShare(0)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(1, 5000), min_size=2, max_size=5),
    st.floats(1, 3000),
    st.integers(0, 2**32),
)
def test_shares_of_the_backlogged_differ_by_a_bound(sizes, quantum, seed):
    """At every moment, for every pair: work differs by at most a quantum and the largest choice on either side."""
    rng, fair = random.Random(seed), FairShare(quantum)
    queues = {f"t{i}": [max(1.0, rng.uniform(0, s)) for _ in range(400)] for i, s in enumerate(sizes)}
    work = dict.fromkeys(queues, 0.0)
    largest = max(max(q) for q in queues.values())
    for tenant, cost in serve(fair, queues, 150):
        work[tenant] += cost
        assert max(work.values()) - min(work.values()) <= 2 * quantum + 2 * largest


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.lists(st.floats(0, 1e6), min_size=1, max_size=8), max_size=6))
def test_every_choice_is_served_once(queues):
    total = {t: len(q) for t, q in queues.items()}
    assert len(list(FairShare(10).order(queues, 1000))) == sum(total.values())
    served = serve(FairShare(10), {t: list(q) for t, q in queues.items()}, 1000)
    assert {t: sum(n == t for n, _ in served) for t in queues} == total
