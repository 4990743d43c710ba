"""The prefix index as a whole: filled from a worker's dump, dumped, and recounted in full.

After a scheduler restart the workers tell what is published in their memory, in any order; one call makes a trie of it,
in numpy. A recount walks every row and is for tests, the simulator, and once in a thousand steps.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from meshkit.frames import PublishedPage, PublishedTail
from meshkit.types import PAGE_TOKENS
from scheduler_svc.core.keymap import I32, I64, key_bytes, key_columns
from scheduler_svc.core.prefix import Hold, PoolId, PrefixIndex
from scheduler_svc.core.tails import INTERVAL_TOKENS, NO_TAIL, Reason
from scheduler_svc.core.trie import BASE, FREE_ROW, NO_ROW, Bits, PageTrie


def dump(index: PrefixIndex, pool: PoolId) -> tuple[list[PublishedPage], list[PublishedTail]]:
    """Everything published in a pool, parents before children."""
    there = index.pools[pool]
    trie, tails = there.trie, there.tails
    rows = np.flatnonzero(trie.page >= 0)
    rows = rows[np.argsort(trie.depth[rows], kind="stable")]
    parents = trie.parent[rows]
    parent_pages = np.where(parents >= 0, trie.page[parents], -1)
    columns = zip(
        trie.page[rows].tolist(),
        trie.gen[rows].tolist(),
        parent_pages.tolist(),
        key_bytes(trie.keys.words[rows]),
        strict=True,
    )
    live = np.flatnonzero(tails.row >= 0)
    places = zip((live + tails.base).tolist(), trie.page[tails.row[live]].tolist(), strict=True)
    return [PublishedPage(*c) for c in columns], [PublishedTail(*p) for p in places]


def rebuild(
    index: PrefixIndex, pool: PoolId, pages: Sequence[PublishedPage], tails: Iterable[PublishedTail], now: int
) -> tuple[list[int], list[int]]:
    """Fill an empty pool from a worker's dump. Returns (pages, tails) not taken: to be retired and freed.

    Numbers are in the pool's range (the dump has been checked). Nobody holds anything yet: `adopt` the chains of
    running choices next. Why a tail was kept is not in a dump; it is guessed from where it lies.
    """
    there = index.pools[pool]
    trie = there.trie
    numbers = np.array([p.page for p in pages], np.int32)
    taken = _load(
        trie,
        key_columns([p.key for p in pages]),
        np.array([p.parent for p in pages], np.int32),
        numbers,
        np.array([p.page_gen for p in pages], np.int64),
        now,
    )
    stands_for = {p.page: p.key for p, ok in zip(pages, taken.tolist(), strict=True) if not ok}
    spare: list[int] = []
    for tail in tails:
        row = int(trie.row_of_page[tail.page - trie.base])
        if row < 0 and tail.page in stands_for:
            low, high = key_columns([stands_for[tail.page]])[0].tolist()
            row = trie.keys.find(low, high)
        if row < 0 or not there.tails.attach(tail.tail, row, _guess(trie, row), now):
            spare.append(tail.tail)
    return numbers[~taken].tolist(), spare


def adopt(index: PrefixIndex, pool: PoolId, pages: Sequence[int], now: int) -> Hold:
    """Hold the published pages that a running choice starts with, after a rebuild: up to the first private one."""
    there = index.pools[pool]
    trie = there.trie
    rows = trie.row_of_page[np.array(pages, np.int32) - trie.base]
    above = np.concatenate((np.array([NO_ROW], np.int32), rows[:-1]))
    good = (rows >= 0) & (trie.parent[rows] == above)
    rows = rows[: len(rows) if good.all() else int(good.argmin())]
    trie.acquire(rows, now)
    return Hold(pool, there.generation, rows)


def check(index: PrefixIndex, holds: Iterable[Hold]) -> None:
    """Full recount against all holds there are; AssertionError names the first difference."""
    refs = {pool: np.zeros(len(there.trie.refs), np.int64) for pool, there in index.pools.items()}
    tail_refs = {pool: np.zeros(there.tails.size, np.int64) for pool, there in index.pools.items()}
    for hold in holds:
        there = index.of(hold)
        if there is None:
            continue
        refs[hold.pool][hold.rows] += 1
        if hold.tail != NO_TAIL:
            tail_refs[hold.pool][hold.tail - there.tails.base] += 1
    for pool, there in index.pools.items():
        check_trie(there.trie)
        there.tails.check()
        live = there.trie.page >= 0
        assert (there.trie.refs[live] == refs[pool][live]).all(), f"{pool}: references of a page are off"
        assert (there.tails.refs == tail_refs[pool]).all(), f"{pool}: references of a tail are off"


def _guess(trie: PageTrie, row: int) -> int:
    """Why a tail at this row is likely to have been kept."""
    if trie.children[row] >= 2:
        return int(Reason.BRANCH)
    inner = trie.children[row] == 1
    return int(Reason.INTERVAL if inner and (trie.depth[row] + 1) * PAGE_TOKENS % INTERVAL_TOKENS == 0 else Reason.TURN)


def _load(trie: PageTrie, columns: I64, parents: I32, pages: I32, gens: I64, now: int) -> NDArray[np.bool_]:
    """Fill an empty trie from published pages in any order; `parents` are page numbers, -1 for the root.

    Returns which pages were taken. Not taken are those whose key or page came before, and those that do not hang
    together with the root through pages of the list.
    """
    assert trie.n_free == len(trie.parent), "only an empty trie is loaded"
    n = len(pages)
    first = _first_of_each(columns)  # the page that stands for others with the same key
    at_page = np.full(trie.pages, n + 1, np.int64)
    at_page[(pages - trie.base)[::-1]] = np.arange(n)[::-1]
    inside = (parents >= trie.base) & (parents < trie.base + trie.pages)
    above = np.full(n + 2, n + 1, np.int64)  # n = the root, n + 1 = nowhere; both stay what they are
    above[:n][parents < 0] = n
    above[:n][inside] = np.append(first, [n, n + 1])[at_page[parents[inside] - trie.base]]
    above[n] = n
    depth = np.ones(n + 2, np.int64)
    depth[n:] = 0
    end = above.copy()
    for _ in range(max(1, n.bit_length())):  # each round doubles how far everybody has walked
        depth += depth[end]
        end = end[end]
    taken: NDArray[np.bool_] = (end[:n] == n) & (first == np.arange(n)) & (at_page[pages - trie.base] == np.arange(n))
    rows = np.full(n + 2, NO_ROW, np.int32)
    count = int(np.count_nonzero(taken))
    rows[:n][taken] = fresh = trie.take_rows(count)
    trie.keys.insert(fresh, columns[taken])
    trie.parent[fresh] = parent = rows[above[:n][taken]]
    trie.depth[fresh] = depth[:n][taken] - 1
    below = parent >= 0
    trie.children[:] = np.bincount(parent[below], minlength=len(trie.parent))
    trie.resident[:] = trie.children
    trie.hint[parent[below]] = fresh[below]
    trie.bits[fresh] = BASE
    trie.bits[trie.children >= 2] |= int(Bits.BRANCH)
    trie.page[fresh], trie.gen[fresh], trie.used[fresh] = pages[taken], gens[taken], now
    trie.row_of_page[pages[taken] - trie.base] = fresh
    trie.n_pages = trie.idle = count
    return taken


def _first_of_each(columns: I64) -> I64:
    """For each key, the smallest index with the same key."""
    n = len(columns)
    order = np.lexsort((np.arange(n), columns[:, 1], columns[:, 0]))
    ordered = columns[order]
    starts = np.ones(n, np.bool_)
    starts[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = np.empty(n, np.int64)
    first[order] = order[np.flatnonzero(starts)[np.cumsum(starts) - 1]] if n else order
    return first


def check_trie(trie: PageTrie) -> None:
    """Full recount; AssertionError names the first difference. References are checked by whoever holds them."""
    live = np.flatnonzero(trie.parent != FREE_ROW)
    assert len(live) + trie.n_free == len(trie.parent), "rows in use and free rows do not add up"
    free = np.sort(trie.free_rows())
    assert (free == np.flatnonzero(trie.parent == FREE_ROW)).all(), "the free rows are not those without a parent"
    parents = trie.parent[live]
    below = live[parents >= 0]
    size = len(trie.parent)
    children = np.bincount(trie.parent[below], minlength=size)
    assert (children[live] == trie.children[live]).all(), "a child count is off"
    paged = below[trie.page[below] >= 0]
    resident = np.bincount(trie.parent[paged], minlength=size)
    assert (resident[live] == trie.resident[live]).all(), "a count of resident children is off"
    assert (trie.page[trie.parent[paged]] >= 0).all(), "a page outlives its parent's"
    assert (trie.refs[trie.parent[below]] >= trie.refs[below]).all(), "a chain is not held from its first page"
    assert (trie.depth[below] == trie.depth[trie.parent[below]] + 1).all(), "a depth is off"
    assert not trie.depth[live[parents < 0]].any(), "a first page is not at depth 0"
    here = live[trie.page[live] >= 0]
    assert (trie.row_of_page[trie.page[here] - trie.base] == here).all(), "a page does not know its row"
    assert np.count_nonzero(trie.row_of_page >= 0) == len(here) == trie.n_pages, "the count of pages is off"
    assert np.count_nonzero(trie.refs[here] == 0) == trie.idle, "the count of idle pages is off"
    assert ((trie.bits[here] & BASE) == BASE).all(), "a page lacks a class"
    assert not (trie.refs[live[trie.page[live] < 0]]).any(), "a row without a page is held"
    hinted = live[trie.hint[live] >= 0]
    assert (trie.parent[trie.hint[hinted]] == hinted).all(), "a hint leads to somebody else's child"
    trie.keys.check(live)
