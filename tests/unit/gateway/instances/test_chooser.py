"""Where requests go: to their prefix, away from load, round instances that refuse, are lost, leave or say nothing."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.instances.chooser import MS, SERVING, STALE_NS, Ask, Chooser
from gateway.instances.known_pages import KnownPages
from meshkit.frames import SchedulerStatus
from meshkit.types import PAGE_TOKENS, ModelInfo

MODEL = ModelInfo(name="m", revision="r", vocab_size=100, max_context=64, eos_ids=(1,), kv_layout_id="k")
NOW = 10**12


def status(**fields):
    return SchedulerStatus(**{"ready": True, "model": MODEL, "slots_total": 16, "pages_total": 1000} | fields)


def chain(name, count):
    return [f"{name}{i}".encode() for i in range(count)]


def ask(keys=(), tokens=None, choices=1):
    return Ask(keys, tokens or max(1, len(keys)) * PAGE_TOKENS, choices)


def chooser(count=3, statuses=None, **options):
    made = Chooser([f"unix:/{i}" for i in range(count)], Random(1), **options)
    for i in range(count):
        made.told(i, (statuses or {}).get(i, status()), True, NOW)
    return made


def done(made, pick, cached_pages=0):
    made.answered(pick, cached_pages * PAGE_TOKENS)
    made.ended(pick, pick.open)


def test_a_prefix_is_sent_where_it_lies():
    made = chooser()
    first = made.choose(ask(chain("a", 20)), NOW)
    assert first.reason == "load"
    done(made, first)
    for turn in "bcdef":
        again = made.choose(ask(chain("a", 20) + chain(turn, 3)), NOW)
        assert (again.index, again.reason, again.known.pages) == (first.index, "prefix", 20)
        done(made, again, 20)


def test_without_prefixes_in_common_load_is_spread_evenly():
    made = chooser()
    picks = [made.choose(ask(chain(f"{i}-", 4)), NOW) for i in range(30)]
    assert set(Counter(pick.index for pick in picks).values()) == {10}


def test_a_busy_place_is_left_although_the_prefix_lies_there():
    made = chooser()
    first = made.choose(ask(chain("a", 4)), NOW)
    done(made, first)
    picks = [made.choose(ask(chain("a", 4)), NOW) for _ in range(40)]
    assert picks[0].index == first.index
    assert len({pick.index for pick in picks}) == 3
    long = made.choose(ask(chain("a", 4) + chain("x", 400)), NOW)
    done(made, long)
    assert made.choose(ask(chain("a", 4) + chain("x", 400)), NOW).index == long.index, "400 pages are worth a queue"


def test_what_others_send_counts_until_it_is_stale():
    made = chooser(2, {0: status(running=12), 1: status(running=2)})
    assert made.choose(ask(), NOW).index == 1
    made.told(1, status(running=15), True, NOW + MS)
    assert made.choose(ask(), NOW + MS).index == 0
    late = NOW + STALE_NS + 2 * MS
    assert {made.choose(ask(), late).index for _ in range(2)} == {0, 1}, "then by what was sent from here"


def test_own_requests_are_not_counted_twice():
    made = chooser(2)
    picks = [made.choose(ask(), NOW) for _ in range(4)]
    made.told(0, status(running=2), True, NOW)
    made.told(1, status(running=2), True, NOW)
    assert [it.others for it in made.instances] == [0, 0]
    for pick in picks:
        made.ended(pick, 1)
    assert [it.open for it in made.instances] == [0, 0] and all(it.prefill == 0 for it in made.instances)


@pytest.mark.parametrize(
    "trouble",
    [
        {"attached": False},
        {"status": status(ready=False)},
        {"status": status(draining=True)},
        {"status": status(model=None, ready=False)},
        {"status": None},
    ],
)
def test_an_instance_in_trouble_is_the_last_choice(trouble):
    made = Chooser(["a", "b"], Random(1))
    made.told(0, trouble.get("status", status()), trouble.get("attached", True), NOW)
    made.told(1, status(running=16, waiting=100), True, NOW)
    keys = chain("a", 50)
    made.instances[0].pages.note(keys)
    assert made.choose(ask(keys), NOW).index == 1
    assert made.choose(ask(keys), NOW, {1}, SERVING) is None
    assert made.choose(ask(keys), NOW, {1}).index == 0, "somebody has to answer"


def test_who_refused_is_avoided_for_a_while():
    made = chooser(2)
    made.avoid(0, 400, NOW)
    assert {made.choose(ask(), NOW + MS).index for _ in range(5)} == {1}
    assert made.choose(ask(), NOW + MS, {1}, SERVING) is None
    assert 0 in {made.choose(ask(), NOW + 401 * MS).index for _ in range(2)}


def test_what_was_never_computed_is_not_remembered():
    made = chooser(2)
    pick = made.choose(ask(chain("a", 9)), NOW)
    made.moved(pick)
    assert len(made.instances[pick.index].pages) == 0 and made.instances[pick.index].open == 0
    kept = made.choose(ask(chain("a", 9)), NOW)
    done(made, kept)
    longer = made.choose(ask(chain("a", 12)), NOW, {1 - kept.index})
    made.moved(longer)
    assert len(made.instances[kept.index].pages) == 9


def test_a_miss_says_that_what_is_older_is_gone():
    made = chooser(1)
    for name in "abc":
        done(made, made.choose(ask(chain(name, 10)), NOW))
    assert len(made.instances[0].pages) == 30
    again = made.choose(ask(chain("b", 10)), NOW)
    assert again.known.sure == 10
    done(made, again, cached_pages=0)
    known = made.instances[0].pages
    assert [known.find(chain(name, 10)).pages for name in "abc"] == [0, 10, 10]
    done(made, made.choose(ask(chain("c", 10)), NOW), cached_pages=9)
    assert known.find(chain("b", 10)).pages == 10


def test_an_instance_is_believed_to_hold_what_its_pool_holds():
    made = chooser(1, {0: status(pages_total=25)})
    for name in "abc":
        made.choose(ask(chain(name, 10)), NOW)
    known = made.instances[0].pages
    assert [known.find(chain(name, 10)).pages for name in "abc"] == [5, 10, 10]
    made.flushed(0)
    assert len(known) == 0


def test_gateways_that_know_nothing_agree_on_a_home():
    homes = []
    for seed in range(2):
        made = Chooser([f"unix:/{i}" for i in range(4)], Random(seed))
        for i in range(4):
            made.told(i, status(), True, NOW)
        homes.append([])
        for i in range(20):
            pick = made.choose(ask(chain(f"s{i}-", 3)), NOW)
            homes[-1].append(pick.index)
            made.moved(pick)
    assert homes[0] == homes[1] and len(set(homes[0])) == 4


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.booleans()), max_size=60), st.integers(1, 30))
def test_known_chains_have_no_holes(uses, most):
    """Whatever is noted, kept, withdrawn and forgotten, bisection finds what a scan finds."""
    known = KnownPages(most)
    for name, length, flag in uses:
        keys = chain(f"{name % 3}:", min(length, 4)) + chain(f"{name};", max(0, length - 4))
        found = known.find(keys)
        assert found.pages == next((i for i, key in enumerate(keys) if key not in known._stamps), len(keys))
        assert found.sure <= found.pages
        known.note(keys)
        assert len(known) <= most
        if flag:
            known.ends(keys[-1])
            known.forget_until(found.stamp)
