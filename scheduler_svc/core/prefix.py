"""The prefix cache's index over all pools: match, hold, publish, evict, explain, dump and rebuild.

A pool is the memory of one rank of one worker group; the same key may be published in several. What a running request
holds (matched pages, pages it published, their twins) is a `Hold`; holds of a dropped pool are void. Which option a
request takes is decided in `reuse.py`; page and tail numbers are the ledger's to hand out and to take back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshkit.frames import PublishedPage, PublishedTail
from meshkit.types import PAGE_TOKENS
from scheduler_svc.core.keymap import I32, I64, key_bytes, key_columns
from scheduler_svc.core.tails import INTERVAL_TOKENS, NO_TAIL, Reason, TailIndex
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a prompt was served as far as it was, in one pool. Indices and counts in pages."""

    pool: PoolId
    asked: int
    present: int  # leading pages with all base classes in L1
    servable: int
    why: str  # hit, unknown, page_missing, page_evicted, class_missing, lower_tier, no_tail, tail_evicted
    first_missing: int = -1  # index of the first page that is not in L1
    missing_key: bytes = b""
    missing_classes: tuple[str, ...] = ()
    tier: str = ""  # where what is missing could be loaded from
    idle: int = 0  # pages there that nobody refers to


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
class _Pool:
    generation: int
    trie: PageTrie
    tails: TailIndex


@dataclass(slots=True, eq=False)
class PrefixIndex:
    """See the module's docstring. Times are integers that never decrease, of any unit."""

    pools: dict[PoolId, _Pool] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    generation: int = 0

    # ---- pools ----

    def add_pool(
        self, pool: PoolId, *, first_page: int, pages: int, first_tail: int, tails: int, ghosts: int = 0
    ) -> None:
        """A rank has attached: its memory is empty until `rebuild`. `ghosts`: rows for pages only lower tiers have."""
        assert pool not in self.pools, "a pool is dropped before it comes back"
        self.generation += 1
        trie = PageTrie(first_page, pages, ghosts)
        self.pools[pool] = _Pool(self.generation, trie, TailIndex(trie, first_tail, tails))

    def drop_pool(self, pool: PoolId) -> None:
        """The rank is gone, and with it all pages, tails and holds, whatever the number."""
        if self.pools.pop(pool, None) is not None:
            self.counters.pools_dropped += 1

    def _of(self, hold: Hold | Match) -> _Pool | None:
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
        base = _leading(bits & BASE, BASE)
        tail_pages, tail = _last(bits[:base] & _TAIL), NO_TAIL
        if tail_pages:
            tail = int(trie.tail[rows[tail_pages - 1]])
        lower_base, lower_tail = base, tail_pages
        if np.bitwise_or.reduce(bits) & LOWER:
            lower_base = _leading((bits | bits >> 4 | bits >> 8) & BASE, BASE)
            lower_tail = _last(bits[:lower_base] & _ANY_TAIL)
        counters.matched += base
        counters.servable += tail_pages
        return Match(pool, there.generation, rows, base, tail_pages, tail, lower_base, lower_tail)

    def acquire(self, match: Match, pages: int, tail: int, now: int) -> Hold:
        """Hold the leading pages of a match just made, and the tail to be loaded (NO_TAIL: none)."""
        there = self._of(match)
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
        there = self._of(hold)
        if there is not None and hold.tail != NO_TAIL:
            there.tails.release(hold.tail)
        hold.tail = NO_TAIL

    def release(self, hold: Hold, now: int) -> None:
        """The choice has left its slot: what it held stays cached until it is evicted."""
        self.release_tail(hold)
        there = self._of(hold)
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

    # ---- telling ----

    def explain(self, pool: PoolId, columns: I64, limit: int) -> Explanation:
        """Where and why a prompt stops being served from this pool. Counts nothing."""
        saved = Counters(**{name: getattr(self.counters, name) for name in Counters.__slots__})
        match = self.match(pool, columns, limit)
        self.counters = saved
        trie = self.pools[pool].trie
        asked = min(limit, len(columns))
        why, tier = "hit", ""
        classes: tuple[str, ...] = ()
        missing = match.base if match.base < asked else -1
        if match.tail_pages < match.base:
            row = int(match.rows[match.base - 1])
            why = "tail_evicted" if trie.bits[row] & int(Bits.HAD_TAIL) else "no_tail"
            tier = _tier(int(trie.bits[row]), int(Bits.TAIL))
        elif missing >= 0:
            why, classes, tier = _why_missing(trie, match, columns)
        return Explanation(
            pool=pool,
            asked=asked,
            present=match.base,
            servable=match.tail_pages,
            why=why,
            first_missing=missing,
            missing_key=key_bytes(columns[missing : missing + 1])[0] if missing >= 0 else b"",
            missing_classes=classes,
            tier=tier,
            idle=trie.idle,
        )

    def dump(self, pool: PoolId) -> tuple[list[PublishedPage], list[PublishedTail]]:
        """Everything published in a pool, parents before children."""
        there = self.pools[pool]
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
        self, pool: PoolId, pages: Sequence[PublishedPage], tails: Iterable[PublishedTail], now: int
    ) -> tuple[list[int], list[int]]:
        """Fill an empty pool from a worker's dump. Returns (pages, tails) not taken: to be retired and freed.

        Numbers are in the pool's range (the dump has been checked). Nobody holds anything yet: `adopt` the chains of
        running choices next. Why a tail was kept is not in a dump; it is guessed from where it lies.
        """
        there = self.pools[pool]
        trie = there.trie
        numbers = np.array([p.page for p in pages], np.int32)
        taken = trie.load(
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

    def adopt(self, pool: PoolId, pages: Sequence[int], now: int) -> Hold:
        """Hold the published pages that a running choice starts with, after a rebuild: up to the first private one."""
        there = self.pools[pool]
        trie = there.trie
        rows = trie.row_of_page[np.array(pages, np.int32) - trie.base]
        above = np.concatenate((np.array([NO_ROW], np.int32), rows[:-1]))
        good = (rows >= 0) & (trie.parent[rows] == above)
        rows = rows[: len(rows) if good.all() else int(good.argmin())]
        trie.acquire(rows, now)
        return Hold(pool, there.generation, rows)

    def check(self, holds: Iterable[Hold]) -> None:
        """Full recount against all holds there are; AssertionError names the first difference."""
        refs = {pool: np.zeros(len(there.trie.refs), np.int64) for pool, there in self.pools.items()}
        tail_refs = {pool: np.zeros(there.tails.size, np.int64) for pool, there in self.pools.items()}
        for hold in holds:
            there = self._of(hold)
            if there is None:
                continue
            refs[hold.pool][hold.rows] += 1
            if hold.tail != NO_TAIL:
                tail_refs[hold.pool][hold.tail - there.tails.base] += 1
        for pool, there in self.pools.items():
            there.trie.check()
            there.tails.check()
            live = there.trie.page >= 0
            assert (there.trie.refs[live] == refs[pool][live]).all(), f"{pool}: references of a page are off"
            assert (there.tails.refs == tail_refs[pool]).all(), f"{pool}: references of a tail are off"


def _leading(values: NDArray[Any], wanted: int) -> int:
    """How many leading values are the wanted one."""
    good = values == wanted
    return len(good) if np.count_nonzero(good) == len(good) else int(good.argmin())


def _last(values: NDArray[Any]) -> int:
    """One more than the index of the last value that is not zero; 0 if all are."""
    there = np.flatnonzero(values)
    return int(there[-1]) + 1 if len(there) else 0


def _tier(bits: int, wanted: int) -> str:
    if bits >> 4 & wanted == wanted:
        return "L2"
    return "L3" if bits >> 8 & wanted == wanted else ""


def _why_missing(trie: PageTrie, match: Match, columns: I64) -> tuple[str, tuple[str, ...], str]:
    at = match.base
    if at < len(match.rows):
        bits = int(trie.bits[match.rows[at]])
        tier = _tier(bits, BASE)
        names = tuple(str(c.name) for c in (Bits.C4, Bits.C4_INDEX, Bits.C128) if not bits & c)
        return ("lower_tier" if tier else "class_missing"), names, tier
    if trie.was_evicted(int(columns[at, 0])):
        return "page_evicted", (), ""
    return ("page_missing" if at else "unknown"), (), ""


def _guess(trie: PageTrie, row: int) -> int:
    """Why a tail at this row is likely to have been kept."""
    if trie.children[row] >= 2:
        return int(Reason.BRANCH)
    inner = trie.children[row] == 1
    return int(Reason.INTERVAL if inner and (trie.depth[row] + 1) * PAGE_TOKENS % INTERVAL_TOKENS == 0 else Reason.TURN)
