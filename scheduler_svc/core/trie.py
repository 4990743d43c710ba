"""Published pages of one pool as a trie in numpy columns: who follows whom, who is in use, what may be evicted.

A row is one published page: its key, parent, tier bits, and the number of the page that holds it in GPU memory. Pages
have fixed size, so rows never split. Chains are followed by a hint in each row (the child used last), checked against
the keys in one comparison; only where the hint is wrong is the key map asked. A row outlives its children, and who
holds a chain holds all of it, so an unreferenced row has no referenced row below it. Tails are `tails.py`'s.
"""

from enum import IntFlag

import numpy as np

from scheduler_svc.core.coldest import Coldest
from scheduler_svc.core.keymap import I32, I64, KeyMap

NO_ROW = -1
FREE_ROW = -2  # as the parent of a row that holds nothing
FEW = 16  # so many pages are published faster one by one than by columns
REMEMBERED = 16_384  # keys evicted last, to tell why a prompt missed


class Bits(IntFlag):
    """What of a page is where: four classes in three tiers, and remarks. L1 is the worker's memory."""

    C4 = 1
    C4_INDEX = 2
    C128 = 4
    TAIL = 8
    BASE = C4 | C4_INDEX | C128
    L2_BASE = BASE << 4
    L2_TAIL = TAIL << 4
    L3_BASE = BASE << 8
    L3_TAIL = TAIL << 8
    LOWER = 0xFF0  # anything in L2 or L3
    BRANCH = 1 << 12  # a second child was seen: a tail here serves both
    HAD_TAIL = 1 << 13  # a tail was here and has been evicted


BASE, LOWER = int(Bits.BASE), int(Bits.LOWER)


class PageTrie:
    """`pages` pages numbered base..base+pages-1, and `ghosts` rows for pages that only a lower tier still has.

    `idle` is the number of pages that nobody refers to: all of them can be evicted. Times are any integers that never
    decrease.
    """

    def __init__(self, base: int, pages: int, ghosts: int = 0) -> None:
        rows = pages + ghosts
        self.base, self.pages, self.ghosts = base, pages, ghosts
        self.few = FEW
        self.keys = KeyMap(rows)
        self.parent = np.full(rows, FREE_ROW, np.int32)
        self.hint = np.full(rows, NO_ROW, np.int32)  # the child used last
        self.children = np.zeros(rows, np.int32)
        self.resident = np.zeros(rows, np.int32)  # children that have a page
        self.refs = np.zeros(rows, np.int32)
        self.used = np.zeros(rows, np.int64)
        self.gen = np.zeros(rows, np.int64)
        self.bits = np.zeros(rows, np.uint16)
        self.page = np.full(rows, -1, np.int32)
        self.tail = np.full(rows, -1, np.int32)
        self.depth = np.zeros(rows, np.int32)  # 0 = first page of a sequence
        self.row_of_page = np.full(pages, NO_ROW, np.int32)
        self._free = np.arange(rows - 1, -1, -1, dtype=np.int32)  # a stack: the last one is taken first
        self.n_free = rows
        self.n_pages = 0
        self.idle = 0
        self.cold = Coldest(self._evictable)
        self._lost = np.zeros(REMEMBERED, np.int64)  # low words of the keys evicted last; a ring
        self._n_lost = 0
        # One element through a memoryview costs a third of one through an array.
        self._parent, self._hint, self._children = self.parent.data, self.hint.data, self.children.data
        self._resident, self._refs, self._used = self.resident.data, self.refs.data, self.used.data
        self._gen, self._bits, self._page = self.gen.data, self.bits.data, self.page.data
        self._tail, self._depth = self.tail.data, self.depth.data
        self._row_of_page, self._free_view = self.row_of_page.data, self._free.data

    @property
    def nbytes(self) -> int:
        """Bytes of all columns and the key map."""
        columns = (self.parent, self.hint, self.children, self.resident, self.refs, self.used, self.gen, self.bits)
        rest = (self.page, self.tail, self.depth, self.row_of_page, self._free, self._lost)
        return self.keys.nbytes + sum(c.nbytes for c in columns) + sum(c.nbytes for c in rest)

    # ---- finding ----

    def prefix(self, columns: I64) -> I32:
        """Rows of the leading keys ([n, 2], see key_columns), up to the first that is unknown."""
        n = len(columns)
        row = self.keys.find(int(columns[0, 0]), int(columns[0, 1])) if n else NO_ROW
        if row < 0:
            return np.empty(0, np.int32)
        words, word, hint = self.keys.words, self.keys.words_view, self._hint
        found: list[I32] = []
        at, step = 0, 64
        while True:
            span = min(step, n - at)
            last = row + span - 1
            # Rows are taken in order, so the whole span may be one run. Else the hints are followed; where one is
            # missing they lead astray, which the comparison with the keys shows.
            if last < len(self.parent) and word[last, 0] == int(columns[at + span - 1, 0]):
                rows = np.arange(row, last + 1, dtype=np.int32)
            else:
                rows = np.array([row, *[row := hint[row] for _ in range(span - 1)]], np.int32)
            same = words[rows] == columns[at : at + span]
            good = span
            if np.count_nonzero(same) != 2 * span:
                good = int(same.ravel().argmin()) >> 1
                rows = rows[:good]
            found.append(rows)
            at += good
            if at == n:
                break
            parent = int(rows[-1])
            row = hint[parent]
            low, high = int(columns[at, 0]), int(columns[at, 1])
            if row < 0 or word[row, 0] != low or word[row, 1] != high:
                row = self.keys.find(low, high)
                if row < 0:
                    break
                hint[parent] = row
            step = step * 4 if good == span else 64
        return found[0] if len(found) == 1 else np.concatenate(found)

    def was_evicted(self, low: int) -> bool:
        """True if a key with this low word was among the last REMEMBERED ones to be removed."""
        return bool((self._lost[: self._n_lost] == low).any())

    # ---- holding ----

    def acquire(self, rows: I32, now: int) -> None:
        """One more reference to each row of a chain (from its first page on), which is used now."""
        refs = self.refs[rows]
        self.idle -= len(rows) - int(np.count_nonzero(refs))
        self.refs[rows] = refs + 1
        self.used[rows] = now

    def release(self, rows: I32, now: int) -> None:
        """One reference less to each row of a chain."""
        if not len(rows):
            return
        refs = self.refs[rows] - 1
        assert refs.min() >= 0, "a page is released more often than acquired"
        self.refs[rows] = refs
        self.used[rows] = now
        self.idle += len(rows) - int(np.count_nonzero(refs))
        last = int(rows[-1])
        if not self._refs[last] and not self._resident[last]:
            self.cold.offer(last, now)

    # ---- publishing ----

    def publish(self, parent: int, columns: I64, pages: I32, gens: I64, now: int) -> tuple[I32, int, list[int]]:
        """Add consecutive pages below row `parent` (NO_ROW = at the root); the caller holds the parent.

        Returns (rows, twins, branches): the first `twins` rows were published before and keep their page, so the
        caller's stays private. All rows are acquired for the caller. `branches`: rows that got a second child.
        A key that is known without a page (a ghost) gets the caller's.
        """
        if len(columns) <= self.few:
            return self._publish_few(parent, columns, pages, gens, now)
        known = self.prefix(columns)
        twins = int(np.count_nonzero(self.page[known] >= 0))  # pages of a chain come first, then ghosts
        old = len(known)
        assert not old or self._parent[int(known[0])] == parent, "a chain is published below another parent"
        if old > twins:
            self._give_pages(known[twins:], pages[twins:old], gens[twins:old])
        branches: list[int] = []
        rows = known
        if old < len(columns):
            fresh = self.take_rows(len(columns) - old)
            first = int(known[-1]) if old else parent
            self._link(fresh, first, columns[old:])
            self._give_pages(fresh, pages[old:], gens[old:])
            if first >= 0 and self._children[first] == 2:
                self._bits[first] |= int(Bits.BRANCH)
                branches.append(first)
            rows = np.concatenate((known, fresh)) if old else fresh
        self.acquire(rows, now)
        return rows, twins, branches

    def _publish_few(self, parent: int, columns: I64, pages: I32, gens: I64, now: int) -> tuple[I32, int, list[int]]:
        rows: list[int] = []
        twins = 0
        branches: list[int] = []
        for (low, high), page, gen in zip(columns.tolist(), pages.tolist(), gens.tolist(), strict=True):
            row = self.keys.find(low, high)
            if row < 0:
                row = self._add(parent, low, high)
                if parent >= 0 and self._children[parent] == 2:
                    self._bits[parent] |= int(Bits.BRANCH)
                    branches.append(parent)
            assert self._parent[row] == parent, "a chain is published below another parent"
            if self._page[row] >= 0:
                twins += 1
            else:
                self._settle(row, parent, page, gen)
            self.idle -= not self._refs[row]
            self._refs[row] += 1
            self._used[row] = now
            rows.append(row)
            parent = row
        return np.array(rows, np.int32), twins, branches

    def _add(self, parent: int, low: int, high: int) -> int:
        """A fresh row for one key."""
        assert self.n_free, "more pages published than the pool has"
        self.n_free -= 1
        row = self._free_view[self.n_free]
        self.keys.insert_one(row, low, high)
        self._parent[row], self._hint[row], self._tail[row] = parent, NO_ROW, -1
        self._children[row] = self._resident[row] = self._refs[row] = self._bits[row] = 0
        self._depth[row] = 0
        if parent >= 0:
            self._depth[row] = self._depth[parent] + 1
            self._hint[parent] = row
            self._children[parent] += 1
        return row

    def _settle(self, row: int, parent: int, page: int, gen: int) -> None:
        """A row without a page gets one; nobody refers to it yet."""
        assert self._row_of_page[page - self.base] < 0, "a page is published twice"
        self._page[row], self._gen[row] = page, gen
        self._bits[row] |= BASE
        self._row_of_page[page - self.base] = row
        if parent >= 0:
            self._resident[parent] += 1
        self.n_pages += 1
        self.idle += 1

    def take_rows(self, n: int) -> I32:
        """Rows that are free, in ascending order where they were freed as a chain."""
        assert self.n_free >= n, "more pages published than the pool has"
        self.n_free -= n
        return self._free[self.n_free : self.n_free + n][::-1].copy()

    def _link(self, rows: I32, parent: int, columns: I64) -> None:
        """Fill in fresh rows that form a chain below `parent`."""
        self.keys.insert(rows, columns)
        self.parent[rows[0]] = parent
        self.parent[rows[1:]] = rows[:-1]
        self.hint[rows[:-1]] = rows[1:]
        self.hint[rows[-1]] = NO_ROW
        self.children[rows[:-1]] = 1
        self.children[rows[-1]] = 0
        self.resident[rows] = 0
        self.refs[rows] = 0
        self.bits[rows] = 0
        self.tail[rows] = -1
        depth = 0
        if parent >= 0:
            self._children[parent] += 1
            self._hint[parent] = int(rows[0])
            depth = int(self.depth[parent]) + 1
        self.depth[rows] = np.arange(depth, depth + len(rows))

    def _give_pages(self, rows: I32, pages: I32, gens: I64) -> None:
        """Rows of a chain, none of which has a page, are resident from now on. Nobody refers to them yet."""
        local = pages - self.base
        assert (self.row_of_page[local] < 0).all(), "a page is published twice"
        self.page[rows] = pages
        self.gen[rows] = gens
        self.bits[rows] |= BASE
        self.row_of_page[local] = rows
        parents = self.parent[rows]
        self.resident[parents[parents >= 0]] += 1  # distinct: each is the parent of the next
        self.n_pages += len(rows)
        self.idle += len(rows)

    # ---- evicting ----

    def _evictable(self) -> tuple[I64, I64]:
        rows = np.flatnonzero((self.page >= 0) & (self.refs == 0) & (self.resident == 0))
        return rows, self.used[rows]

    def evict(self, n: int) -> tuple[I32, I32]:
        """Take up to n pages that nobody refers to, leaves first and among them the least recently used.

        Returns (pages, tails): the pages taken and the tails that lay at their ends, which go with them. The caller
        detaches those tails.
        """
        parent, resident, refs, used, page = self._parent, self._resident, self._refs, self._used, self._page
        rows: list[int] = []
        pages: list[int] = []
        cold = self.cold
        while len(rows) < n:
            entry = cold.next()
            if entry is None:
                break
            cold.take()
            when, row = entry
            if page[row] < 0 or refs[row] or resident[row] or used[row] != when:
                if page[row] >= 0 and not refs[row] and not resident[row]:
                    cold.offer(row, used[row])
                continue
            while True:  # a cold chain goes page by page without asking the heap again
                rows.append(row)
                pages.append(page[row])
                page[row] = -1
                row = parent[row]
                if row < 0:
                    break
                resident[row] -= 1
                if resident[row] or refs[row]:
                    break
                entry = cold.next() if used[row] != when else None
                if len(rows) == n or (used[row] != when and (entry is None or (used[row], row) > entry)):
                    cold.offer(row, used[row])
                    break
        return self._forget(np.array(rows, np.int32), np.array(pages, np.int32))

    def _forget(self, rows: I32, pages: I32) -> tuple[I32, I32]:
        if not len(rows):
            return pages, pages
        self.row_of_page[pages - self.base] = NO_ROW
        self.n_pages -= len(rows)
        self.idle -= len(rows)
        tails = self.tail[rows]
        tails = tails[tails >= 0]
        self.bits[rows] &= 0xFFFF & ~BASE
        if self.ghosts:
            self._prune(rows.tolist())
            if self.n_free < self.pages - self.n_pages:
                self._drop_ghosts(self.pages - self.n_pages - self.n_free)
        else:
            self._remove(rows)
        return pages, tails

    def _remove(self, rows: I32) -> None:
        """Delete rows all of whose children are among them."""
        parents = self.parent[rows]
        at = np.flatnonzero(parents >= 0)
        np.subtract.at(self.children, parents[at], 1)
        lost = at[self.hint[parents[at]] == rows[at]]
        self.hint[parents[lost]] = NO_ROW
        self.parent[rows] = FREE_ROW
        self._lost[(self._n_lost + np.arange(len(rows))) % REMEMBERED] = self.keys.words[rows, 0]
        self._n_lost += len(rows)
        self.keys.delete(rows)
        self._free[self.n_free : self.n_free + len(rows)] = rows
        self.n_free += len(rows)

    # ---- lower tiers ----

    def _prune(self, rows: list[int]) -> None:
        """Delete those of the rows, and of their ancestors, that have no page, no copy in a lower tier, no children."""
        for start in rows:
            row = start
            while row >= 0 and self._parent[row] != FREE_ROW:
                if self._page[row] >= 0 or self._children[row] or self._bits[row] & LOWER:
                    break
                above = self._parent[row]
                self._remove(np.array([row], np.int32))
                row = above

    def _drop_ghosts(self, n: int) -> None:
        """Free at least n rows without pages: least recently used first, children before parents."""
        least, goal = self.n_free + n, self.n_free + max(n, self.ghosts // 16)
        while self.n_free < least:
            rows = np.flatnonzero((self.page < 0) & (self.parent != FREE_ROW))
            for row in rows[np.lexsort((-self.depth[rows], self.used[rows]))].tolist():
                if self._parent[row] != FREE_ROW and not self._children[row]:
                    self._bits[row] &= 0xFFFF & ~LOWER
                    self._prune([row])
                    if self.n_free >= goal:
                        return

    def mark(self, columns: I64, bits: int) -> int:
        """A lower tier has a copy of these pages (any keys); returns how many of them are known here."""
        rows = self._each(columns)
        self.bits[rows] |= bits & LOWER
        return len(rows)

    def unmark(self, columns: I64, bits: int) -> None:
        """A lower tier has lost its copies of these pages (any keys)."""
        rows = self._each(columns)
        self.bits[rows] &= 0xFFFF & ~(bits & LOWER)
        self._prune(rows.tolist())

    def _each(self, columns: I64) -> I32:
        found = [self.keys.find(low, high) for low, high in columns.tolist()]
        return np.array([row for row in found if row >= 0], np.int32)

    def free_rows(self) -> I32:
        """The rows that hold nothing, in no useful order."""
        return self._free[: self.n_free]

    def add_ghosts(self, columns: I64, bits: int, now: int) -> int:
        """A lower tier has the pages of this chain: remember those unknown so far, as many as there is room for.

        Returns the number of leading pages that are known now.
        """
        known = self.prefix(columns)
        self.bits[known] |= bits & LOWER
        n = min(len(columns) - len(known), self.n_free - (self.pages - self.n_pages))
        if n <= 0:
            return len(known)
        rows = self.take_rows(n)
        self._link(rows, int(known[-1]) if len(known) else NO_ROW, columns[len(known) : len(known) + n])
        self.bits[rows] = bits & LOWER
        self.used[rows] = now
        return len(known) + n
