"""The page trie and the index over it: against the oracle under random use, and the single promises one by one."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshkit.frames import PublishedPage, PublishedTail
from scheduler_svc.core.coldest import Coldest
from scheduler_svc.core.explain import explain
from scheduler_svc.core.keymap import KeyMap, key_bytes, key_columns
from scheduler_svc.core.prefix import PrefixIndex
from scheduler_svc.core.rebuild import adopt, check, check_trie, dump, rebuild
from scheduler_svc.core.tails import NO_TAIL, Reason
from scheduler_svc.core.trie import NO_ROW, Bits, PageTrie
from tests.unit.scheduler.prefix_oracle import Oracle, key_of

SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PAGES, TAILS, DEEP = 14, 5, 6
POOL = ("w", 1)
BASE_PAGE, BASE_TAIL = PAGES, TAILS  # rank 1: global numbers


def keys_of(path, words=1 << 62, n=None):
    return [key_of(path[: i + 1], words) for i in range(len(path) if n is None else n)]


class Driven:
    """An index with one pool, its oracle, and the free lists of a ledger."""

    def __init__(self, few, words, batch):
        self.few = few
        self.words = words
        self.batch = batch
        self.index = PrefixIndex()
        self.attach()

    def attach(self):
        self.index.add_pool(POOL, first_page=BASE_PAGE, pages=PAGES, first_tail=BASE_TAIL, tails=TAILS)
        self.oracle = Oracle()
        self.free = list(range(BASE_PAGE, BASE_PAGE + PAGES))
        self.free_tails = list(range(BASE_TAIL, BASE_TAIL + TAILS))
        self.holds = []  # (hold, path held, tail)
        self.trie = self.index.pools[POOL].trie
        self.trie.cold.batch = self.batch
        self.trie.few = self.few
        self.gen = 0

    def columns(self, path):
        return key_columns(keys_of(path, self.words))

    def start(self, path, now):
        match = self.index.match(POOL, self.columns(path), len(path))
        assert match.base == self.oracle.prefix(path)
        assert match.tail_pages == self.oracle.servable(path)
        assert match.tail == (self.oracle.nodes[path[: match.tail_pages]].tail if match.tail_pages else NO_TAIL)
        hold = self.index.acquire(match, match.base, match.tail, now)
        self.oracle.acquire(path[: match.base], now)
        if match.tail != NO_TAIL:
            self.oracle.tails[match.tail].refs += 1
            self.oracle.tails[match.tail].used = now
        self.holds.append([hold, path[: match.base], match.tail])

    def grow(self, which, more, now):
        held = self.holds[which]
        hold, path, _ = held
        if len(self.free) < len(more):
            self.evict(len(more) - len(self.free))
        more = more[: len(self.free)]
        if not more:
            return
        pages = [self.free.pop() for _ in more]
        gens = [self.gen + i for i in range(len(more))]
        self.gen += len(more)
        whole = path + more
        done = self.index.publish(hold, keys_of(whole, self.words)[len(path) :], pages, gens, now)
        for i, (page, gen) in enumerate(zip(pages, gens, strict=True)):
            at = whole[: len(path) + i + 1]
            fresh = self.oracle.publish(at, page, gen, now)
            assert fresh == (i >= done.twins)
            assert done.pages[i] == self.oracle.nodes[at].page
            if not fresh:
                self.free.append(page)
        held[1] = whole

    def save(self, which, at, reasons, now):
        hold, path, _ = self.holds[which]
        if not path:
            return
        pages = 1 + at % len(path)
        if not self.free_tails:
            self.evict_tail(reasons)
        if not self.free_tails:
            return
        tail = self.free_tails.pop()
        kept, page = self.index.attach_tail(hold, pages, tail, reasons, now)
        assert kept == self.oracle.attach(tail, path[:pages], reasons, now)
        assert page == self.oracle.nodes[path[:pages]].page
        if not kept:
            self.free_tails.append(tail)

    def evict(self, n):
        could = self.index.idle_pages(POOL)
        pages, tails = self.index.evict_pages(POOL, n)
        assert len(pages) == min(n, could)
        gone = [self.oracle.evict_page(page) for page in pages]
        assert tails == [t for t in gone if t >= 0]
        self.free += pages
        self.free_tails += tails

    def evict_tail(self, reasons):
        expected = self.oracle.evict_tail(reasons)
        assert self.index.evict_tails(POOL, 1, reasons) == ([expected] if expected >= 0 else [])
        if expected >= 0:
            self.free_tails.append(expected)

    def loaded(self, which):
        held = self.holds[which]
        self.index.release_tail(held[0])
        if held[2] != NO_TAIL:
            self.oracle.tails[held[2]].refs -= 1
            held[2] = NO_TAIL

    def release(self, which, now):
        self.loaded(which)
        hold, path, _ = self.holds.pop(which)
        self.index.release(hold, now)
        self.oracle.release(path, now)

    def drop(self):
        old = self.holds
        self.index.drop_pool(POOL)
        self.attach()
        for hold, _, _ in old:
            self.index.release(hold, 0)  # void: changes nothing in the new pool

    def rebuild(self, now):
        pages, tails = dump(self.index, POOL)
        fresh = PrefixIndex()
        fresh.add_pool(POOL, first_page=BASE_PAGE, pages=PAGES, first_tail=BASE_TAIL, tails=TAILS)
        assert rebuild(fresh, POOL, pages[::-1], tails, now) == ([], [])
        holds = []
        for hold, path, _ in self.holds:
            back = adopt(fresh, POOL, [self.oracle.nodes[path[: i + 1]].page for i in range(len(path))], now)
            assert len(back.rows) == len(hold.rows)
            holds.append(back)
        check(fresh, holds)
        assert sorted(dump(fresh, POOL)[0]) == sorted(pages)
        assert sorted(dump(fresh, POOL)[1]) == sorted(tails)
        for path in self.oracle.nodes:
            got = fresh.match(POOL, self.columns(path), len(path))
            assert (got.base, got.tail_pages) == (len(path), self.oracle.servable(path))

    def check(self):
        check(self.index, [hold for hold, _, _ in self.holds])
        assert len(self.free) + self.trie.n_pages == PAGES
        assert len(self.free_tails) + self.index.pools[POOL].tails.n == TAILS
        assert self.index.idle_pages(POOL) == sum(not n.refs for n in self.oracle.nodes.values())
        assert {n.page: n.gen for n in self.oracle.nodes.values()} == {
            p.page: p.page_gen for p in dump(self.index, POOL)[0]
        }


@pytest.mark.parametrize("few", [0, 16], ids=["columns", "one_by_one"])
@SETTINGS
@given(data=st.data())
def test_the_index_agrees_with_brute_force(data, few):
    """Random publish, match, hold, release, evict, save, drop and rebuild; after each step everything is recounted."""
    draw = data.draw
    driven = Driven(few, draw(st.sampled_from([2, 5, 1 << 62])), draw(st.sampled_from([1, 3, 4096])))
    paths = st.lists(st.integers(0, 2), min_size=1, max_size=DEEP).map(tuple)
    names = ["start", "grow", "grow", "save", "save", "release", "loaded", "evict", "evict_tail", "rebuild", "drop"]
    now = 0
    for _ in range(draw(st.integers(1, 40))):
        now += draw(st.integers(0, 1))
        name = draw(st.sampled_from(names))
        which = draw(st.integers(0, max(0, len(driven.holds) - 1)))
        reasons = draw(st.sampled_from([1, 2, 4, 8]))
        if name == "start":
            driven.start(draw(paths), now)
        elif name == "evict":
            driven.evict(draw(st.integers(1, PAGES)))
        elif name == "evict_tail":
            driven.evict_tail(reasons)
        elif name == "rebuild":
            driven.rebuild(now)
        elif name == "drop":
            if draw(st.integers(0, 3)) == 0:
                driven.drop()
        elif not driven.holds:
            continue
        elif name == "grow":
            driven.grow(which, draw(paths)[: DEEP - len(driven.holds[which][1])], now)
        elif name == "save":
            driven.save(which, draw(st.integers(0, DEEP)), reasons, now)
        elif name == "loaded":
            driven.loaded(which)
        else:
            driven.release(which, now)
        driven.check()


@SETTINGS
@given(st.lists(st.integers(0, 400), max_size=120), st.sampled_from([3, 40, 1 << 62]))
def test_the_key_map_finds_what_is_there(ops, words):
    """Insert and delete in turn; every key is found and no other one, and marks of the deleted stay few."""
    rows = 48
    keys, there, free = KeyMap(rows), {}, list(range(rows))
    for op in ops:
        key = key_of((op % 60,), words)
        if key in there:
            keys.delete(np.array([there[key]], np.int32))
            free.append(there.pop(key))
        elif free:
            there[key] = free.pop()
            if op % 2:
                keys.insert(np.array([there[key]], np.int32), key_columns([key]))
            else:
                keys.insert_one(there[key], *key_columns([key])[0].tolist())
        for other in range(60):
            name = key_of((other,), words)
            assert keys.find(*key_columns([name])[0].tolist()) == there.get(name, -1)
        keys.check(np.array(list(there.values()), np.int32))
        assert keys.used == len(there) == np.count_nonzero(keys.table >= 0)
        assert keys.gone == np.count_nonzero(keys.table == -2) <= len(keys.table) // 4


def test_many_keys_at_once():
    rng = np.random.default_rng(1)
    columns = rng.integers(-(2**63), 2**63 - 1, (5000, 2))
    columns[:, 0] &= 0xFFF  # long runs
    keys = KeyMap(5000)
    keys.insert(np.arange(5000, dtype=np.int32), columns)
    keys.delete(np.arange(0, 5000, 3, dtype=np.int32))
    found = [keys.find(low, high) for low, high in columns.tolist()]
    assert found == [-1 if i % 3 == 0 else i for i in range(5000)]


def test_keys_survive_the_columns():
    keys = [bytes(range(16)), b"\xff" * 16]
    assert key_bytes(key_columns(keys)) == keys
    with pytest.raises(ValueError, match="16 bytes"):
        key_columns([b"short"])


@SETTINGS
@given(st.data())
def test_the_heap_hands_out_the_oldest(data):
    """Rows change their use times and become evictable at any moment; what is taken is always among the oldest."""
    live = {}
    cold = Coldest(
        lambda: (np.array(list(live), np.int64), np.array(list(live.values()), np.int64)), data.draw(st.integers(1, 4))
    )
    now = 0
    for row in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.integers(0, 2))
        live[row] = now
        cold.offer(row, now)
        if data.draw(st.booleans()) and live:
            touched = data.draw(st.sampled_from(sorted(live)))
            live[touched] = now
            cold.offer(touched, now)
        while live and data.draw(st.integers(0, 2)) == 0:
            used, oldest = cold.next()
            cold.take()
            if live.get(oldest) == used:
                assert used == min(live.values())
                del live[oldest]


def chain(trie, path, pages, now=0, parent=NO_ROW, skip=0):
    """Publish a whole path into a bare trie."""
    columns = key_columns(keys_of(path)[skip:])
    return trie.publish(parent, columns, np.array(pages, np.int32), np.arange(len(pages)), now)


def test_a_twin_stays_private_and_the_chain_goes_on_below_it():
    trie = PageTrie(0, 8)
    first, _, _ = chain(trie, (1, 2), [0, 1])
    rows, twins, branches = chain(trie, (1, 2, 3), [4, 5, 6])
    assert twins == 2 and branches == []
    assert trie.page[rows].tolist() == [0, 1, 6]
    assert rows[:2].tolist() == first.tolist()
    assert trie.refs[rows].tolist() == [2, 2, 1]
    check_trie(trie)


def test_second_child_is_told_once():
    trie = PageTrie(0, 8)
    chain(trie, (1, 2), [0, 1])
    rows, _, branches = chain(trie, (1, 3), [2, 3])
    assert branches == [rows[0]] and trie.bits[rows[0]] & int(Bits.BRANCH)
    assert chain(trie, (1, 4), [4, 5])[2] == []


def test_a_chain_is_evicted_from_its_end_and_not_below_a_reference():
    trie = PageTrie(0, 8)
    held, _, _ = chain(trie, (1, 2, 3, 4), [0, 1, 2, 3])
    rows, _, _ = chain(trie, (1, 2), [6, 7])
    trie.release(held, 5)
    assert trie.idle == 2
    assert trie.evict(8)[0].tolist() == [3, 2]
    trie.release(rows, 6)
    assert trie.evict(1)[0].tolist() == [1]
    check_trie(trie)


def test_a_parent_used_since_outlives_colder_pages():
    trie = PageTrie(0, 8)
    old, _, _ = chain(trie, (1, 2), [0, 1])
    trie.release(old, 1)
    other, _, _ = chain(trie, (5,), [2], now=2)
    trie.release(other, 2)
    trie.acquire(old[:1], 3)
    trie.release(old[:1], 3)
    assert trie.evict(3)[0].tolist() == [1, 2, 0]


def test_match_tells_what_lower_tiers_have():
    index = PrefixIndex()
    index.add_pool(POOL, first_page=0, pages=4, first_tail=0, tails=4, ghosts=4)
    trie, keys = index.pools[POOL].trie, keys_of((1, 2, 3, 4, 5))
    columns = key_columns(keys)
    hold = index.hold(POOL)
    index.publish(hold, keys[:4], range(4), range(4), 0)
    index.attach_tail(hold, 1, 0, int(Reason.TURN), 0)
    trie.mark(columns[:3], int(Bits.L2_BASE))
    trie.mark(columns[2:4], int(Bits.L2_TAIL))  # of the fourth page only the tail
    index.release(hold, 1)

    def counts():
        got = index.match(POOL, columns, 5)
        return got.base, got.tail_pages, got.lower_base, got.lower_tail_pages, len(got.rows)

    assert counts() == (4, 1, 4, 4, 4)
    index.evict_pages(POOL, 2)
    assert counts() == (2, 1, 3, 3, 4)
    assert explain(index, POOL, columns, 5).why == "no_tail"
    assert (explain(index, POOL, columns, 1).why, explain(index, POOL, columns, 3).tier) == ("hit", "")
    check(index, [])


def test_ghosts_remember_what_a_lower_tier_has():
    trie = PageTrie(0, 4, ghosts=3)
    rows, _, _ = chain(trie, (1, 2, 3), [0, 1, 2])
    columns = key_columns(keys_of((1, 2, 3)))
    assert trie.mark(columns, int(Bits.L2_BASE)) == 3
    trie.release(rows, 1)
    assert trie.evict(3)[0].tolist() == [2, 1, 0]
    check_trie(trie)
    assert len(trie.prefix(columns)) == 3 and trie.n_pages == 0
    back, twins, _ = chain(trie, (1, 2, 3), [3, 1, 2], now=2)
    assert twins == 0 and trie.page[back].tolist() == [3, 1, 2] and trie.children[back].tolist() == [1, 1, 0]
    trie.release(back, 3)
    trie.evict(2)
    trie.unmark(columns[2:], int(Bits.L2_BASE))
    assert len(trie.prefix(columns)) == 2
    check_trie(trie)


def test_ghosts_give_way_to_pages():
    trie = PageTrie(0, 4, ghosts=2)
    assert trie.add_ghosts(key_columns(keys_of((9, 9, 9))), int(Bits.L3_BASE), 0) == 2
    for step, path in enumerate([(1, 2, 3, 4), (5, 6, 7, 8), (1, 2, 5, 6)]):
        rows, twins, _ = chain(trie, path, [0, 1, 2, 3], now=step)
        assert twins == 0
        trie.mark(key_columns(keys_of(path)), int(Bits.L2_BASE))
        trie.release(rows, step)
        assert len(trie.evict(4)[0]) == 4
        check_trie(trie)
    assert trie.n_free >= 4


@SETTINGS
@given(st.data())
def test_ghosts_keep_every_count(data):
    """Pages come and go while lower tiers gain and lose copies: chains stay whole and pages always find a row."""
    trie = PageTrie(0, 6, ghosts=data.draw(st.integers(1, 5)))
    trie.few = data.draw(st.sampled_from([0, 16]))
    free, paths = list(range(6)), st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
    for now in range(data.draw(st.integers(1, 25))):
        path = data.draw(paths)
        columns = key_columns(keys_of(path))
        op = data.draw(st.sampled_from(["publish", "evict", "mark", "unmark", "ghosts"]))
        if op == "publish":
            if len(free) < len(path):
                free += trie.evict(len(path) - len(free))[0].tolist()
            pages = [free.pop() for _ in path]
            rows, twins, _ = chain(trie, path, pages, now)
            free += pages[:twins]
            assert len(trie.prefix(columns)) == len(path)
            trie.release(rows, now)
        elif op == "evict":
            free += trie.evict(data.draw(st.integers(1, 6)))[0].tolist()
        elif op == "mark":
            trie.mark(columns, int(Bits.L2_BASE | Bits.L2_TAIL))
        elif op == "unmark":
            trie.unmark(columns[-1:], int(Bits.LOWER))
        else:
            trie.add_ghosts(columns, int(Bits.L3_BASE), now)
        check_trie(trie)
        assert len(free) + trie.n_pages == 6 and trie.n_free >= 6 - trie.n_pages


def test_a_dump_with_faults_is_taken_as_far_as_it_hangs_together():
    index = PrefixIndex()
    index.add_pool(POOL, first_page=0, pages=12, first_tail=0, tails=4)
    a, b, c, d = keys_of((1, 2, 3, 4))
    pages = [
        PublishedPage(2, 12, 1, c),
        PublishedPage(0, 10, -1, a),
        PublishedPage(1, 11, 0, b),
        PublishedPage(5, 13, 0, b),  # a twin; what hangs on it hangs on the one that counts
        PublishedPage(6, 14, 5, key_of((1, 2, 9))),
        PublishedPage(7, 15, 8, d),  # its parent is not in the dump
        PublishedPage(9, 16, 10, key_of((7,))),  # a ring
        PublishedPage(10, 17, 9, key_of((8,))),
    ]
    tails = [PublishedTail(0, 2), PublishedTail(1, 5), PublishedTail(2, 7), PublishedTail(3, 1)]
    assert rebuild(index, POOL, pages, tails, 1) == ([5, 7, 9, 10], [2, 3])
    check(index, [])
    assert index.match(POOL, key_columns([a, b, c]), 3).tail == 0
    got = index.match(POOL, key_columns([a, b, key_of((1, 2, 9))]), 3)
    assert (got.base, got.tail_pages, got.tail) == (3, 2, 1)
    assert [p.page_gen for p in dump(index, POOL)[0]] == [10, 11, 12, 14]
    trie = index.pools[POOL].trie
    assert [bool(trie.bits[row] & int(Bits.BRANCH)) for row in got.rows] == [False, True, False]


def test_a_running_choice_is_adopted_up_to_its_first_private_page():
    index = PrefixIndex()
    index.add_pool(POOL, first_page=0, pages=8, first_tail=0, tails=4)
    a, b, c = keys_of((1, 2, 3))
    pages = [PublishedPage(0, 1, -1, a), PublishedPage(1, 2, 0, b), PublishedPage(2, 3, 1, c)]
    rebuild(index, POOL, pages, [], 1)
    holds = [adopt(index, POOL, pages, 2) for pages in ([0, 1, 5], [0, 6, 2], [7, 1], [0, 2], [])]
    assert [len(hold.rows) for hold in holds] == [2, 1, 0, 1, 0]
    check(index, holds)
    assert index.idle_pages(POOL) == 1
    assert index.evict_pages(POOL, 8) == ([2], [])


def test_the_limit_and_several_pools():
    index = PrefixIndex()
    other = ("x", 0)
    for pool in (POOL, other):
        index.add_pool(pool, first_page=0, pages=8, first_tail=0, tails=4)
    keys = keys_of((1, 2, 3, 4))
    for pool, n in ((POOL, 2), (other, 4)):
        hold = index.hold(pool)
        index.publish(hold, keys[:n], range(n), range(n), 0)
        index.attach_tail(hold, n, 0, int(Reason.TURN), 0)
        index.release(hold, 1)
    columns = key_columns(keys)
    assert [index.match(pool, columns, 4).tail_pages for pool in (POOL, other)] == [2, 4]
    assert index.match(other, columns, 3).tail_pages == 0  # the last page of the prompt must be computed
    index.drop_pool(other)
    assert list(index.pools) == [POOL] and index.counters.pools_dropped == 1


def test_why_a_prompt_missed():
    index = PrefixIndex()
    index.add_pool(POOL, first_page=0, pages=8, first_tail=0, tails=4)
    keys = keys_of((1, 2, 3, 4))
    columns = key_columns(keys)
    trie = index.pools[POOL].trie

    def why(limit=4):
        return explain(index, POOL, columns, limit)

    assert (why().why, why().first_missing, why().missing_key) == ("unknown", 0, keys[0])
    hold = index.hold(POOL)
    index.publish(hold, keys[:3], [0, 1, 2], [0, 1, 2], 0)
    assert (why(3).why, why(3).present, why(3).servable) == ("no_tail", 3, 0)
    index.attach_tail(hold, 3, 0, int(Reason.PROMPT), 0)
    assert (why(3).why, why(3).servable) == ("hit", 3)
    assert (why().why, why().first_missing, why().missing_key) == ("page_missing", 3, keys[3])
    index.evict_tails(POOL, 1, int(Reason.TURN))
    assert (why(3).why, why(3).tier) == ("tail_evicted", "")
    trie.mark(columns[2:3], int(Bits.L2_TAIL))
    assert why(3).tier == "L2"
    index.release(hold, 1)
    index.evict_pages(POOL, 2)
    index.attach_tail(index.acquire(index.match(POOL, columns, 1), 1, NO_TAIL, 2), 1, 1, int(Reason.TURN), 2)
    assert (why().why, why().first_missing, why().servable) == ("page_evicted", 1, 1)
    row = trie.prefix(columns)[0]
    trie.bits[row] &= 0xFFFF & ~int(Bits.C128)
    assert (why().why, why().missing_classes) == ("class_missing", ("C128",))
    assert index.counters.lookups == 1  # explaining does not count
