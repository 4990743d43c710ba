"""Pools against a plain model, and recounts that find what was planted."""

import random

import numpy as np
import pytest

from scheduler_svc.core.ledger import Pool
from tests.unit.scheduler.mesh import Mesh


def opened(size=8, base=16):
    pool = Pool(base, size)
    pool.settle([])
    return pool


def test_classes_follow_references():
    pool = Pool(16, 4)
    assert (pool.quarantined, pool.free) == (4, [])
    pool.settle([17, 17])
    assert (pool.quarantined, pool.owned, pool.free) == (0, 1, [19, 18, 16])
    pool.keep(17)
    assert pool.drop(17) is False and pool.drop(17) is False
    assert (pool.owned, pool.cached) == (0, 1)
    pool.share(17)
    assert (pool.owned, pool.cached) == (1, 0)
    pool.share_all(np.array([17], np.int32))
    assert pool.drop(17) is False and pool.drop(17) is False
    assert pool.forget(17) is True
    assert (pool.owned, pool.cached, len(pool.free)) == (0, 0, 4)
    with pytest.raises(AssertionError, match="settles once"):
        Pool(0, 2).settle([]) or pool.settle([])


def test_misuse_is_caught():
    pool = opened()
    place = pool.take()
    pool.drop(place)
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.drop(place)
    with pytest.raises(AssertionError, match="more often than kept"):
        pool.forget(place)
    with pytest.raises(AssertionError, match="only a place in use"):
        pool.share(place)


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_agree_with_two_counters(seed):
    rng = random.Random(seed)
    pool = opened()
    run, kept = dict.fromkeys(range(16, 24), 0), dict.fromkeys(range(16, 24), 0)
    for _ in range(300):
        place = rng.randrange(16, 24)
        op = rng.choice(["take", "share", "drop", "keep", "forget"])
        if op == "take" and pool.free:
            place = pool.take()
            assert not run[place] and not kept[place]
            run[place] = 1
        elif op == "share" and (run[place] or kept[place]):
            others = [p for p in range(16, 24) if p != place and (run[p] or kept[p]) and rng.random() < 0.5]
            if others:
                pool.share_all(np.array([place, *others], np.int32))
            else:
                pool.share(place)
            for p in (place, *others):
                run[p] += 1
        elif op == "drop" and run[place]:
            run[place] -= 1
            assert pool.drop(place) == (not run[place] and not kept[place])
        elif op == "keep" and run[place] and not kept[place]:
            pool.keep(place)
            kept[place] = 1
        elif op == "forget" and kept[place]:
            kept[place] = 0
            assert pool.forget(place) == (not run[place])
        pool.recount([p for p, n in run.items() for _ in range(n)], [p for p, n in kept.items() if n])


def _busy():
    m = Mesh()
    m.worker(slots=2, pages=12, tails=6)
    g = m.gate()
    for _ in range(3):
        m.submit(g, prompt=300, max_tokens=50, ignore_eos=True)
    m.steps(4)
    worker = m.core.state.workers["w0"]
    return m, worker, worker.ranks[0]


@pytest.mark.parametrize(
    "plant",
    [
        lambda worker, rank: rank.pages.take(),
        lambda worker, rank: rank.tails.take(),
        lambda worker, rank: rank.pages.share(worker.running[0].pages[0]),
        lambda worker, rank: worker.running[0].pages.pop(),
        lambda worker, rank: rank.pages.free.append(rank.pages.free[0]),
        lambda worker, rank: setattr(rank.pages, "owned", rank.pages.owned + 1),
        lambda worker, rank: worker.running.pop(),
        lambda worker, rank: setattr(worker.running[0], "slot", worker.running[1].slot),
        lambda worker, rank: setattr(worker.running[0], "flying", 2),
    ],
)
def test_the_recount_finds_a_planted_leak(plant):
    m, worker, rank = _busy()
    m.core.check()
    plant(worker, rank)
    with pytest.raises(AssertionError):
        m.core.check()


def test_the_cheap_check_runs_while_serving():
    m = Mesh(recount_steps=10)
    m.worker()
    g = m.gate()
    m.submit(g, max_tokens=100, ignore_eos=True)
    rank = m.core.state.workers["w0"].ranks[0]
    m.steps(20)
    assert not m.core.faults
    rank.pages.owned += 1
    m.core.check = lambda: None
    m.steps(20)
    assert m.core.faults["conservation"] >= 1
