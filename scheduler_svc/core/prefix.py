"""The prefix cache's index over all pools: match, hold, publish, evict.

A pool is the memory of one rank of one worker group; the same key may be published in several. What a running request
holds (matched pages, pages it published, their twins) is a `Hold`; holds of a dropped pool are void. Which option a
request takes is decided in `reuse.py`; page and tail numbers are the ledger's to hand out and to take back;
`rebuild.py` fills a pool from a dump and recounts it, `explain.py` says why a prompt missed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshkit.types import PAGE_TOKENS
from scheduler_svc.core.keymap import I32, I64, key_columns
from scheduler_svc.core.tails import NO_TAIL, TailIndex
from scheduler_svc.core.trie import BASE, LOWER, NO_ROW, Bits, PageTrie

PoolId = tuple[str, int]
"""Worker group and rank."""

_TAIL = int(Bits.TAIL)
_ANY_TAIL = int(Bits.TAIL | Bits.L2_TAIL | Bits.L3_TAIL)
_NO_ROWS: I32 = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Hold:
    """References of one running choice: rows of its chain from the first page on, and the tail it is about to load."""

    pool: PoolId
    generation: int
    rows: I32
    tail: int = NO_TAIL

    @property
    def parent(self) -> int:
        """Row below which the next page is published."""
        return int(self.rows[-1]) if len(self.rows) else NO_ROW


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """What one pool has of a chain of keys. Counts are in pages."""

    pool: PoolId
    generation: int
    rows: I32  # of all keys that are known
    base: int  # leading pages with all base classes in L1
    tail_pages: int  # the servable prefix: the last of these with a live tail at its end; 0 if there is none
    tail: int
    lower_base: int  # leading pages that are in L1 or in a lower tier
    lower_tail_pages: int  # the last of these with a tail anywhere


@dataclass(frozen=True, slots=True)
class Published:
    """`twins` leading pages were published already: the caller's own stay private."""

    twins: int
    pages: list[int]  # the published page of each key: the twin's or the caller's


@dataclass(slots=True)
class Counters:
    """Running totals; pages unless said otherwise."""

    lookups: int = 0
    asked: int = 0
    matched: int = 0
    servable: int = 0
    published: int = 0
    twins: int = 0
    branches: int = 0
    evicted: int = 0
    tails_attached: int = 0
    tails_surplus: int = 0
    tails_evicted: int = 0
    tails_lost_with_pages: int = 0
    pools_dropped: int = 0


@dataclass(slots=True, eq=False)
class Pool:
    """Pages and tails of one rank. `generation` tells it from an earlier one of the same name."""

    generation: int
    trie: PageTrie
    tails: TailIndex


@dataclass(slots=True, eq=False)
class PrefixIndex:
    """See the module's docstring. Times are integers that never decrease, of any unit."""

    pools: dict[PoolId, Pool] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    generation: int = 0

    # ---- pools ----

    def add_pool(
        self,
        pool: PoolId,
        *,
        first_page: int,
        pages: int,
        first_tail: int,
        tails: int,
        protected_tails: int = 0,
        ghosts: int = 0,
    ) -> None:
        """A rank has attached: its memory is empty until `rebuild`.

        `protected_tails`: see TailIndex. `ghosts`: rows for pages that only lower tiers have.
        """
        assert pool not in self.pools, "a pool is dropped before it comes back"
        self.generation += 1
        trie = PageTrie(first_page, pages, ghosts)
        self.pools[pool] = Pool(self.generation, trie, TailIndex(trie, first_tail, tails, protected_tails))

    def drop_pool(self, pool: PoolId) -> None:
        """The rank is gone, and with it all pages, tails and holds, whatever the number."""
        if self.pools.pop(pool, None) is not None:
            self.counters.pools_dropped += 1

    def of(self, hold: Hold | Match) -> Pool | None:
        """Its pool, None if that has been dropped since."""
        pool = self.pools.get(hold.pool)
        return pool if pool is not None and pool.generation == hold.generation else None

    # ---- a request's way ----

    def match(self, pool: PoolId, columns: I64, limit: int) -> Match:
        """What the pool has of a chain of keys ([n, 2], see key_columns), of which `limit` pages may be served.

        Changes nothing. The limit is (tokens - 1) // PAGE_TOKENS: one token at least is computed.
        """
        there = self.pools[pool]
        trie = there.trie
        rows = trie.prefix(columns[:limit])
        n = len(rows)
        counters = self.counters
        counters.lookups += 1
        counters.asked += min(limit, len(columns))
        if not n:
            return Match(pool, there.generation, rows, 0, 0, NO_TAIL, 0, 0)
        bits = trie.bits[rows]
        base, anything = n, int(np.bitwise_or.reduce(bits))
        if int(np.bitwise_and.reduce(bits)) & BASE != BASE:
            base = int(((bits & BASE) != BASE).argmax())
        tail_pages, tail = (_last_tail(bits[:base], _TAIL) if anything & _TAIL else 0), NO_TAIL
        if tail_pages:
            tail = int(trie.tail[rows[tail_pages - 1]])
        lower_base, lower_tail = base, tail_pages
        if anything & LOWER:
            somewhere = ((bits | bits >> 4 | bits >> 8) & BASE) == BASE
            lower_base = n if somewhere.all() else int(somewhere.argmin())
            lower_tail = _last_tail(bits[:lower_base], _ANY_TAIL)
        counters.matched += base
        counters.servable += tail_pages
        return Match(pool, there.generation, rows, base, tail_pages, tail, lower_base, lower_tail)

    def acquire(self, match: Match, pages: int, tail: int, now: int) -> Hold:
        """Hold the leading pages of a match just made, and the tail to be loaded (NO_TAIL: none)."""
        there = self.of(match)
        assert there is not None and pages <= match.base, "a match is acquired before anything else changes"
        rows = match.rows[:pages]
        there.trie.acquire(rows, now)
        if tail != NO_TAIL:
            there.tails.acquire(tail, now)
        return Hold(match.pool, match.generation, rows, tail)

    def hold(self, pool: PoolId) -> Hold:
        """An empty hold, for a request that found nothing."""
        return Hold(pool, self.pools[pool].generation, _NO_ROWS)

    def publish(
        self, hold: Hold, keys: Sequence[bytes], pages: Sequence[int], gens: Sequence[int], now: int
    ) -> Published:
        """The next pages of a choice are sealed. All of them, twins included, are held from now on."""
        there = self.pools[hold.pool]
        assert there.generation == hold.generation, "a choice publishes in the pool it runs in"
        trie = there.trie
        rows, twins, branches = trie.publish(
            hold.parent, key_columns(keys), np.array(pages, np.int32), np.array(gens, np.int64), now
        )
        if branches:
            there.tails.branch(branches)
            self.counters.branches += len(branches)
        hold.rows = np.concatenate((hold.rows, rows)) if len(hold.rows) else rows
        self.counters.published += len(rows) - twins
        self.counters.twins += twins
        return Published(twins, trie.page[rows].tolist())

    def attach_tail(self, hold: Hold, pages: int, tail: int, reasons: int, now: int) -> tuple[bool, int]:
        """A tail at the end of the hold's first `pages` pages is complete; if they are twins, it goes to the twin.

        Returns (kept, page). Not kept: there is one already, and this one goes to the front of the free list.
        """
        there = self.pools[hold.pool]
        row = int(hold.rows[pages - 1])
        kept = there.tails.attach(tail, row, reasons, now)
        if kept:
            self.counters.tails_attached += 1
        else:
            self.counters.tails_surplus += 1
        return kept, int(there.trie.page[row])

    def release_tail(self, hold: Hold) -> None:
        """The frame that loads the tail has been sent: frames run in order, so later ones may overwrite it."""
        there = self.of(hold)
        if there is not None and hold.tail != NO_TAIL:
            there.tails.release(hold.tail)
        hold.tail = NO_TAIL

    def release(self, hold: Hold, now: int) -> None:
        """The choice has left its slot: what it held stays cached until it is evicted."""
        self.release_tail(hold)
        there = self.of(hold)
        if there is not None:
            there.trie.release(hold.rows, now)
        hold.rows = _NO_ROWS

    def branch_points(self, match: Match, pages: int) -> list[int]:
        """Positions in tokens where a chain of `pages` full pages meets another one and no tail is alive."""
        trie = self.pools[match.pool].trie
        rows = match.rows[: match.base]
        if not len(rows):
            return []
        points = np.flatnonzero(trie.bits[rows] & int(Bits.BRANCH | Bits.TAIL) == int(Bits.BRANCH)) + 1
        out = [int(p) * PAGE_TOKENS for p in points]
        last = int(rows[-1])
        leaves = len(rows) == len(match.rows) < pages and trie.children[last] > 0 and trie.tail[last] < 0
        if leaves and len(rows) * PAGE_TOKENS not in out[-1:]:
            out.append(len(rows) * PAGE_TOKENS)
        return out

    # ---- making room ----

    def idle_pages(self, pool: PoolId) -> int:
        """Cached pages that nobody refers to: all of them can be evicted."""
        return self.pools[pool].trie.idle

    def evict_pages(self, pool: PoolId, n: int) -> tuple[list[int], list[int]]:
        """Up to n pages, and the tails that went with them: both are free now and to be retired at the worker."""
        there = self.pools[pool]
        pages, tails = there.trie.evict(n)
        lost = tails.tolist()
        there.tails.detach(lost)
        self.counters.evicted += len(pages)
        self.counters.tails_lost_with_pages += len(lost)
        return pages.tolist(), lost

    def evict_tails(self, pool: PoolId, n: int, wanted_for: int) -> list[int]:
        """Up to n tails for one that is wanted for these reasons: free now and to be retired at the worker."""
        out = self.pools[pool].tails.evict(n, wanted_for)
        self.counters.tails_evicted += len(out)
        return out


def _last_tail(bits: NDArray[np.uint16], wanted: int) -> int:
    """Pages up to the last one with any of the wanted bits; 0 if none has them."""
    if len(bits) and int(bits[-1]) & wanted:
        return len(bits)
    there = np.flatnonzero(bits & wanted)
    return int(there[-1]) + 1 if len(there) else 0
