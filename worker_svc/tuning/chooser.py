"""Times in, a value out: which candidate of a choice is worth taking over the built-in one. Pure arithmetic.

Times are microseconds by candidate and point; a point is one operation at one size, and a size's total is what the
model spends there: every point counted as often as a step meets it. What failed took for ever. A point that a
candidate lacks is one at which it runs the built-in value's own program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from worker_svc.tuning import Value
from worker_svc.tuning.choices import Cut

LOST = math.inf
WORTH = 1.03
"""A candidate is that many times as fast at every size that it changes, or it is not taken."""
LOSS = 1.01
"""And no point of it takes longer than that many times the built-in value's."""


@dataclass(frozen=True, slots=True)
class Point:
    """One operation (`what`) at one size; `weight` is how often a step meets it."""

    size: int
    what: str
    weight: float = 1.0


Times = Mapping[Point, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The value to run with, and how many times as fast it is at the sizes that it changes; 1 if it is built in."""

    value: Value
    gain: float = 1.0


def choose(builtin: Value, times: Mapping[Value, Times]) -> Verdict:
    """The candidate that saves most over all sizes among those worth taking; of equals the first."""
    base, best, most = times[builtin], Verdict(builtin), 0.0
    for value, own in times.items():
        if value == builtin or not worth(base, own):
            continue
        gains = [math.log(before / after) for before, after in totals(base, own).values()]
        if sum(gains) > most:
            best, most = Verdict(value, math.exp(sum(gains) / len(gains))), sum(gains)
    return best


def worth(base: Times, own: Times) -> bool:
    """True if a candidate is faster by enough at all sizes that it changes, and slower nowhere."""
    if not own or any(not math.isfinite(time) or not math.isfinite(base[point]) for point, time in own.items()):
        return False
    if any(time > base[point] * LOSS for point, time in own.items()):
        return False
    return all(before >= after * WORTH for before, after in totals(base, own).values())


def totals(base: Times, own: Times) -> dict[int, tuple[float, float]]:
    """Per size that a candidate changes: what the model spends at its points with the built-in value, and with it."""
    found: dict[int, tuple[float, float]] = {}
    for point, time in own.items():
        before, after = found.get(point.size, (0.0, 0.0))
        found[point.size] = before + base[point] * point.weight, after + time * point.weight
    return found


def by_cut(cut: Cut, builtin: int, few: Times, many: Times) -> dict[Value, Times]:
    """Times of the candidates of a cut, from those of its two programs at all points; of those candidates alone of
    which every size that they change was timed."""

    def program(value: int, size: int) -> Times:
        return few if cut.runs_few(value, size) else many

    timed = {point.size for point in few}
    found: dict[Value, Times] = {builtin: {point: program(builtin, point.size)[point] for point in few}}
    for value in cut.candidates:
        changed = {size for size in cut.sizes() if cut.runs_few(value, size) != cut.runs_few(builtin, size)}
        if value != builtin and changed <= timed:
            found[value] = {point: program(value, point.size)[point] for point in few if point.size in changed}
    return found


def total(base: Times, own: Times) -> float:
    """Microseconds of a candidate over all points, each as often as a step meets it."""
    return sum(own.get(point, time) * point.weight for point, time in base.items())
