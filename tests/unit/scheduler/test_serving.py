"""Requests run to their end: batching, chunks, n > 1, finish reasons, admission."""

import pytest

from meshkit.types import FinishReason
from tests.unit.scheduler.mesh import Mesh


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_request(depth):
    m = Mesh(depth=depth)
    m.worker()
    g = m.gate()
    assert g.status.ready and g.status.workers == 1
    j = m.submit(g, prompt=10, max_tokens=20)
    m.run()
    m.expect(j)
    m.idle()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("prompt", [1, 2, 255, 256, 257, 512, 700])
def test_choices_share_the_prompt(depth, n, prompt):
    m = Mesh(depth=depth, chunk_tokens=300)
    w = m.worker(pages=40, tails=9)
    g = m.gate()
    j = m.submit(g, prompt=prompt, n=n, max_tokens=12)
    m.run()
    m.expect(j)
    m.idle()
    chunk_tokens = sum(len(fr.chunk_ids) for fr in w.log)
    assert chunk_tokens == prompt - 1 + n, "the prompt is prefilled once"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_many_requests_in_a_small_pool(depth):
    m = Mesh(depth=depth, chunk_tokens=200)
    m.worker(slots=4, pages=9, tails=3)
    g, h = m.gate(), m.gate(name="g1")
    js = [m.submit(g if i % 2 else h, prompt=100 + 150 * (i % 5), max_tokens=5 + 60 * (i % 7)) for i in range(24)]
    m.run()
    m.expect(*js)
    m.idle()
    assert {s.reason for j in js for s in j.streams} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_load_and_rows_are_sorted_by_rank(ranks):
    m = Mesh(depth=2)
    w = m.worker(slots=2, pages=8, tails=2, ranks=ranks)
    g = m.gate()
    js = [m.submit(g, prompt=200 + 50 * i, n=1 + i % 2, max_tokens=40) for i in range(3 * ranks)]
    m.run()
    m.expect(*js)
    m.idle()
    widest = max(w.log, key=lambda fr: len(fr.slots))
    assert (widest.rank_off[1:] > widest.rank_off[:-1]).all(), "every rank had rows"


def test_groups_share_the_load():
    m = Mesh()
    a, b = m.worker(slots=2), m.worker(group="w1", slots=2)
    g = m.gate()
    js = [m.submit(g, prompt=50, max_tokens=30, ignore_eos=True) for _ in range(6)]
    m.run()
    m.expect(*js)
    m.idle()
    assert a.log and b.log


def test_the_same_events_give_the_same_effects():
    def life():
        m = Mesh(seed=4, depth=2, chunk_tokens=100)
        m.worker(slots=3, pages=8)
        g = m.gate()
        for i in range(6):
            m.submit(g, prompt=90 * (i + 1), n=1 + i % 3, max_tokens=60)
        m.run()
        return [repr(e) for e in m.effects]

    first = life()
    assert len(first) > 100 and first == life()


def test_first_frames_say_what_was_cached():
    m = Mesh()
    m.worker()
    g = m.gate()
    j = m.submit(g, prompt=300, n=2, max_tokens=4)
    m.run()
    assert [s.cached for s in j.streams] == [0, 0]


def test_the_first_id_says_how_long_its_request_queued():
    m = Mesh(depth=1)
    m.worker(slots=1)
    g = m.gate()
    first, second = (m.submit(g, prompt=10, max_tokens=100) for _ in range(2))
    m.run()
    m.expect(first, second)
    told = [pair for fr in g.frames for pair in zip(fr.waited_rows.tolist(), fr.waited_ms.tolist(), strict=True)]
    assert len(told) == 2 and all(index == 0 for index, _ in told)
    served_ms = 5 * len(first.streams[0].ids)  # a step takes 5 ms here
    assert told[0][1] == 0 and served_ms <= told[1][1] <= served_ms + 20
