"""What the prefix cache reuses, what a warm prompt saves, what bookkeeping costs, and SGLang's tree beside ours.

Reuse: sets of sessions served by the scheduler core in virtual time; the pool has 1.1 x the pages of the set and two
tails per session (spares of running slots included). Reusable is what an unbounded pool with a tail at every page
would have served. Warm: two requests with a shared 2k-token prefix on a real mesh, deterministic mode. Conservation:
the share of the scheduler's time that goes into checking its pools. SGLang: match, lock and insert of the last turn of
a 64k-token prompt of 30 turns in its radix cache, against hash, match, hold and publish in ours; a prompt of one piece
beside it.
"""

import argparse
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks._mesh import post, running_mesh
from benchmarks._prefix_sets import PrefixMesh, Served, Session, agents, few_shot, pages_of, two_sessions
from benchmarks._sglang import UnavailableError, radix_cache
from meshkit.pages import namespace_key, page_keys
from meshkit.types import PAGE_TOKENS
from scheduler_svc.core import audit
from scheduler_svc.core.keymap import key_columns
from scheduler_svc.core.prefix import PoolId, PrefixIndex

TITLE = "prefix cache: reuse of sessions, warm time to first token, cost of conservation, SGLang's tree"
RUNS = 3
Figures = dict[str, float | int | str]


# ---- reuse ----------------------------------------------------------------------------------------------------------


def play(sessions: list[Session], *, slots: int, tails: int, spacing_s: float) -> tuple[Served, int, PrefixMesh]:
    """Serve a set; sessions start one after another."""
    pages = pages_of(sessions)
    mesh = PrefixMesh(slots=slots, pages=pages * 11 // 10, tails=tails)
    for i, session in enumerate(sessions):
        mesh.after(0.001 + i * spacing_s, partial(mesh.play, session))
    while mesh.started < len(sessions) or mesh.open:
        mesh.run(1.0)
    return mesh.finish(), pages, mesh


def reuse() -> Figures:
    tasks = 8
    sets: dict[str, tuple[list[Session], int, int, float]] = {
        # name: sessions, slots, tails, seconds between their starts
        "two_sessions": (two_sessions(np.random.default_rng(1)), 2, 4, 40.0),
        "agents": (agents(np.random.default_rng(2)), 16, 96, 0.05),
        "fewshot": (few_shot(np.random.default_rng(3), tasks), 4, 2 * tasks, 0.3),
    }
    figures: Figures = {}
    for name, (sessions, slots, tails, spacing_s) in sets.items():
        served, pages, _ = play(sessions, slots=slots, tails=tails, spacing_s=spacing_s)
        figures[f"reuse_{name}"] = round(served.share, 4)
        figures[f"reuse_{name}_lru_windows"] = round(served.windows / served.reusable, 4)
        print(
            f"{name}: {served.requests} requests, {served.prompts:,} prompt tokens, {served.reusable:,} reusable; "
            f"{pages} pages in the set, {tails} tails: reused {served.share:.1%}, "
            f"plain LRU of as many windows {served.windows / served.reusable:.1%}"
        )
    return figures


# ---- conservation ---------------------------------------------------------------------------------------------------


def conservation() -> Figures:
    """Time in the checks over all time in the scheduler, while agents are served; then a planted leak."""
    shares = []
    for run in range(RUNS):
        spent = {"checks": 0.0, "all": 0.0}
        undo = [_timed(audit, name, spent, "checks") for name in ("adds_up", "recount")]
        try:
            sessions = agents(np.random.default_rng(10 + run), 32, 12)
            mesh = PrefixMesh(slots=256, pages=100_000, tails=512)
            undo.append(_timed(mesh.core, "handle", spent, "all"))
            for i, session in enumerate(sessions):
                mesh.after(0.001 + 0.01 * i, partial(mesh.play, session))
            while mesh.started < len(sessions) or mesh.open:
                mesh.run(1.0)
            steps = mesh.finish().counters["steps"]
        finally:
            for back in undo:
                back()
        shares.append(spent["checks"] / spent["all"])
        print(f"conservation: {steps} steps, {spent['checks'] / spent['all']:.2%} of the scheduler's time")
    return {"conservation_share": round(min(shares), 4), "leak_found": int(_leak_found())}


def _timed(owner: Any, name: str, spent: dict[str, float], what: str) -> Callable[[], None]:
    """Add the time of every call; returns how to take that back."""
    original = getattr(owner, name)

    def timed(*args: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*args)
        finally:
            spent[what] += time.perf_counter() - started

    setattr(owner, name, timed)
    return lambda: setattr(owner, name, original)


def _leak_found() -> bool:
    """A page that nobody has and that is not free: the counters do not see it, the recount does."""
    mesh = PrefixMesh(slots=4, pages=200, tails=8)
    (session,) = agents(np.random.default_rng(5), 1, 3)
    mesh.play(session)
    mesh.run(0.05)
    (worker,) = mesh.core.state.workers.values()
    worker.ranks[0].pages.take()
    while mesh.open:
        mesh.run(1.0)
    return mesh.core.faults.get("conservation", 0) > 0


# ---- a real mesh ----------------------------------------------------------------------------------------------------


def warm() -> Figures:
    """Time to first token of a cold and of a warm prompt, and whether the warm one answers the same as a cold one."""
    rng = random.Random(1)
    ratios, same = [], True
    for _ in range(RUNS):
        with running_mesh("--deterministic") as url:
            _ask(url, [rng.randrange(5, 2000) for _ in range(300)])  # first steps pay for what is set up lazily
            shared = [rng.randrange(5, 2000) for _ in range(2048)]
            first, second = ([*shared, *(rng.randrange(5, 2000) for _ in range(100))] for _ in range(2))
            cold_s, _, _ = _ask(url, first)
            warm_s, warm_ids, cached = _ask(url, second)
            _flush(url)
            again_s, cold_ids, none = _ask(url, second)
        same = same and warm_ids == cold_ids and cached >= 2048 and none == 0
        ratios.append(warm_s / cold_s)
        print(
            f"warm: cold {cold_s * 1000:.0f} ms, warm {warm_s * 1000:.0f} ms ({cached} tokens cached), "
            f"the same cold {again_s * 1000:.0f} ms; equal tokens: {warm_ids == cold_ids}"
        )
    return {"warm_ttft_ratio": round(min(ratios), 3), "warm_tokens_equal": int(same)}


def _ask(url: str, ids: list[int]) -> tuple[float, list[int], int]:
    """Seconds to the first token, output ids, cached prompt tokens."""
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    started, first, last = time.perf_counter(), 0.0, {}
    out: list[int] = []
    with urllib.request.urlopen(post(f"{url}/generate", body), timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - started
                last = json.loads(line[6:])
                out = last.get("output_ids") or out
    return first, out, last["meta_info"]["cached_tokens"]


def _flush(url: str) -> None:
    with urllib.request.urlopen(f"{url}/flush_cache", timeout=10) as answer:
        assert answer.status == 200


# ---- SGLang ---------------------------------------------------------------------------------------------------------

TOKENS, TURNS = 65_536, 30
POOL: PoolId = ("bench", 0)


def sglang() -> Figures:
    """The last turn of a session that has grown to 64k tokens, in both caches."""
    rng = np.random.default_rng(4)
    parts = np.array_split(rng.integers(0, 129_280, TOKENS, dtype=np.int32), TURNS)
    try:
        with radix_cache() as (version, tree, base):
            theirs = [_their_turns(tree, base, parts) for _ in range(RUNS)]
            single = _their_turns(tree, base, [np.concatenate(parts)], same=True)
    except UnavailableError as reason:
        print(f"sglang: skipped, {reason}")
        return {}
    ours = [_our_turns(parts) for _ in range(RUNS)]
    print(
        f"sglang {version}: {_ms(theirs)} ms a turn (match, lock, insert); ours {_ms(ours)} ms "
        f"(hash, match, hold, publish); {TOKENS:,} tokens in {TURNS} turns"
    )
    one = np.concatenate(parts)
    print(f"  in one piece, matched again: ours {_ms([_our_turns([one], same=True)])} ms; theirs {_ms([single])} ms")
    return {"speedup_vs_sglang_radix_64k": round(min(theirs) / min(ours), 2), "sglang": version}


def _ms(runs: list[float]) -> str:
    return " / ".join(f"{1000 * seconds:.3f}" for seconds in runs)


def _their_turns(tree: Any, base: Any, parts: list[Any], *, same: bool = False) -> float:
    from array import array

    import torch

    torch.set_num_threads(1)  # its tensors are small: more threads only wait for each other
    cache = tree.RadixCache.create_simulated(page_size=PAGE_TOKENS)
    values = torch.arange(TOKENS, dtype=torch.int64)
    times = []
    for _ in range(12):
        ids = array("q")
        for part in parts:
            ids = ids + array("q", part.tolist())
            key = tree.RadixKey(token_ids=ids)
            started = time.perf_counter()
            found = cache.match_prefix(base.MatchPrefixParams(key=key))
            cache.inc_lock_ref(found.last_device_node)
            cache.insert(base.InsertParams(key=key, value=values[: len(ids)]))
            cache.dec_lock_ref(found.last_device_node)
            took = time.perf_counter() - started
        times.append(took)
        if not same:
            parts = [np.random.default_rng(len(times)).permutation(part) for part in parts]
    return statistics.median(times)


def _our_turns(parts: list[Any], *, same: bool = False) -> float:
    index = PrefixIndex()
    index.add_pool(POOL, first_page=0, pages=8192, first_tail=0, tails=64)
    namespace = namespace_key("bench", "", "r", "k")
    free = list(range(8192))
    times = []
    for turn in range(12):
        ids = np.empty(0, np.int32)
        for part in parts:
            ids = np.concatenate((ids, part))
            started = time.perf_counter()
            keys = page_keys(ids, namespace)
            found = index.match(POOL, key_columns(keys), len(keys))
            hold = index.acquire(found, found.base, found.tail, turn)
            fresh = keys[found.base :]
            if fresh:
                pages = [free.pop() for _ in fresh]
                index.publish(hold, fresh, pages, pages, turn)
            index.release(hold, turn)
            took = time.perf_counter() - started
        times.append(took)
        if not same:
            parts = [np.random.default_rng(len(times)).permutation(part) for part in parts]
    return statistics.median(times)


PARTS: dict[str, Callable[[], Figures]] = {
    "reuse": reuse,
    "conservation": conservation,
    "sglang": sglang,
    "warm": warm,
}


def run(args: list[str]) -> Figures:
    """All parts, or those named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks prefix", description=TITLE)
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="default: all")
    options = parser.parse_args(args)
    figures: Figures = {}
    for part in options.part or PARTS:
        figures |= PARTS[part]()
    return figures
