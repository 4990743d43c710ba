"""Tails of one pool: which page each resumes at, why it is kept, and which goes first when there are too few.

A tail is V4's scarce resource: a prefix can be resumed only where one is alive. Kept are those at the last page
boundary of a prompt, at the end of a finished turn, at branch points, and every 32k tokens. They leave in this order:
32k tails (which never displace another class), tails superseded by a later one of the same chain unless at a branch
point, then the least recently used. A tail never takes its page with it; a page takes its tail.
"""

from collections.abc import Iterable
from enum import IntFlag

import numpy as np

from meshkit.types import PAGE_TOKENS
from scheduler_svc.core.trie import FREE_ROW, NO_ROW, Bits, PageTrie

INTERVAL_TOKENS = 32_768
NO_TAIL = -1
STAYS = (1 << 63) - 1
_CLASS = 61  # last uses are below 1 << 61


class Reason(IntFlag):
    """Why a tail is kept. One tail may serve several."""

    PROMPT = 1  # last page boundary of a prompt
    TURN = 2  # ... of a finished or preempted turn
    BRANCH = 4  # two continuations are known
    INTERVAL = 8  # every 32k tokens


class TailIndex:
    """Tails base..base+size-1, as far as they lie at the end of a published page. Times as in the trie.

    While no more than `protected` of them lie at branch points, those outlive all others: many short continuations of a
    few prefixes would else push out, by recency alone, the tails that all of them need. 0 is plain LRU.
    """

    def __init__(self, trie: PageTrie, base: int, size: int, protected: int = 0) -> None:
        self.trie, self.base, self.size, self.protected = trie, base, size, protected
        self.row = np.full(size, NO_ROW, np.int32)
        self.reasons = np.zeros(size, np.uint8)
        self.refs = np.zeros(size, np.int32)
        self.used = np.zeros(size, np.int64)
        self.above = np.full(size, NO_TAIL, np.int32)  # nearest tail further up the chain; a local number
        self.below = np.zeros(size, np.int32)  # tails whose nearest one is this: it is superseded if there are any
        self.order = np.full(size, STAYS, np.int64)  # class and last use in one number: the smallest goes first
        self.n = 0
        self._trie_tail, self._trie_parent = trie.tail.data, trie.parent.data

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in (self.row, self.reasons, self.refs, self.used, self.above, self.below, self.order))

    # ---- coming and going ----

    def attach(self, tail: int, row: int, reasons: int, now: int) -> bool:
        """The tail resumes at the end of this row's page. False if the page has one already: the caller's is surplus.

        The reasons count for whichever tail stays.
        """
        trie = self.trie
        assert trie.page[row] >= 0, "a tail lies at the end of a published page"
        there = self._trie_tail[row]
        if there >= 0:
            local = there - self.base
            self.reasons[local] |= reasons
            self.used[local] = now
            self._rank(local)
            return False
        local = tail - self.base
        assert self.row[local] < 0, "a tail is attached twice"
        if trie.bits[row] & int(Bits.BRANCH):
            reasons |= Reason.BRANCH
        above = self._nearest_above(row)
        self.row[local], self.reasons[local], self.used[local], self.refs[local] = row, reasons, now, 0
        self.above[local], self.below[local] = above, 0
        if above >= 0:
            if self.below[above] and trie.children[row]:
                self._take_over(local, above, row)
            self.below[above] += 1
            self._rank(above)
        elif trie.children[row]:
            self._take_over(local, NO_TAIL, row)
        self._rank(local)
        self._trie_tail[row] = tail
        trie.bits[row] = (int(trie.bits[row]) | int(Bits.TAIL)) & ~int(Bits.HAD_TAIL)
        self.n += 1
        return True

    def _nearest_above(self, row: int) -> int:
        parent, tail = self._trie_parent, self._trie_tail
        row = parent[row]
        while row >= 0:
            if tail[row] >= 0:
                return tail[row] - self.base
            row = parent[row]
        return NO_TAIL

    def _take_over(self, local: int, above: int, row: int) -> None:
        """Tails below a row that has just got one look up to it and no longer past it."""
        depth = int(self.trie.depth[row])
        rivals = np.flatnonzero((self.row >= 0) & (self.above == above))
        rivals = rivals[self.trie.depth[self.row[rivals]] > depth]
        for other in rivals.tolist():
            at = int(self.row[other])
            for _ in range(int(self.trie.depth[at]) - depth):
                at = self._trie_parent[at]
            if at == row:
                self.above[other] = local
                self.below[local] += 1
                if above >= 0:
                    self.below[above] -= 1

    def detach(self, tails: Iterable[int], *, evicted: bool = True) -> None:
        """These tails are no more: evicted, or gone with their pages."""
        for tail in tails:
            local = tail - self.base
            row = int(self.row[local])
            assert row >= 0 and not self.refs[local], "only an attached tail that nobody loads can go"
            above = int(self.above[local])
            heirs = int(self.below[local])
            if heirs:
                self.above[(self.above == local) & (self.row >= 0)] = above
            if above >= 0:
                self.below[above] += heirs - 1
                self._rank(above)
            self.row[local] = NO_ROW
            self.above[local], self.below[local], self.reasons[local] = NO_TAIL, 0, 0
            self.order[local] = STAYS
            self._trie_tail[row] = NO_TAIL
            bits = int(self.trie.bits[row]) & ~int(Bits.TAIL)
            self.trie.bits[row] = bits | int(Bits.HAD_TAIL) if evicted else bits
            self.n -= 1

    def branch(self, rows: Iterable[int]) -> None:
        """These rows have got a second child: a tail there is worth keeping for both."""
        for row in rows:
            if self._trie_tail[row] >= 0:
                local = self._trie_tail[row] - self.base
                self.reasons[local] |= int(Reason.BRANCH)
                self._rank(local)

    def acquire(self, tail: int, now: int) -> None:
        """Somebody is going to load it: it stays until released."""
        local = tail - self.base
        assert self.row[local] >= 0, "only an attached tail can be loaded"
        self.refs[local] += 1
        self.used[local] = now
        self._rank(local)

    def release(self, tail: int) -> None:
        local = tail - self.base
        assert self.refs[local] > 0, "a tail is released more often than acquired"
        self.refs[local] -= 1
        self._rank(local)

    # ---- order of eviction ----

    def class_of(self, tail: int) -> int:
        """0: for the interval alone, 1: superseded, 2: neither, 3: at a branch point, as 2 if not protected."""
        local = tail - self.base
        reasons = int(self.reasons[local])
        if reasons == Reason.INTERVAL:
            return 0
        if reasons & Reason.BRANCH:
            return 3
        return 1 if self.below[local] else 2

    def _rank(self, local: int) -> None:
        """Its place in the order of eviction, after anything that bears on it has changed."""
        if self.refs[local]:
            self.order[local] = STAYS
        else:
            self.order[local] = (self.class_of(local + self.base) << _CLASS) + int(self.used[local])

    def evict(self, n: int, wanted_for: int) -> list[int]:
        """Give up to n tails for one that is wanted for these reasons; their pages stay. Returns the tails."""
        out: list[int] = []
        while len(out) < n and self.size:
            local = self._first()
            if self.order[local] == STAYS or (wanted_for == Reason.INTERVAL and self.order[local] >> _CLASS):
                break
            out.append(local + self.base)
            self.detach(out[-1:])
        return out

    def _first(self) -> int:
        """Who goes first; where nobody can go, one that stays."""
        local = int(self.order.argmin())
        if self.order[local] >> _CLASS != 2 or np.count_nonzero(self.reasons & int(Reason.BRANCH)) <= self.protected:
            return local
        branches = np.flatnonzero((self.order >> _CLASS == 3) & (self.order != STAYS))
        if not len(branches):
            return local
        other = int(branches[self.order[branches].argmin()])
        return min(local, other, key=lambda i: (int(self.used[i]), i))

    # ---- checking ----

    def check(self) -> None:
        """Full recount; AssertionError names the first difference."""
        live = np.flatnonzero(self.row >= 0)
        assert len(live) == self.n, "the count of tails is off"
        assert (self.trie.tail[self.row[live]] == live + self.base).all(), "a page does not know its tail"
        assert np.count_nonzero(self.trie.tail[self.trie.parent != FREE_ROW] >= 0) == self.n, (
            "a page knows a tail that is gone"
        )
        assert (self.trie.page[self.row[live]] >= 0).all(), "a tail outlives its page"
        marked = (self.trie.bits & int(Bits.TAIL) != 0) & (self.trie.parent != FREE_ROW)
        assert np.count_nonzero(marked) == self.n, "the tail bits are off"
        below = np.zeros(self.size, np.int64)
        for local in live.tolist():
            above = self._nearest_above(int(self.row[local]))
            assert self.above[local] == above, "a tail looks up to the wrong one"
            if above >= 0:
                below[above] += 1
        assert (below[live] == self.below[live]).all(), "a count of later tails is off"
        for local in range(self.size):
            stays = self.row[local] < 0 or self.refs[local] > 0
            order = STAYS if stays else (self.class_of(local + self.base) << _CLASS) + int(self.used[local])
            assert self.order[local] == order, "a tail's place in the order of eviction is off"


def save_points(start: int, prompt_tokens: int, branches: Iterable[int]) -> list[tuple[int, int]]:
    """Where a prefill that starts at `start` saves tails: (position, reasons), ascending.

    `branches` are positions (multiples of the page size) where its chain leaves or will leave another one. None of the
    points is at or before `start`, none behind the prompt's last page boundary.
    """
    last = prompt_tokens // PAGE_TOKENS * PAGE_TOKENS
    points: dict[int, int] = {}
    first = (start // INTERVAL_TOKENS + 1) * INTERVAL_TOKENS
    for pos in range(first, last + 1, INTERVAL_TOKENS):
        points[pos] = int(Reason.INTERVAL)
    for pos in branches:
        if start < pos <= last:
            points[pos] = points.get(pos, 0) | int(Reason.BRANCH)
    if last > start:
        points[last] = points.get(last, 0) | int(Reason.PROMPT)
    return sorted(points.items())
