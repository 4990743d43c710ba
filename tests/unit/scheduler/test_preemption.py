"""Short pools: preemption with frames in flight, private pages and tails, eviction, order of service, bypass."""

import pytest

from meshkit.frames import Verdict
from tests.unit.scheduler.mesh import Mesh


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_growth_preempts_the_youngest_and_it_resumes_from_its_spare(depth):
    m = Mesh(depth=depth)
    w = m.worker(slots=2, pages=6, tails=4)
    g = m.gate()
    old = m.submit(g, prompt=500, max_tokens=300, ignore_eos=True)
    m.steps(2)
    young = m.submit(g, prompt=500, max_tokens=900, ignore_eos=True)
    m.run()
    m.expect(old, young)
    m.idle()
    assert m.core.status().preemptions >= 1
    assert m.core.counters["resumed_from_tail"] >= 1
    assert any(fr.tail_loads for fr in w.log)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_adopted_choice_gets_the_page_it_lacks_before_another_is_placed(depth):
    m = Mesh(depth=depth, chunk_tokens=64)
    w = m.worker(pages=3, tails=4)
    g = m.gate()
    old = m.submit(g, prompt=511, max_tokens=20, ignore_eos=True)
    while not w.slots or len(w.slots[0].ids) < 512:
        m.steps(1)
    m.lose(w)
    young = m.submit(g, prompt=200, max_tokens=20, ignore_eos=True)
    m.redial(w, held=False)
    assert m.core.counters["slots_adopted"] == 1 and len(w.slots[0].pages) == 2
    m.run()
    m.expect(old, young)
    m.idle()
    assert not m.core.counters.get("preemptions")


def test_without_tails_a_preempted_choice_starts_over():
    m = Mesh(depth=2)
    w = m.worker(slots=2, pages=5, tails=0)
    g = m.gate()
    js = [m.submit(g, prompt=250, max_tokens=600, ignore_eos=True) for _ in range(2)]
    m.run()
    m.expect(*js)
    m.idle()
    assert m.core.status().preemptions >= 1
    assert not any(fr.tail_loads or fr.spares or fr.tail_saves for fr in w.log)


def test_cached_pages_are_evicted_when_the_pool_is_short():
    m = Mesh(depth=1)
    m.worker(slots=3, pages=6, tails=6)
    g = m.gate()
    js = [m.submit(g, prompt=300, max_tokens=900 + i, ignore_eos=True) for i in range(3)]
    m.run()
    m.expect(*js)
    m.idle()
    assert m.core.counters["pages_evicted"] >= 1


def test_priority_decides_who_gives_way():
    m = Mesh(depth=1)
    m.worker(slots=2, pages=4, tails=2)
    g = m.gate()
    low = m.submit(g, prompt=250, max_tokens=500, ignore_eos=True, priority=5)
    m.steps(1)
    high = m.submit(g, prompt=250, max_tokens=500, ignore_eos=True, priority=-1)
    order = []
    while not (high.streams[0].reason and low.streams[0].reason):
        m.steps(1)
        order += [n for n, j in (("high", high), ("low", low)) if j.streams[0].reason and n not in order]
    assert order == ["high", "low"], "the older one has the lower priority and is preempted"
    m.expect(low, high)
    m.idle()


def test_order_is_priority_then_arrival():
    m = Mesh(depth=1)
    m.worker(slots=1)
    g = m.gate()
    js = [m.submit(g, max_tokens=5, ignore_eos=True, priority=p) for p in (1, 1, 0, -1, 1)]
    order = []
    while len(order) < 5:
        m.steps(1)
        order += [i for i, j in enumerate(js) if j.streams[0].reason and i not in order]
    assert order == [0, 3, 2, 1, 4]
    m.idle()


def test_one_that_does_not_fit_yet_is_passed_but_not_for_ever():
    m = Mesh(depth=1, bypass=3)
    m.worker(slots=4, pages=8)
    g = m.gate()
    first = m.submit(g, prompt=256 * 4, max_tokens=200, ignore_eos=True)
    big = m.submit(g, prompt=256 * 6, max_tokens=10, ignore_eos=True)
    small = [m.submit(g, prompt=20, max_tokens=30, ignore_eos=True) for _ in range(12)]
    done = []
    everyone = {"first": first, "big": big, **{f"small{i}": j for i, j in enumerate(small)}}
    while len(done) < len(everyone):
        m.steps(1)
        done += [n for n, j in everyone.items() if j.streams[0].reason and n not in done]
    assert done[:3] == ["small0", "small1", "small2"], "three may pass"
    assert done.index("first") < done.index("small3"), "then nobody is admitted before the big one fits"
    m.expect(*everyone.values())
    m.idle()


def test_what_fits_an_empty_pool_is_served_and_what_does_not_is_refused():
    m = Mesh(depth=3)
    m.worker(slots=2, pages=4, tails=1)
    g = m.gate()
    exact = m.submit(g, prompt=4 * 256 - 20, max_tokens=21, ignore_eos=True)
    over = m.submit(g, prompt=4 * 256 - 20, max_tokens=22)
    assert (exact.verdict.verdict, over.verdict.verdict) == (Verdict.ACCEPTED, Verdict.NEVER_FITS)
    assert "empty pool has 4" in over.verdict.message
    m.run()
    m.expect(exact)
    m.idle()


def test_more_rows_than_budget_take_turns():
    m = Mesh(depth=1, chunk_tokens=2)
    m.worker(slots=4)
    g = m.gate()
    js = [m.submit(g, prompt=3, max_tokens=20, ignore_eos=True) for _ in range(4)]
    m.run()
    m.expect(*js)
    m.idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_parked_rows_run_again(depth):
    m = Mesh(depth=depth)
    w = m.worker()
    g = m.gate()
    beat = [0]

    def park(row):
        beat[0] += 1
        return beat[0] % 3 == 1  # the first chunk's sample too

    w.park = park
    js = [m.submit(g, prompt=300, max_tokens=250, ignore_eos=True) for _ in range(2)]
    m.run()
    m.expect(*js)
    m.idle()
    assert m.core.counters["parked_rows"] > 100


def test_decode_rows_come_before_chunks_and_chunks_fill_the_budget():
    m = Mesh(depth=1, chunk_tokens=64)
    w = m.worker()
    g = m.gate()
    a = m.submit(g, prompt=10, max_tokens=40, ignore_eos=True)
    m.steps(2)
    b = m.submit(g, prompt=500, max_tokens=5, ignore_eos=True)
    m.run()
    m.expect(a, b)
    mixed = [fr for fr in w.log if len(fr.chunk_lens) and len(fr.slots) > 1]
    assert mixed and all(fr.chunk_lens.sum() + len(fr.slots) - len(fr.chunk_lens) <= 64 for fr in mixed)
    assert max(fr.chunk_lens.sum() for fr in mixed) == 63


def test_a_lone_prefill_keeps_the_pipeline_full_up_to_its_last_chunk():
    m = Mesh(depth=2, chunk_tokens=100)
    w = m.worker()
    g = m.gate()
    m.submit(g, prompt=250, max_tokens=10, ignore_eos=True)
    assert len(w.frames) == 2, "the second chunk does not wait for the first"
    m.steps(2)
    assert [len(fr.chunk_lens) for fr in w.frames] == [1], "who comes meanwhile joins the first decode step"
    m.steps(1)
    assert [len(fr.chunk_lens) for fr in w.frames] == [0, 0]


def test_pages_are_published_sealed_and_retired_before_reuse():
    m = Mesh(depth=2)
    w = m.worker(slots=2, pages=6, tails=3)
    g = m.gate()
    js = [m.submit(g, prompt=520, max_tokens=300, ignore_eos=True) for _ in range(3)]
    m.run()
    m.expect(*js)
    m.idle()
    published = [p for fr in w.log for p in fr.publishes]
    assert len(published) == len({p.key for p in published}) == 9
    assert len([t for fr in w.log for t in fr.publish_tails]) >= 3
    gens = [p.page_gen for p in published] + [i.slot_gen for fr in w.log for i in fr.inits]
    assert len(set(gens)) == len(gens), "one counter for slots and pages"
    assert sorted(p for fr in w.log for p in fr.retire_pages) == sorted(p.page for p in published)


def test_equal_prompts_publish_a_page_once():
    m = Mesh(depth=1)
    w = m.worker()
    g = m.gate()
    prompt = list(range(2, 602))
    js = [m.submit(g, prompt=prompt, max_tokens=20, ignore_eos=True) for _ in range(2)]
    m.run()
    m.expect(*js)
    m.idle()
    assert len([p for fr in w.log for p in fr.publishes]) == 2


def test_a_tail_published_with_the_last_row_in_flight_is_told_to_the_worker():
    m = Mesh(depth=2)
    w = m.worker(slots=2, pages=6, tails=4)
    g = m.gate()
    js = [m.submit(g, prompt=500, max_tokens=n, ignore_eos=True) for n in (275, 273)]
    m.run()
    m.expect(*js)
    m.idle()
    assert any(fr.publish_tails and not len(fr.slots) for fr in w.log), "a frame of its own, nothing else to run"


def test_a_prompt_tail_is_of_no_use_while_its_last_token_is_parked():
    m = Mesh(depth=1)
    w = m.worker(slots=3, pages=4, tails=4)
    g = m.gate()
    old = [m.submit(g, prompt=254, max_tokens=20, ignore_eos=True) for _ in range(2)]
    young = m.submit(g, prompt=256, max_tokens=20, ignore_eos=True)
    w.park = lambda row: row[1].init.request_id == young.request_id
    m.steps(8)
    assert m.core.status().preemptions == 1 and any(fr.tail_saves for fr in w.log)
    w.park = lambda row: False
    m.run()
    m.expect(*old, young)
    m.idle()
