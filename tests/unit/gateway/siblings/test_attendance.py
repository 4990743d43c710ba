"""Which sockets of a port have nobody of their own: an example, and any order of events against a plain model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.siblings.attendance import Attendance


def test_who_is_gone_leaves_an_orphan_until_the_next_one_serves():
    book = Attendance(3)
    assert book.orphans == (0, 1, 2) and not book.anybody
    book.serves("a", 0)
    book.serves("b", 1)
    book.serves("c", 2)
    assert book.orphans == () and book.anybody
    book.leaves("b")
    assert book.orphans == (1,) and not book.is_serving("b")
    book.serves("b's successor", 1)
    assert book.orphans == ()


def test_a_predecessor_that_still_serves_or_says_late_that_it_leaves_changes_nothing():
    book = Attendance(2)
    book.serves("former", 0)
    book.serves("successor", 0)
    assert book.orphans == (1,)
    book.leaves("former")
    book.leaves("former")
    assert book.orphans == (1,)


def test_a_frozen_process_does_not_count_until_it_answers():
    book = Attendance(2)
    book.serves("a", 0)
    book.serves("b", 1)
    book.freezes("b")
    assert book.orphans == (1,) and book.is_frozen("b") and book.is_serving("b")
    book.thaws("b")
    assert book.orphans == () and not book.is_frozen("b")
    book.freezes("b")
    book.leaves("b")
    book.serves("b's successor", 1)
    assert book.orphans == () and not book.is_frozen("b")


def test_who_freezes_before_it_serves_is_no_help_yet():
    book = Attendance(1)
    book.freezes("a")
    assert book.is_frozen("a")
    book.serves("a", 0)  # said before it froze, heard after
    assert book.orphans == (0,)
    book.thaws("a")
    assert book.orphans == ()


@pytest.mark.parametrize("number", [-1, 2])
def test_there_is_no_such_socket(number):
    with pytest.raises(ValueError, match="of 2"):
        Attendance(2).serves("a", number)


EVENT = st.tuples(st.sampled_from(["serves", "leaves", "freezes", "thaws"]), st.integers(0, 4), st.integers(0, 2))


@given(st.lists(EVENT, max_size=40))
def test_any_order_of_events(events):
    book, serving, frozen = Attendance(3), {}, set()
    for what, who, number in events:
        if what == "serves":
            book.serves(who, number)
            serving[who] = number
        else:
            getattr(book, what)(who)
            if what == "leaves":
                serving.pop(who, None)
            (frozen.add if what == "freezes" else frozen.discard)(who)
        there = {serving[it] for it in serving if it not in frozen}
        assert book.orphans == tuple(sorted({0, 1, 2} - there))
        assert book.anybody == bool(there)
