"""The cost model learns step times from steps: accurate, never negative, not moved by outliers, cautious at first."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.cost import CostModel, Shape
from worker_svc.sim.cost import FlashOnH200, Load

H200 = FlashOnH200()


def took(shape: Shape) -> float:
    return float(H200.step_ns(Load(shape.rows, shape.row_context, shape.chunk_tokens, shape.chunk_work)))


def shape(rng: random.Random, most_chunk: int = 2048) -> Shape:
    rows = rng.randint(0, 128)
    chunk = rng.choice((0, rng.randint(1, most_chunk)))
    rows += not rows and not chunk
    return Shape(rows, rows * rng.randint(500, 8000), chunk, chunk * rng.choice((0, 1000, 30_000, 400_000)))


def trained(steps: int = 600, seed: int = 0, spikes: float = 0.0) -> CostModel:
    rng, model = random.Random(seed), CostModel()
    for _ in range(steps):
        s = shape(rng)
        model.observe(s, int(took(s) * rng.uniform(0.98, 1.04) * (50 if rng.random() < spikes else 1)))
    return model


def test_it_predicts_steps_it_never_saw():
    model, rng = trained(), random.Random(99)
    for _ in range(200):
        s = shape(rng)
        assert model.predict(s) == pytest.approx(took(s), rel=0.25), s
    assert model.error < 0.1


def test_outliers_do_not_move_it():
    model, rng = trained(steps=2000, spikes=0.02), random.Random(7)
    off = [model.predict(s) / took(s) for s in (shape(rng) for _ in range(100))]
    assert sorted(off)[50] < 1.2
    assert max(off) < 1.6


def test_an_hour_of_decode_steps_does_not_make_it_forget_chunks():
    model = trained()
    chunk = Shape(chunk_tokens=2048)
    for i in range(5000):
        rows = 1 + i % 64
        model.observe(Shape(rows, rows * 4000), int(took(Shape(rows, rows * 4000))))
    assert model.predict(chunk) == pytest.approx(took(chunk), rel=0.2)


def test_it_follows_a_machine_that_becomes_slower():
    model, rng = trained(), random.Random(3)
    for _ in range(4000):
        s = shape(rng)
        model.observe(s, int(2 * took(s)))
    rng = random.Random(4)
    off = sorted(model.predict(s) / (2 * took(s)) for s in (shape(rng) for _ in range(100)))
    assert off[10] > 0.8 and off[50] > 0.9


def test_the_first_chunks_grow_by_a_bounded_factor():
    model, sizes = CostModel(), []
    for _ in range(6):
        n = model.chunk_for(0, 0, 5e8, min(8192, model.most_chunk))
        sizes.append(n)
        s = Shape(chunk_tokens=n, chunk_work=0)
        model.observe(s, int(took(s)))
    assert sizes[0] == 256
    assert all(b <= 4 * a for a, b in pairwise(sizes))
    assert sizes[-1] == 8192, "a lone prefill takes full chunks"


def test_a_chunk_of_a_slow_machine_is_cut_to_the_time():
    """A CPU that prefills 200 tokens a second, steps of half a second."""
    model = CostModel()
    for _ in range(20):
        n = max(16, model.chunk_for(0, 0, 5e8, min(2048, model.most_chunk)))
        model.observe(Shape(chunk_tokens=n), int(2e7 + n * 5e6))
    assert 80 <= model.chunk_for(0, 0, 5e8, 2048) <= 100


def test_chunk_beside_decode_keeps_the_time():
    model = trained()
    for rows in (16, 64, 128):
        context = rows * 4000
        alone = took(Shape(rows, context))
        n = model.chunk_for(rows, context, 2 * alone, 2048)
        assert n > 0
        assert took(Shape(rows, context, n)) <= 2.2 * alone
        assert took(Shape(rows, context, 2 * n)) > 1.8 * alone or n == 2048, "and uses it"


def test_context_weight_is_that_of_the_machine():
    """At 400k tokens of context a chunk token costs several times as much."""
    weight = trained(steps=2000).context_weight
    real = (took(Shape(0, 0, 1024, 1024 * 400_000)) - took(Shape(0, 0, 1024))) / 400_000
    per_token = (took(Shape(0, 0, 2048)) - took(Shape(0, 0, 1024))) / 1024
    assert weight == pytest.approx(real / 1024 / per_token, rel=0.3)


def test_deadline_is_generous_until_like_steps_were_timed():
    model = CostModel()
    ask = {"least_ns": 10**9, "factor": 10, "warm_steps": 3, "warm_ns": 60 * 10**9}
    for _ in range(3):
        assert model.deadline_ns(Shape(4, 100), **ask) == 60 * 10**9
        model.observe(Shape(4, 100), 10**8)
    assert model.deadline_ns(Shape(4, 100), **ask) == 10**9
    assert model.deadline_ns(Shape(4, 100, 64), **ask) == 60 * 10**9, "no chunk was timed yet"
    for _ in range(3):
        model.observe(Shape(4, 100, 64), 3 * 10**8)
    assert 2.5e9 < model.deadline_ns(Shape(4, 100, 64), **ask) < 3.5e9


shapes = st.builds(Shape, st.integers(0, 512), st.integers(0, 10**8), st.integers(0, 16384), st.integers(0, 10**10))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(shapes, st.integers(0, 10**11)), max_size=40), st.integers(0, 64), st.integers(1, 4096))
def test_any_timings_leave_it_sane(steps, rows, most):
    """Predictions are non-negative and grow with the step; what fits a time is predicted to fit it."""
    model = CostModel()
    for s, ns in steps:
        model.observe(s, ns)
    small, large = Shape(rows, rows * 10, 10, 10), Shape(rows, rows * 10, 1000, 10_000)
    assert 0 <= model.predict(small) <= model.predict(large) * (1 + 1e-9)
    target = model.predict(Shape(rows, rows * 10, most)) * 0.7
    n = model.chunk_for(rows, rows * 10, target, most)
    assert 0 <= n <= most
    assert n == 0 or model.predict(Shape(rows, rows * 10, n)) <= target
