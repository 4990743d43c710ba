"""Run many seeds, on several processes, and add up what happened."""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.sim.scenario import draw
from tests.sim.shrink import Failure, attempt

BATCH = 50


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


def run_batch(first: int, count: int) -> Tally:
    """Seeds first..first+count-1, in this process."""
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
    return tally


def run(first: int, seeds: int, jobs: int = 1, minutes: float = 0.0, stop_after: int = 20) -> Iterator[Tally]:
    """Yield running totals. Ends after `seeds`, or after `minutes` if given, or when enough has failed."""
    total = Tally()
    end = time.monotonic() + minutes * 60 if minutes else None
    batches = [(at, min(BATCH, first + seeds - at)) for at in range(first, first + seeds, BATCH)]
    with ProcessPoolExecutor(jobs) as pool:
        waiting: list[Future[Tally]] = []
        while batches or waiting:
            while batches and len(waiting) < 2 * jobs and (end is None or time.monotonic() < end):
                waiting.append(pool.submit(run_batch, *batches.pop(0)))
            if not waiting:
                break
            total.add(waiting.pop(0).result())
            yield total
            if len(total.failures) >= stop_after:
                batches = []
