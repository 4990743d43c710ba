"""How candidates are timed against each other: graphs of many calls, replayed in turn, medians.

The order alternates, so that clocks and temperature drift for all alike. A candidate that fails to compile, to run or
to be captured has lost, and so has one whose result is another than the built-in value's.
"""
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from worker_svc import tuning
from worker_svc.tuning import Value
from worker_svc.tuning.chooser import LOST

ROUNDS = 9
WARM_UPS = 2
TOLERANCE = 5e-2
"""Of a candidate's result, relative to the built-in value's: E4M3 codes of attention that was rounded elsewhere differ
by a hundredth, and all else by less."""

K = TypeVar("K")
Call = Callable[[], object]
Run = Callable[[], float]
Timer = Callable[[Sequence[Call]], Run]
"""Takes calls that a step would make one after the other; what it returns runs them all: microseconds of one."""

log = logging.getLogger(__name__)


def cuda_timer(calls: Sequence[Call]) -> Run:
    """A graph of all calls between two events. Raises what a call does, before or in the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()

    def run() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / len(calls)

    return run


def race(
    variants: Mapping[K, Mapping[str, Value]],
    calls: Sequence[Call],
    result: Callable[[], Tensor],
    timer: Timer,
    rounds: int = ROUNDS,
) -> dict[K, float]:
    """Median microseconds of a call under the values of each variant, LOST for those that fail. The first variant is
    the built-in one: `result`, computed under each, has to come near to its."""
    runs: dict[K, Run] = {}
    truth: Tensor | None = None
    for name, values in variants.items():
        with tuning.trial(values):
            try:
                found = result()
                truth = found if truth is None else truth
                difference = distance(found, truth)
                if not difference <= TOLERANCE:
                    log.warning("%s has lost: its result differs by %.3g", values, difference)
                    continue
                runs[name] = timer(calls)
            except Exception as error:  # noqa: BLE001 - whatever a compiler, a driver or a library has to say
                log.info("%s has lost: %s: %s", values, type(error).__name__, str(error)[:200])
    times: dict[K, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(times) if turn % 2 == 0 else list(reversed(times)):
            try:
                times[name].append(runs[name]())
            except Exception as error:  # noqa: BLE001 - as above
                log.info("%s has lost: %s: %s", variants[name], type(error).__name__, str(error)[:200])
                del times[name]
    return {name: statistics.median(times[name]) if times.get(name) else LOST for name in variants}


def distance(found: Tensor, truth: Tensor) -> float:
    """Relative Frobenius distance; not a number if a value is none."""
    found, truth = found.float(), truth.float()
    return float((found - truth).norm() / truth.norm().clamp(min=1e-30))
