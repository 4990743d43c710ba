"""The cheapest way to a prompt, in one pool and among several; and where chains meet."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.types import PAGE_TOKENS
from scheduler_svc.core.keymap import key_columns
from scheduler_svc.core.prefix import Match, PrefixIndex
from scheduler_svc.core.rebuild import check
from scheduler_svc.core.reuse import Action, Prices, choose, decide, shared_pages
from scheduler_svc.core.tails import NO_TAIL, Reason, save_points
from scheduler_svc.core.trie import Bits
from tests.unit.scheduler.prefix_oracle import key_of

POOL = ("w", 0)
PRICES = Prices(layers=3, token_ns=100.0, context_ns=0.01, resume_ns=500.0, load_ns=10_000.0, load_tail_ns=5_000.0)
REPLAY = 128 + 127 * 2


def match(base=0, tail=0, lower=0, lower_tail=0, pool=POOL):
    number = 7 if tail else NO_TAIL
    return Match(pool, 1, np.arange(base, dtype=np.int32), base, tail, number, max(base, lower), max(tail, lower_tail))


def test_the_length_of_an_exact_replay():
    assert Prices(layers=43, token_ns=1.0).replay_tokens == 5_462
    assert Prices(layers=61, token_ns=1.0).replay_tokens == 7_748


def test_nothing_where_nothing_is():
    got = decide(match(), 1_000, PRICES)
    assert (got.action, got.start, got.write_from, got.pages, got.tail) == (Action.NOTHING, 0, 0, 0, NO_TAIL)


def test_resume_by_tail_and_share_what_lies_behind_it():
    got = decide(match(base=5, tail=4), 6 * PAGE_TOKENS, PRICES)
    assert (got.action, got.start, got.tail) == (Action.TAIL, 4 * PAGE_TOKENS, 7)
    assert (got.write_from, got.pages) == (5 * PAGE_TOKENS, 5)
    private = decide(match(base=5, tail=4), 6 * PAGE_TOKENS, PRICES, share=False)
    assert (private.write_from, private.pages) == (4 * PAGE_TOKENS, 4)


def test_replay_pays_from_one_receptive_field_behind_the_tail():
    near = decide(match(base=4, tail=3), 5 * PAGE_TOKENS, PRICES)
    assert near.action is Action.TAIL
    far = decide(match(base=40, tail=3), 50 * PAGE_TOKENS, PRICES)
    assert (far.action, far.start, far.write_from) == (Action.REPLAY, 40 * PAGE_TOKENS - REPLAY, 40 * PAGE_TOKENS)
    assert far.tail == NO_TAIL and far.pages == 40
    assert near.tails_after == near.start and far.tails_after == far.write_from - 1
    assert decide(match(base=1), 5 * PAGE_TOKENS, PRICES).action is Action.NOTHING  # shorter than the field itself


def test_a_load_from_a_lower_tier_where_it_is_cheaper():
    got = decide(match(base=4, tail=1, lower=8, lower_tail=8), 9 * PAGE_TOKENS, PRICES)
    assert (got.action, got.start, got.load_pages, got.load_tail) == (Action.LOAD, 8 * PAGE_TOKENS, 4, 8 * PAGE_TOKENS)
    assert (got.pages, got.write_from) == (4, 8 * PAGE_TOKENS)
    dear = Prices(layers=3, token_ns=100.0, load_ns=1e9)
    assert decide(match(base=4, tail=1, lower=8, lower_tail=8), 9 * PAGE_TOKENS, dear).action is Action.REPLAY
    only_tail = match(base=8, lower=8, lower_tail=8)
    got = decide(only_tail, 9 * PAGE_TOKENS, PRICES)
    assert (got.action, got.load_pages, got.pages) == (Action.LOAD, 0, 8)
    slower = Prices(layers=3, token_ns=100.0, load_ns=REPLAY * 110.0)
    assert decide(only_tail, 9 * PAGE_TOKENS, slower).action is Action.REPLAY
    deeper = Prices(layers=43, token_ns=100.0, load_ns=REPLAY * 110.0)  # its replay is longer than the prompt
    assert decide(only_tail, 9 * PAGE_TOKENS, deeper).action is Action.LOAD


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(*[st.integers(0, 40)] * 4),
    st.integers(1, 40),
    st.integers(1, 12),
    st.tuples(*[st.sampled_from([0.0, 1.0, 1e3, 1e6])] * 5),
    st.booleans(),
)
def test_no_possible_way_is_cheaper(counts, pages, layers, costs, share):
    """Against every way there is, priced by hand."""
    base, tail, lower, lower_tail = counts
    tokens = pages * PAGE_TOKENS + 1
    base, lower = min(base, pages), min(max(lower, base), pages)
    tail, lower_tail = min(tail, base), min(max(lower_tail, min(tail, base)), lower)
    prices = Prices(
        layers=layers,
        token_ns=10.0,
        context_ns=costs[0] / 1e3,
        resume_ns=costs[1],
        load_ns=costs[2],
        load_tail_ns=costs[3],
        load_page_ns=costs[4],
    )
    got = decide(match(base, tail, lower, lower_tail), tokens, prices, share=share)

    def cost(start):
        return sum(10.0 + costs[0] / 1e3 * (t + 0.5) for t in (start, tokens - 1)) / 2 * (tokens - start)

    ways = [cost(0)]
    if tail:
        ways.append(costs[1] + cost(tail * PAGE_TOKENS))
    if lower_tail > tail:
        load = costs[2] + costs[3] + max(0, lower_tail - base) * costs[4]
        ways.append(load + cost(lower_tail * PAGE_TOKENS))
    if base * PAGE_TOKENS - prices.replay_tokens > tail * PAGE_TOKENS:
        ways.append(cost(base * PAGE_TOKENS - prices.replay_tokens))
    assert got.price_ns == pytest.approx(min(ways))
    assert 0 <= got.start < tokens and got.start <= got.write_from + (got.action is Action.LOAD) * tokens
    assert got.start <= got.tails_after and (got.action is Action.REPLAY or got.start == got.tails_after)
    assert got.pages <= base and got.write_from % PAGE_TOKENS == 0
    assert got.write_from == (got.pages + got.load_pages) * PAGE_TOKENS


def test_the_longest_prefix_wins_unless_its_pool_is_busy():
    matches = [match(), match(base=4, tail=4, pool=("w", 1)), match(base=3, tail=3, pool=("w", 2))]
    tokens = 6 * PAGE_TOKENS
    assert choose(matches, tokens, PRICES, [0.0, 0.0, 0.0]).pool == ("w", 1)
    assert choose(matches, tokens, PRICES, [0.0, 1e6, 0.0]).pool == ("w", 2)
    assert choose(matches, tokens, PRICES, [0.0, 1e6, 1e6]).pool == POOL
    assert choose([match(), match(pool=("w", 1))], tokens, PRICES, [0.0, 0.0]).pool == POOL


@pytest.mark.parametrize(("field", "value"), [("layers", 0), ("token_ns", 0.0)])
def test_prices_that_decide_nothing_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Prices(**{"layers": 3, "token_ns": 1.0, field: value})


def test_shared_pages():
    one, other = (key_columns([key_of((1,)), key_of((1, 2)), key_of((1, 2, i))]) for i in (3, 4))
    assert [shared_pages(one, other), shared_pages(one, one), shared_pages(one, other[:1])] == [2, 3, 1]
    assert shared_pages(one[1:], other) == shared_pages(one, other[:0]) == 0


def test_where_chains_meet_a_tail_is_wanted():
    index = PrefixIndex()
    index.add_pool(POOL, first_page=0, pages=32, first_tail=0, tails=8)

    def run(path, at, save=()):
        columns = key_columns([key_of(path[: i + 1]) for i in range(len(path))])
        found = index.match(POOL, columns, len(path))
        points = index.branch_points(found, len(path))
        hold = index.acquire(found, found.base, found.tail, at)
        more = len(path) - found.base
        if more:
            keys = [key_of(path[: i + 1]) for i in range(found.base, len(path))]
            index.publish(hold, keys, range(at, at + more), range(more), at)
        for pages, tail in save:
            index.attach_tail(hold, pages, tail, int(Reason.PROMPT), at)
        index.release(hold, at)
        return [p // PAGE_TOKENS for p in points]

    assert run((1, 2, 3, 4), 0, [(4, 0)]) == []
    assert run((1, 2, 3, 4, 5), 5) == []  # goes on where the other ended, at its tail
    assert run((1, 2, 8, 8), 10) == [2]  # leaves it behind page 2: a tail there would serve both
    assert run((1, 2, 9), 15, [(2, 1)]) == [2]
    assert run((1, 2, 7), 20) == []  # there is one now
    row = index.pools[POOL].trie.prefix(key_columns([key_of((1,)), key_of((1, 2))]))[1]
    assert index.pools[POOL].trie.bits[row] & int(Bits.BRANCH)
    assert index.counters.branches == 1
    check(index, [])


class Served:
    """Requests one after another over one pool: matches, decides, publishes, saves and evicts as a scheduler does."""

    def __init__(self, pages, tails, protected=0):
        self.index = PrefixIndex()
        self.index.add_pool(POOL, first_page=0, pages=pages, first_tail=0, tails=tails, protected_tails=protected)
        self.free, self.free_tails = list(range(pages)), list(range(tails))
        self.now = self.reused = self.reusable = 0
        self.seen = {}

    def request(self, keys, tokens):
        """`keys` are those of the prompt of `tokens` tokens and of what is generated after it."""
        self.now += 1
        limit, prompt_pages = (tokens - 1) // PAGE_TOKENS, tokens // PAGE_TOKENS
        self.reusable += next((i for i in range(limit) if keys[i] not in self.seen), limit)
        self.seen.update(dict.fromkeys(keys))
        found = self.index.match(POOL, key_columns(keys[:prompt_pages]), limit)
        way = decide(found, tokens, Prices(layers=3, token_ns=1.0))
        points = save_points(way.tails_after, tokens, self.index.branch_points(found, prompt_pages))
        hold = self.index.acquire(found, way.pages, way.tail, self.now)
        self.index.release_tail(hold)
        self.reused += way.start // PAGE_TOKENS
        fresh = keys[way.pages :]
        if len(self.free) < len(fresh):
            pages, tails = self.index.evict_pages(POOL, len(fresh) - len(self.free))
            self.free += pages
            self.free_tails += tails
        if fresh:
            own = [self.free.pop() for _ in fresh]
            self.free += own[: self.index.publish(hold, fresh, own, own, self.now).twins]
        for pos, reasons in [*points, (len(keys) * PAGE_TOKENS, int(Reason.TURN))]:
            self.free_tails += [] if self.free_tails else self.index.evict_tails(POOL, 1, reasons)
            if self.free_tails:
                tail = self.free_tails.pop()
                if not self.index.attach_tail(hold, pos // PAGE_TOKENS, tail, reasons, self.now)[0]:
                    self.free_tails.append(tail)
        self.index.release(hold, self.now)


def sessions(rng, count, turns, shared, first, mine, answers):
    """Growing prompts of sessions in random order: [(keys, tokens of the prompt)], and the pages there are."""
    chains = [[key_of((0, i)) for i in range(shared)] + [key_of((1, s, i)) for i in range(first)] for s in range(count)]
    out = []
    for turn in range(turns):
        for s in rng.permutation(count).tolist():
            prompt = chains[s] + [key_of((2, s, turn, i)) for i in range(rng.integers(*mine))]
            chains[s] = prompt + [key_of((3, s, turn, i)) for i in range(rng.integers(*answers))]
            out.append((chains[s], len(prompt) * PAGE_TOKENS + int(rng.integers(1, PAGE_TOKENS))))
    return out, len({key for keys, _ in out for key in keys})


@pytest.mark.parametrize(
    ("count", "least", "shape"),
    [(2, 0.95, (8, 0, 400, (0, 3), (1, 8))), (12, 0.9, (8, 32, 0, (1, 8), (1, 4)))],
    ids=["two_long_sessions", "agents"],
)
def test_sessions_find_their_prefixes_again_with_two_tails_each(count, least, shape):
    trace, pages = sessions(np.random.default_rng(1), count, *shape)
    served = Served(pages * 11 // 10, 2 * count)
    for keys, tokens in trace:
        served.request(keys, tokens)
    check(served.index, [])
    assert served.index.counters.tails_evicted > 2 * count
    assert served.reused >= least * served.reusable


def test_questions_do_not_push_out_the_tails_of_the_examples_they_share():
    rng = np.random.default_rng(2)
    share = {}
    for protected in (0, 16):
        served = Served(16 * 46, 32, protected)
        for question in range(400):
            which = int(rng.integers(16))
            examples = [key_of((4, which, i)) for i in range(40)]
            served.request(examples + [key_of((5, question))], 41 * PAGE_TOKENS + 9)
        check(served.index, [])
        share[protected] = served.index.counters.servable / served.index.counters.matched
    assert share[16] > 0.95 and share[0] < 0.85
