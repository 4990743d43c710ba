"""Forecasts: only of what was measured, longer with more work ahead, fair; refusals say when to return."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.cost import CostModel, Shape
from scheduler_svc.core.forecast import Ahead, Newcomer, Outputs, Site, ahead_of, delay_ns, retry_after_ms
from tests.unit.scheduler.test_policy import Choice, queue_of


def model(prefill_us=25.0, step_ms=20.0):
    """A machine whose steps take step_ms and prefill_us more per prefill token."""
    cost = CostModel()
    for chunk in (256, 1024, 2048):
        for rows in (0, 8, 32):
            for _ in range(4):
                shape = Shape(rows, rows * 1000, chunk)
                cost.observe(shape, int(step_ms * 1e6 + chunk * prefill_us * 1e3))
    for rows in (1, 8, 32) * 4:
        cost.observe(Shape(rows, rows * 1000), int(step_ms * 1e6))
    return cost


def site(**kw):
    values = {"running": 32, "prefills": [], "free_slots": 32, "free_pages": 1000, "used_pages": 500}
    values |= {"target_ns": 40e6, "most_tokens": 2048, "cost": model()}
    return Site(**(values | kw))


def test_it_knows_nothing_before_steps_were_timed():
    assert delay_ns([site(cost=CostModel())], Ahead(10**9, 10**6), Newcomer("t", 0, 10**6), 100) == 0
    assert delay_ns([], Ahead(10**9, 10**6), Newcomer("t", 0, 10**6), 100) == 0


def test_prefill_ahead_at_the_pace_of_mixed_steps():
    """20 ms of budget beside decode are 800 tokens a 40 ms step: 20 tokens a millisecond."""
    found = delay_ns([site()], Ahead(1_000_000, 10), Newcomer("t", 0, 1000), 100)
    assert found / 1e9 == pytest.approx(50, rel=0.15)


def test_a_huge_running_prefill_is_passed():
    none = delay_ns([site()], Ahead(), Newcomer("t", 0, 500), 100)
    huge = delay_ns([site(prefills=[900_000])], Ahead(), Newcomer("t", 0, 500), 100)
    assert huge <= 2.1 * none


def test_slots_come_free_at_the_pace_of_ends():
    """32 rows of 100 ids at 20 ms a step: one ends every 62 ms."""
    found = delay_ns([site(free_slots=0)], Ahead(choices=31), Newcomer("t", 0, 1), 100)
    assert found / 1e9 == pytest.approx(2.0, rel=0.1)


def test_pages_count_like_slots():
    plenty = delay_ns([site()], Ahead(choices=10), Newcomer("t", 0, 100, pages=10), 100)
    scarce = delay_ns([site(free_pages=0)], Ahead(choices=10), Newcomer("t", 0, 100, pages=10), 100)
    assert scarce > plenty + 0.5e9


def test_another_tenants_queue_counts_as_much_as_turns_let_pass():
    queue = queue_of(*(Choice(i, "heavy", total=1000) for i in range(100)))
    mine, theirs = ahead_of(queue, Newcomer("light", 0, 1000)), ahead_of(queue, Newcomer("heavy", 0, 1000))
    assert (mine.tokens, mine.choices) == (1000, 1)
    assert (theirs.tokens, theirs.choices) == (100_000, 100)
    urgent = ahead_of(queue, Newcomer("heavy", -1, 1000))
    assert (urgent.tokens, urgent.choices) == (0, 0)
    late = ahead_of(queue, Newcomer("light", 1, 1000))
    assert (late.tokens, late.choices) == (100_000, 100)


def test_what_is_accepted_at_the_edge_is_in_time_though_the_forecast_is_a_fifth_short():
    edge = max(ms for ms in range(0, 20_000, 100) if retry_after_ms(ms * 1e6, 10_000) is None)
    assert 7_000 <= edge <= 10_000 / 1.25
    assert retry_after_ms(60e9, 10_000) == 60_000 - edge
    assert retry_after_ms(1.0e9, 100) == 1_000, "not below a second"
    assert retry_after_ms(1e15, 100) == 600_000


def test_mean_output_follows_the_totals():
    outputs = Outputs()
    assert outputs.expected(300) == 300
    outputs.learn(1000, 10)
    assert outputs.expected(300) == 100
    outputs.learn(1000 + 100 * 200, 110)
    assert 100 < outputs.expected(300) < 200
    assert outputs.expected(50) == 50
    before = outputs.mean
    outputs.learn(1000 + 100 * 200 + 9999, 111)
    assert outputs.mean == before, "one end says little"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 500), st.integers(1, 10**5))
def test_more_ahead_is_never_sooner(tokens, more, choices, own):
    sites = [site(free_slots=2)]
    less = delay_ns(sites, Ahead(tokens, choices), Newcomer("t", 0, own), 100)
    assert less <= delay_ns(sites, Ahead(tokens + more, choices), Newcomer("t", 0, own), 100)
    assert less <= delay_ns(sites, Ahead(tokens, choices + 1), Newcomer("t", 0, own), 100)
    assert less <= delay_ns(sites, Ahead(tokens, choices), Newcomer("t", 0, own + more), 100)
