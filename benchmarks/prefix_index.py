"""What the prefix index costs: match + reserve at 1M pages, bytes per page, publishing, evicting, rebuilding.

The trie is full: 1M-token sessions and many short ones, sealed eight pages at a time in turn, so that rows of a chain
do not lie side by side; half of the short ones leave a shared system prompt. Match includes turning the request's keys
into columns; hashing, which gateways do, is printed apart. Matches are medians of many calls; best of three runs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshkit.frames import PublishedPage, PublishedTail
from meshkit.pages import namespace_key, page_keys
from meshkit.types import PAGE_TOKENS
from scheduler_svc.core.explain import explain
from scheduler_svc.core.keymap import key_columns
from scheduler_svc.core.prefix import Hold, PoolId, PrefixIndex
from scheduler_svc.core.rebuild import dump, rebuild
from scheduler_svc.core.tails import Reason

TITLE = "prefix index at 1M pages: match + reserve, bytes per page, publish, evict, rebuild"
POOL: PoolId = ("worker", 0)
LONG, SHORT, SHARED = 4096, 32, 16  # pages of a 1M-token prompt, of an 8k one, of a shared system prompt
RUNS = 3


@dataclass(slots=True)
class Filled:
    """A full index and the keys of what is in it."""

    index: PrefixIndex
    long: list[list[bytes]]
    short: list[list[bytes]]
    branched: list[list[bytes]]
    publish_us: float


def _chains(rng: np.random.Generator, count: int, pages: int) -> list[list[bytes]]:
    out = []
    for _ in range(count):
        column = rng.bytes(16 * pages)
        out.append([column[i : i + 16] for i in range(0, len(column), 16)])
    return out


def fill(pages: int, tails: int) -> Filled:
    """About half the pages in 1M-token sessions, the rest in 8k-token ones."""
    rng = np.random.default_rng(7)
    index = PrefixIndex()
    index.add_pool(POOL, first_page=0, pages=pages, first_tail=0, tails=tails)
    long = _chains(rng, max(2, pages // 2 // LONG), LONG)
    left = pages - len(long) * LONG
    systems = _chains(rng, 8, SHARED)
    short = _chains(rng, left // 2 // SHORT, SHORT)
    left -= len(short) * SHORT + 8 * SHARED
    ends = _chains(rng, left // (SHORT - SHARED), SHORT - SHARED)
    branched = [systems[i % 8] + end for i, end in enumerate(ends)]
    took = [_publish(index, 0, systems), 0.0, 0.0]
    took[1] = _publish(index, 8 * SHARED, long)
    took[2] = _publish(index, 8 * SHARED + len(long) * LONG, short + branched)
    return Filled(index, long, short, branched, took[1])


def _publish(index: PrefixIndex, page: int, chains: list[list[bytes]]) -> float:
    """Seal all chains, eight pages of each in turn; the median in us of one call."""
    holds: list[Hold] = []
    times: list[int] = []
    for i, keys in enumerate(chains):
        found = index.match(POOL, key_columns(keys), len(keys))
        holds.append(index.acquire(found, found.base, found.tail, i))
    for at in range(0, max(map(len, chains)), 8):
        for hold, keys in zip(holds, chains, strict=True):
            if at < len(hold.rows) or at >= len(keys):
                continue
            part = keys[at : at + 8]
            start = time.perf_counter_ns()
            index.publish(hold, part, range(page, page + 8), range(page, page + 8), at)
            times.append(time.perf_counter_ns() - start)
            page += 8
    tails = index.pools[POOL].tails
    for hold in holds:
        if tails.n < tails.size:
            index.attach_tail(hold, len(hold.rows), tails.n, int(Reason.TURN), 10_000)
        index.release(hold, 10_000)
    return statistics.median(times) / 1e3


def match_us(index: PrefixIndex, chains: Sequence[list[bytes]], seed: int) -> float:
    """Median in us of columns + match + reserve over the chains in random order; each is released at once."""
    order = np.random.default_rng(seed).permutation(len(chains))[:400]
    times = []
    for i in order.tolist():
        keys = tuple(chains[i])
        start = time.perf_counter_ns()
        found = index.match(POOL, key_columns(keys), len(keys))
        hold = index.acquire(found, found.base, found.tail, 20_000)
        times.append(time.perf_counter_ns() - start)
        assert found.base == len(keys)
        index.release(hold, 20_000)
    return statistics.median(times) / 1e3


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e6


def _runs(name: str, values: list[float]) -> float:
    print(f"{name:24} {'  '.join(f'{v:10.3f}' for v in values)}")
    return round(min(values), 3)


def _bytes(index: PrefixIndex) -> int:
    """Columns, key map, tail columns, and the heap of eviction candidates (its entries are Python objects)."""
    there = index.pools[POOL]
    heap = there.trie.cold.heap
    entry = sys.getsizeof((0, 0)) + 2 * sys.getsizeof(1 << 40)
    return there.trie.nbytes + there.tails.nbytes + sys.getsizeof(heap) + len(heap) * entry


def run(args: list[str]) -> dict[str, float | int | str]:
    """Metrics: match_us_8k, match_us_8k_branched, match_ms_1m, bytes_per_page, hash_*, publish_us_8, evict_*, ..."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks prefix_index")
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--tails", type=int, default=4_096)
    options = parser.parse_args(args)
    filled = fill(options.pages, options.tails)
    index = filled.index
    metrics: dict[str, float | int | str] = {"pages": index.pools[POOL].trie.n_pages}
    metrics["publish_us_8"] = round(filled.publish_us, 1)
    print("name                            run 1       run 2       run 3")
    for name, chains, scale in (
        ("match_us_8k", filled.short, 1.0),
        ("match_us_8k_branched", filled.branched, 1.0),
        ("match_ms_1m", filled.long, 1e-3),
    ):
        metrics[name] = _runs(name, [scale * match_us(index, chains, run) for run in range(RUNS)])
    ids = np.random.default_rng(1).integers(0, 129_280, LONG * PAGE_TOKENS).astype(np.int32)
    space = namespace_key("tenant", "", "revision", "layout")
    short = ids[: SHORT * PAGE_TOKENS]
    metrics["hash_us_8k"] = _runs("hash_us_8k", [1e3 * _ms(lambda: page_keys(short, space)) for _ in range(RUNS)])
    metrics["hash_ms_1m"] = _runs("hash_ms_1m", [_ms(lambda: page_keys(ids, space)) for _ in range(RUNS)])
    miss = key_columns(_chains(np.random.default_rng(3), 1, LONG)[0])
    metrics["miss_us_1m"] = _runs("miss_us_1m", [1e3 * _ms(lambda: index.match(POOL, miss, LONG)) for _ in range(RUNS)])
    metrics["explain_ms"] = _runs("explain_ms", [_ms(lambda: explain(index, POOL, miss, LONG)) for _ in range(RUNS)])
    for n in (32, 4096):  # the first eviction scans once for candidates
        times = []
        for _ in range(RUNS):
            start = time.perf_counter_ns()
            index.evict_pages(POOL, n)
            times.append((time.perf_counter_ns() - start) / 1e3)
        metrics[f"evict_us_{n}"] = _runs(f"evict_us_{n}", times)
    metrics["bytes_per_page"] = round(_bytes(index) / options.pages, 1)
    pages, tails = dump(index, POOL)
    metrics["rebuild_s"] = _rebuild_s(options.pages, options.tails, pages, tails)
    metrics["drop_us"] = round(1e3 * _ms(lambda: index.drop_pool(POOL)), 1)
    return metrics


def _rebuild_s(n_pages: int, n_tails: int, pages: list[PublishedPage], tails: list[PublishedTail]) -> float:
    fresh = PrefixIndex()
    fresh.add_pool(POOL, first_page=0, pages=n_pages, first_tail=0, tails=n_tails)
    took = _ms(lambda: rebuild(fresh, POOL, pages, tails, 0)) / 1e3
    assert fresh.pools[POOL].trie.n_pages == len(pages)
    return round(took, 2)
