"""Which tails are kept, and which goes first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.types import PAGE_TOKENS
from scheduler_svc.core.keymap import key_columns
from scheduler_svc.core.tails import INTERVAL_TOKENS, Reason, TailIndex, save_points
from scheduler_svc.core.trie import NO_ROW, Bits, PageTrie
from tests.unit.scheduler.prefix_oracle import Oracle, key_of

PROMPT, TURN, BRANCH, INTERVAL = (int(r) for r in (Reason.PROMPT, Reason.TURN, Reason.BRANCH, Reason.INTERVAL))


class Place:
    """A trie with published paths and its tails; rows by path."""

    def __init__(self, *paths, tails=8, protected=0):
        self.trie = PageTrie(0, 64)
        self.tails = TailIndex(self.trie, 0, tails, protected)
        self.rows = {}
        self.at = 0
        for path in paths:
            self.publish(path)

    def publish(self, path):
        columns = key_columns([key_of(path[: i + 1]) for i in range(len(path))])
        pages = np.arange(self.at, self.at + len(path), dtype=np.int32)
        rows, _, branches = self.trie.publish(NO_ROW, columns, pages, np.zeros(len(path), np.int64), 0)
        self.at += len(path)
        self.tails.branch(branches)
        for i, row in enumerate(rows.tolist()):
            self.rows[path[: i + 1]] = row

    def attach(self, tail, path, reasons, now):
        kept = self.tails.attach(tail, self.rows[path], reasons, now)
        self.tails.check()
        return kept

    def order(self):
        """Evict everything for a turn's end; the tails in the order they went."""
        gone = []
        while tails := self.tails.evict(1, TURN):
            self.tails.check()
            gone += tails
        return gone


def test_interval_tails_go_first_then_superseded_ones_then_the_oldest():
    place = Place((1, 2, 3, 4, 5), (9, 9))
    place.attach(0, (9, 9), TURN, 1)
    place.attach(1, (1,), INTERVAL, 9)
    place.attach(2, (1, 2), PROMPT, 7)
    place.attach(3, (1, 2, 3, 4), TURN, 8)
    assert place.order() == [1, 2, 0, 3]


def test_an_interval_tail_never_displaces_another_class():
    place = Place((1, 2, 3))
    place.attach(0, (1, 2, 3), TURN, 0)
    assert place.tails.evict(3, INTERVAL) == []
    place.attach(1, (1,), INTERVAL, 5)
    assert place.tails.evict(3, INTERVAL) == [1]
    assert place.tails.n == 1


def test_a_tail_kept_for_two_reasons_is_not_an_interval_tail():
    place = Place((1, 2))
    place.attach(0, (1, 2), INTERVAL, 0)
    assert not place.attach(1, (1, 2), PROMPT, 3)
    assert place.tails.evict(1, INTERVAL) == []
    assert place.order() == [0]


def test_branch_points_are_not_superseded():
    place = Place((1, 2, 3), (8, 8))
    place.attach(0, (1,), PROMPT, 0)
    place.attach(1, (1, 2, 3), TURN, 2)
    place.attach(2, (8, 8), TURN, 1)
    assert [place.tails.class_of(i) for i in range(3)] == [1, 2, 2]
    place.publish((1, 7))  # a second child of the first page
    assert [place.tails.class_of(i) for i in range(3)] == [3, 2, 2]
    assert place.order() == [0, 2, 1]


def test_a_tail_attached_where_a_branch_was_seen_before_is_a_branch_tail():
    place = Place((1, 2), (1, 3))
    place.attach(0, (1,), PROMPT, 0)
    place.attach(1, (1, 3), TURN, 5)
    assert place.tails.class_of(0) == 3
    assert place.tails.reasons[0] == PROMPT | BRANCH


def test_protected_branch_tails_outlive_younger_ones_up_to_their_number():
    def order(protected):
        place = Place((1, 2), (1, 3), (4, 5), (4, 6), (7,), protected=protected)
        for now, path in enumerate([(1,), (4,), (1, 2), (7,)]):
            place.attach(now, path, TURN, now)
        return place.order()

    assert order(0) == [0, 1, 2, 3]
    assert order(1) == [0, 2, 3, 1]  # two are too many: the older one goes by its age
    assert order(2) == [2, 3, 0, 1]


def test_superseded_ends_with_the_later_tail():
    place = Place((1, 2, 3, 4))
    place.attach(0, (1,), TURN, 0)
    place.attach(1, (1, 2, 3), TURN, 1)
    assert place.tails.class_of(0) == 1
    place.tails.detach([1])
    place.tails.check()
    assert place.tails.class_of(0) == 2
    place.attach(2, (1, 2, 3, 4), TURN, 3)
    place.attach(3, (1, 2), TURN, 4)  # between the two
    assert place.tails.above[[0, 2, 3]].tolist() == [-1, 3, 0]
    place.tails.detach([3])
    assert place.tails.above[2] == 0
    place.tails.check()


def test_a_tail_goes_without_its_page_and_a_page_takes_its_tail():
    place = Place((1, 2))
    row = place.rows[(1, 2)]
    place.attach(5, (1, 2), TURN, 0)
    place.tails.evict(1, TURN)
    assert place.trie.n_pages == 2 and place.trie.tail[row] == -1
    assert place.trie.bits[row] & int(Bits.HAD_TAIL)
    place.attach(6, (1, 2), TURN, 1)
    assert not place.trie.bits[row] & int(Bits.HAD_TAIL)
    place.trie.release(np.array([place.rows[(1,)], row], np.int32), 2)
    pages, tails = place.trie.evict(1)
    assert (pages.tolist(), tails.tolist()) == ([1], [6])


def test_a_tail_being_loaded_stays():
    place = Place((1, 2))
    place.attach(0, (1,), INTERVAL, 0)
    place.attach(1, (1, 2), TURN, 1)
    place.tails.acquire(0, 2)
    assert place.order() == [1]
    place.tails.release(0)
    assert place.order() == [0]
    with pytest.raises(AssertionError, match="only an attached tail"):
        place.tails.acquire(0, 3)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.integers(1, 15)), max_size=14),
    st.sampled_from([0, 2, 16]),
)
def test_the_whole_order_agrees_with_brute_force(wanted, protected):
    """Tails in random places of a bushy trie, attached in random order: they leave as the oracle says."""
    paths = [(a, b, c, d) for a in range(2) for b in range(2) for c in range(2) for d in (0,)]
    place, oracle = Place(*paths, tails=16, protected=protected), Oracle(protected=protected)
    for path in paths:
        for i in range(len(path)):
            oracle.publish(path[: i + 1], 0, 0, 0)
    for tail, (a, b, depth, reasons) in enumerate(wanted):
        path = (a % 2, b % 2, 0, 0)[: depth + 1]
        assert place.attach(tail, path, reasons, tail // 3) == oracle.attach(tail, path, reasons, tail // 3)
    expected = []
    while (tail := oracle.evict_tail(TURN)) >= 0:
        expected.append(tail)
    assert place.order() == expected


def test_where_a_prefill_saves_tails():
    page = PAGE_TOKENS
    assert save_points(0, 100, []) == []
    assert save_points(0, 3 * page + 7, []) == [(3 * page, PROMPT)]
    assert save_points(3 * page, 3 * page + 7, [3 * page]) == []
    assert save_points(0, 5 * page, [2 * page, 5 * page, 6 * page]) == [(2 * page, BRANCH), (5 * page, BRANCH | PROMPT)]
    long = 2 * INTERVAL_TOKENS + page
    assert save_points(0, long, []) == [(INTERVAL_TOKENS, INTERVAL), (2 * INTERVAL_TOKENS, INTERVAL), (long, PROMPT)]
    assert save_points(INTERVAL_TOKENS, long, []) == [(2 * INTERVAL_TOKENS, INTERVAL), (long, PROMPT)]
