"""Run many seeds, on several processes, and add up what happened.

A world is full of cycles, and the collector would walk all of its pages again and again: it runs between seeds instead,
and leaves out what was there before (the modules: more than a hundred worlds).
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.sim.scenario import draw
from tests.sim.shrink import Failure, attempt

BATCH = 50
COLLECT_EVERY = 4
"""Seeds between two collections: some 5 MB of worlds."""


@dataclass(slots=True)
class Tally:
    """Sums over runs; `failures` maps a seed to what it broke."""

    seeds: int = 0
    events: int = 0
    frames: int = 0
    tokens: int = 0
    virtual_s: float = 0.0
    faults: int = 0
    completed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, Failure] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        for name in ("seeds", "events", "frames", "tokens", "virtual_s", "faults", "completed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.counts.update(other.counts)
        self.failures.update(other.failures)


@contextmanager
def collector_off() -> Iterator[Callable[[], None]]:
    """No collection inside the block but those it asks for, one seed after the other."""
    was_on, seeds = gc.isenabled(), 0
    gc.disable()
    gc.freeze()

    def seed_done() -> None:
        nonlocal seeds
        seeds += 1
        if seeds % COLLECT_EVERY == 0:
            gc.collect()

    try:
        yield seed_done
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def run_batch(first: int, count: int) -> Tally:
    """Seeds first..first+count-1, in this process."""
    with collector_off() as seed_done:
        return _run_batch(first, count, seed_done)


def _run_batch(first: int, count: int, seed_done: Callable[[], None]) -> Tally:
    tally = Tally()
    for seed in range(first, first + count):
        world, failure = attempt(draw(seed))
        tally.seeds += 1
        tally.events += world.events
        tally.frames += world.frames
        tally.tokens += world.checker.tokens
        tally.virtual_s += world.now_ns / 1e9
        tally.faults += world.faults_fired
        tally.completed += world.checker.completed
        tally.counts.update(world.checker.counts)
        if failure is not None:
            tally.failures[seed] = failure
        seed_done()
    return tally


def run(
    first: int, seeds: int, jobs: Callable[[], int], minutes: float = 0.0, stop_after: int = 20, most_jobs: int = 8
) -> Iterator[Tally]:
    """Yield running totals. Ends after `seeds`, or after `minutes` if given, or when enough has failed.

    `jobs()` is asked again and again: how many batches may run at once, at most `most_jobs`.
    """
    total = Tally()
    end = time.monotonic() + minutes * 60 if minutes else None
    batches = [(at, min(BATCH, first + seeds - at)) for at in range(first, first + seeds, BATCH)]
    with ProcessPoolExecutor(most_jobs) as pool:
        waiting: set[Future[Tally]] = set()
        while batches or waiting:
            while batches and len(waiting) < min(jobs(), most_jobs) and (end is None or time.monotonic() < end):
                waiting.add(pool.submit(run_batch, *batches.pop(0)))
            if not waiting:
                break
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                total.add(future.result())
            yield total
            if len(total.failures) >= stop_after:
                batches = []
