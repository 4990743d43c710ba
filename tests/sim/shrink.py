"""Make a failing scenario small: fewer faults, then fewer requests, then tame knobs; the generators stay as they are.

A candidate counts if it breaks the same rule, not necessarily with the same words.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from tests.sim.device import Violation
from tests.sim.scenario import Knobs, Scenario
from tests.sim.world import World


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

    for name in ("faults", "requests"):
        scenario = _fewer(scenario, name, fails, budget)
    tame = Knobs()
    for knob in fields(Knobs):
        value = getattr(tame, knob.name)
        if budget[0] > 0 and getattr(scenario.knobs, knob.name) != value:
            candidate = replace(scenario, knobs=replace(scenario.knobs, **{knob.name: value}))
            if fails(candidate):
                scenario = candidate
    return scenario


def _fewer(scenario: Scenario, name: str, fails: Any, budget: list[int]) -> Scenario:
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
