"""Requests share the pages and tails of their prefixes: what is served, from where, and what must not be."""

from dataclasses import replace

import numpy as np
import pytest

from meshkit.core import Called
from meshkit.frames import Verdict
from meshkit.pages import namespace_key, page_keys
from meshkit.types import PAGE_TOKENS
from scheduler_svc.core.room import flush
from tests.unit.scheduler.mesh import Mesh

LONG = {"max_tokens": 20, "ignore_eos": True}


def ids(n, seed=1):
    return np.random.default_rng(seed).integers(2, 50_000, n).tolist()


def up(depth=2, recount_steps=5, prefix_cache=True, **worker):
    m = Mesh(depth=depth, recount_steps=recount_steps, prefix_cache=prefix_cache)
    w = m.worker(**({"slots": 4, "pages": 40, "tails": 12} | worker))
    return m, w, m.gate()


def cached(journal):
    return [s.cached for s in journal.streams]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_second_prompt_starts_behind_what_it_shares(depth):
    m, w, g = up(depth)
    first = m.submit(g, prompt=ids(600) + ids(100, 2), **LONG)
    m.run()
    second = m.submit(g, prompt=ids(600) + ids(100, 3), **LONG)
    third = m.submit(g, prompt=ids(600) + ids(100, 2), **LONG)
    m.run()
    m.expect(first, second, third)
    assert (cached(first), cached(second), cached(third)) == ([0], [512], [512])
    assert sum(int(fr.chunk_lens.sum()) for fr in w.log) == 700 + 2 * (700 - 512)
    m.idle()


def test_the_next_turn_starts_behind_the_last_answer():
    m, _, g = up()
    first = m.submit(g, prompt=ids(500), max_tokens=300, ignore_eos=True)
    m.run()
    turn = m.submit(g, prompt=ids(500) + first.streams[0].ids + ids(50, 5), **LONG)
    m.run()
    m.expect(first, turn)
    assert cached(turn) == [768]
    m.idle()


def test_choices_share_a_prefix_with_an_earlier_request():
    m, _, g = up(slots=6)
    m.submit(g, prompt=ids(600), **LONG)
    m.run()
    several = m.submit(g, prompt=ids(600) + ids(10, 7), n=3, **LONG)
    exact = m.submit(g, prompt=ids(513), n=2, **LONG)  # nothing is left to compute but the last token
    m.run()
    m.expect(several, exact)
    assert cached(several) == [512] * 3 and cached(exact) == [512] * 2
    m.idle()


def test_a_waiting_prompt_lets_a_running_prefill_compute_what_both_need():
    m, _, g = up(step_tokens=256)
    first = m.submit(g, prompt=ids(1100) + ids(300, 2), **LONG)
    m.steps(1)
    second = m.submit(g, prompt=ids(1100) + ids(50, 3), **LONG)
    m.run()
    m.expect(first, second)
    assert cached(second) == [1024]
    assert m.core.counters["waits_for_prefill"] == 1
    m.idle()


def test_past_the_branch_nobody_waits():
    m, _, g = up(step_tokens=256)
    first = m.submit(g, prompt=ids(300) + ids(900, 2), **LONG)
    m.steps(2)
    second = m.submit(g, prompt=ids(300) + ids(50, 3), **LONG)
    m.run()
    m.expect(first, second)
    assert "waits_for_prefill" not in m.core.counters
    m.idle()


def test_who_waits_goes_alone_when_the_prefill_is_cancelled():
    m, _, g = up(step_tokens=256)
    first = m.submit(g, prompt=ids(1100) + ids(300, 2), **LONG)
    m.steps(1)
    second = m.submit(g, prompt=ids(1100) + ids(50, 3), **LONG)
    m.close_choices(g, first)
    m.run()
    m.expect(second)
    m.idle()


def test_where_prompts_meet_the_third_is_served():
    m, _, g = up()
    for seed in (2, 3, 4):
        last = m.submit(g, prompt=ids(600) + ids(400, seed), **LONG)
        m.run()
    assert cached(last) == [512]
    m.idle()


def test_other_tenants_and_salts_share_nothing():
    m, _, g = up()
    prompt = ids(600)
    for tenant, salt in (("a", ""), ("b", ""), ("a", "s"), ("a", "")):
        journal = m.journal(prompt, **LONG)
        sub = m.request(g, journal)
        space = namespace_key(tenant, salt, "r", "kv")
        keys = tuple(page_keys(prompt, space))
        for key, c in journal.rows.items():
            g.rows[key] = (journal, c)
        assert m.call(replace(sub, tenant=tenant, namespace=space, page_keys=keys)).verdict is Verdict.ACCEPTED
        m.run()
        m.expect(journal)
        assert cached(journal) == [512 if (tenant, salt) == ("a", "") and journal.request_id[-1] > 2 else 0]
    m.idle()


def test_nothing_is_shared_when_told_so_but_preempted_choices_resume():
    m, _, g = up(prefix_cache=False, slots=2, pages=6)
    js = [m.submit(g, prompt=ids(500), max_tokens=n, ignore_eos=True) for n in (300, 400)]
    m.run()
    m.expect(*js)
    assert [cached(j) for j in js] == [[0], [0]]
    assert m.core.counters["resumed_from_tail"] >= 1
    m.idle()


def test_without_a_tail_a_long_prefix_is_replayed_exactly():
    m, _, g = up(layers=3, tails=0)
    first = m.submit(g, prompt=ids(1500) + ids(30, 2), **LONG)
    m.run()
    second = m.submit(g, prompt=ids(1500) + ids(30, 3), **LONG)
    m.run()
    m.expect(first, second)
    assert cached(second) == [5 * PAGE_TOKENS - (128 + 2 * 127)]
    assert m.core.counters["replays"] == 1
    m.idle()


def test_pages_without_a_tail_are_shared_though_they_are_computed_again():
    m, w, g = up(tails=0)
    m.submit(g, prompt=ids(1024), **LONG)
    m.run()
    used = len(w.published)
    second = m.submit(g, prompt=ids(1024) + ids(5, 2), **LONG)
    m.run()
    m.expect(second)
    assert cached(second) == [0] and len(w.published) == used, "no second copy of the shared pages"
    m.idle()


def test_twins_give_way_when_one_request_needs_the_whole_pool():
    m, _, g = up(slots=2, pages=8, tails=4)
    js = [m.submit(g, prompt=ids(520), max_tokens=m_, ignore_eos=True) for m_ in (1400, 1500)]
    m.run()
    m.expect(*js)
    m.idle()


def test_a_restarted_scheduler_serves_from_what_the_worker_kept():
    m, w, g = up()
    m.submit(g, prompt=ids(600), **LONG)
    m.run()
    again = Mesh(depth=2)
    again.worker(w)
    g2 = again.gate()
    warm = again.submit(g2, prompt=ids(600) + ids(9, 2), **LONG)
    again.run()
    again.expect(warm)
    assert cached(warm) == [512]
    again.idle()


def test_a_lost_worker_takes_its_cache_with_it():
    m, w, g = up()
    m.submit(g, prompt=ids(600), **LONG)
    m.run()
    m.lose(w)
    assert not m.core.state.index.pools
    fresh = m.worker(group="w0", boot=2, slots=4, pages=40, tails=12)
    cold = m.submit(g, prompt=ids(600) + ids(9, 2), **LONG)
    m.run()
    m.expect(cold)
    assert cached(cold) == [0] and fresh.published
    m.idle()


def test_the_rank_that_has_the_prefix_takes_the_prompt():
    m, _, g = up(ranks=2)
    first = m.submit(g, prompt=ids(600), **LONG)
    m.run()
    for seed in range(2, 5):
        warm = m.submit(g, prompt=ids(600) + ids(9, seed), **LONG)
        m.run()
        assert cached(warm) == [512]
    m.expect(first, warm)
    m.idle()


def test_a_flush_leaves_what_runs():
    m, _, g = up()
    done = m.submit(g, prompt=ids(600), **LONG)
    m.run()
    running = m.submit(g, prompt=ids(600) + ids(300, 2), max_tokens=200, ignore_eos=True)
    m.steps(3)
    assert flush(m.core.state) == 0, "everything cached is held"
    m.run()
    m.expect(done, running)
    m.idle()


def test_explain_says_where_a_prompt_stops_being_served():
    m, _, g = up()
    prompt = ids(600)
    m.submit(g, prompt=prompt, **LONG)
    m.run()
    keys = page_keys(prompt + ids(400, 2), namespace_key("t", "", "r", "kv"))
    ((told, decision),) = m.core.explain(keys, 1000)
    assert (told.asked, told.present, told.servable, told.why) == (3, 2, 2, "page_missing")
    assert (decision.action.name, decision.start) == ("TAIL", 512)
    other = page_keys(prompt, namespace_key("u", "", "r", "kv"))
    ((told, decision),) = m.core.explain(other, 600)
    assert (told.present, told.why, decision.start) == (0, "unknown", 0)


def test_a_request_without_a_namespace_gets_one_of_its_own_before_the_model_is_known():
    m = Mesh(depth=1, no_worker_grace_ms=60_000)
    g = m.gate()
    journal = m.journal(ids(300), **LONG)
    sub = m.request(g, journal)
    m.event(Called(99, sub))
    for key, c in journal.rows.items():
        g.rows[key] = (journal, c)
    w = m.worker()
    m.run()
    m.expect(journal)
    assert page_keys(ids(300), namespace_key("t", "", "r", "kv"))[0] not in [p.key for p in w.published.values()]
