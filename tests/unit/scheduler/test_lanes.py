"""Decode steps as arrays: who is in a lane, that nothing is done per choice, and that all counters stay right."""

import numpy as np
import pytest

from meshkit.types import FinishReason
from scheduler_svc.core import book, plan
from scheduler_svc.core.lanes import BLOCK, STOPS
from scheduler_svc.core.request import Phase, Seq
from tests.unit.scheduler.mesh import Mesh


def decoding(count, depth=2, steps=6, worker=None, **kw):
    """A mesh with so many choices in the middle of their answers."""
    m = Mesh(depth=depth)
    m.worker(**{"slots": count + 1, "pages": 8 * count + 8, "tails": 2 * count, **(worker or {})})
    g = m.gate()
    kw = {"max_tokens": 60, "ignore_eos": True, **kw}
    js = [m.submit(g, prompt=20 + i, **kw) for i in range(count)]
    m.steps(steps)
    return m, g, js


def lanes_of(m):
    (worker,) = m.core.state.workers.values()
    return worker.lanes


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_decode_step_touches_no_choice(monkeypatch, depth):
    m, _, js = decoding(5, depth)
    assert lanes_of(m).count == 5
    m.core.check = lambda: None  # it looks at everything
    with monkeypatch.context() as patch:

        def touched(*args):
            raise AssertionError("a choice was looked at")

        patch.setattr(plan, "Row", touched)
        patch.setattr(book, "Row", touched)
        for name in ("fed", "length", "flying", "sampling", "planned_step", "emitted", "n_emitted", "key", "total"):
            patch.setattr(Seq, name, property(touched))
        m.steps(20)
    m.run()
    m.expect(*js)
    m.idle()


def test_answers_longer_than_a_block_are_whole():
    m, _, js = decoding(3, max_tokens=2 * BLOCK + 30)
    m.run(5000)
    m.expect(*js)
    m.idle()


@pytest.mark.parametrize(
    ("kw", "inside"),
    [
        ({}, True),
        ({"stop_ids": tuple(range(40_000, 40_000 + STOPS))}, True),
        ({"stop_ids": tuple(range(40_000, 40_001 + STOPS))}, False),
        ({"top_logprobs": 0}, False),
    ],
)
def test_who_has_a_lane(kw, inside):
    m, _, js = decoding(2, **kw)
    assert lanes_of(m).count == (2 if inside else 0)
    m.run()
    m.expect(*js)
    m.idle()


def test_choices_in_and_out_of_lanes_share_frames_on_every_rank():
    m = Mesh(depth=2)
    w = m.worker(slots=4, pages=40, tails=8, ranks=2)
    g, h = m.gate(), m.gate(name="g1")
    js = [
        m.submit(g if i % 3 else h, prompt=30 + i, max_tokens=40, ignore_eos=i % 4 > 0, top_logprobs=i % 2 - 1)
        for i in range(8)
    ]
    m.run()
    m.expect(*js)
    m.idle()
    mixed = [fr for fr in w.log if len(fr.slots) == 8 and fr.decode_only]
    assert mixed
    for fr in mixed:
        assert (fr.slots[: fr.rank_off[1]] < 4).all() and (fr.slots[fr.rank_off[1] :] >= 4).all()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_parked_row_is_fed_again(depth):
    m, _, js = decoding(3, depth)
    w = next(iter(m.workers.values()))
    turns = iter(range(1 << 30))
    w.park = lambda row: next(turns) % 3 == 0
    m.steps(30)
    w.park = lambda row: False
    m.run()
    m.expect(*js)
    m.idle()
    assert m.core.counters["parked_rows"] > 5


def test_a_counter_written_from_outside_reaches_the_lane_and_back():
    m, _, _ = decoding(2)
    lanes = lanes_of(m)
    seq = lanes.seqs[np.flatnonzero(lanes.on)[0]]
    have = list(seq.emitted)
    assert seq.total == len(seq.req.prompt) + len(have) and seq.n_emitted == len(have) > 0
    seq.extend([7])
    assert lanes.emitted[seq.slot] == len(have) + 1 and seq.emitted == [*have, 7]
    before = (seq.fed, seq.length, seq.flying, seq.sampling, seq.planned_step)
    lanes.leave(seq)
    assert (seq.fed, seq.length, seq.flying, seq.sampling, seq.planned_step) == before
    assert seq.lanes is None and lanes.count == 1


def test_a_gateway_that_redials_gets_its_rows_under_their_new_names():
    m, g, js = decoding(3, steps=12)
    m.lose(g)
    m.steps(4)
    m.gate(g)
    m.resubmit(g, js)
    m.run()
    m.expect(*js)
    m.idle()
    assert m.core.counters["rebinds"] == 3


def test_pages_for_all_are_taken_from_the_cache_before_anybody_is_preempted():
    m, g, js = decoding(4, worker={"pages": 9, "tails": 8}, max_tokens=300)
    m.run(4000)
    m.expect(*js)
    again = [m.submit(g, prompt=200, max_tokens=300, ignore_eos=True) for _ in range(4)]
    m.run(4000)
    m.expect(*again)
    m.idle()


def test_the_frame_behind_a_lone_prefill_waits_so_that_others_can_join_it():
    m = Mesh(depth=2)
    w = m.worker(slots=4, pages=20)
    g = m.gate()
    first = m.submit(g, prompt=50, max_tokens=8, ignore_eos=True)
    assert len(w.frames) == 1 and w.frames[0].chunk_samples.tolist() == [1]
    second = m.submit(g, prompt=30, max_tokens=8, ignore_eos=True)
    assert len(w.frames) == 2 and w.frames[1].chunk_lens.tolist() == [30], "nobody waits behind it"
    m.run()
    m.expect(first, second)
    m.idle()
    assert {s.reason for s in first.streams} == {FinishReason.LENGTH}


def test_a_prefill_in_parts_keeps_both_hands_full():
    m = Mesh(depth=2, chunk_tokens=64)
    w = m.worker(slots=4, pages=20)
    j = m.submit(m.gate(), prompt=400, max_tokens=4)
    assert len(w.frames) == 2
    (seq,) = next(iter(m.core.state.workers.values())).running
    assert seq.phase is Phase.PREFILL
    m.run()
    m.expect(j)
