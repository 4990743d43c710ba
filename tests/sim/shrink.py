"""Make a failing scenario small: fewer faults, fewer requests, tame knobs, plain requests; again until nothing helps.

A candidate counts if it breaks the same rule, not necessarily with the same words. The generators stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from meshkit.types import SamplingParams
from tests.sim.device import Violation
from tests.sim.scenario import Knobs, Scenario
from tests.sim.world import World

PLAIN: tuple[dict[str, Any], ...] = (
    {"n": 1},
    {"grammar": "", "thinking": False},
    {"params": SamplingParams(max_tokens=20)},
    {"prompt": [3, 4, 5]},
    {"cancel_after": -1, "stop_after": -1, "abort_ms": -1.0},
    {"at_ms": 60.0},
)
"""What a request may be simplified to, one after the other."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a run failed. `rule` groups failures, `message` is for people."""

    rule: str
    message: str


def attempt(scenario: Scenario, trace: list[str] | None = None) -> tuple[World, Failure | None]:
    """Run a scenario; any exception is a failure."""
    world = World(scenario, trace)
    try:
        world.run()
    except Violation as violation:
        return world, Failure(violation.rule, str(violation))
    except Exception as error:  # noqa: BLE001  what a core raises is the finding
        return world, Failure(type(error).__name__, f"{type(error).__name__}: {error}")
    return world, None


def shrink(scenario: Scenario, rule: str, runs: int = 400) -> Scenario:
    """The smallest scenario found within so many runs that still breaks `rule`."""
    budget = [runs]

    def fails(candidate: Scenario) -> bool:
        budget[0] -= 1
        failure = attempt(candidate)[1]
        return failure is not None and failure.rule == rule

    before = None
    while budget[0] > 0 and scenario != before:
        before = scenario
        for name in ("faults", "requests"):
            scenario = _fewer(scenario, name, fails, budget)
        scenario = _tamer(scenario, fails, budget)
        scenario = _plainer(scenario, fails, budget)
    return scenario


def _tamer(scenario: Scenario, fails: Callable[[Scenario], bool], budget: list[int]) -> Scenario:
    """One knob after the other at its default."""
    tame = Knobs()
    for knob in fields(Knobs):
        value = getattr(tame, knob.name)
        if budget[0] > 0 and getattr(scenario.knobs, knob.name) != value:
            candidate = replace(scenario, knobs=replace(scenario.knobs, **{knob.name: value}))
            if fails(candidate):
                scenario = candidate
    return scenario


def _plainer(scenario: Scenario, fails: Callable[[Scenario], bool], budget: list[int]) -> Scenario:
    """Requests without what they ask for beyond some tokens, arriving at once."""
    for number in range(len(scenario.requests)):
        for plain in PLAIN:
            request = scenario.requests[number]
            simpler = replace(request, **plain)
            if budget[0] > 0 and simpler != request:
                requests = [*scenario.requests[:number], simpler, *scenario.requests[number + 1 :]]
                candidate = replace(scenario, requests=requests)
                if fails(candidate):
                    scenario = candidate
    return scenario


def _fewer(scenario: Scenario, name: str, fails: Callable[[Scenario], bool], budget: list[int]) -> Scenario:
    """Delta debugging over one list: drop halves, quarters, ... single items."""
    items = list(getattr(scenario, name))
    size = max(1, len(items) // 2)
    while items and budget[0] > 0:
        dropped = False
        at = 0
        while at < len(items) and budget[0] > 0:
            fewer: dict[str, Any] = {name: items[:at] + items[at + size :]}
            candidate = replace(scenario, **fewer)
            if fails(candidate):
                scenario, items, dropped = candidate, list(getattr(candidate, name)), True
            else:
                at += size
        if size == 1 and not dropped:
            break
        size = max(1, size // 2)
    return scenario
