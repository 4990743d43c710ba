"""Scenarios as JSON files: a failure that was fixed stays as a named regression, whatever later draws look like.

Beside them the seeds that show the planted bugs: a list that the test lane tries before it looks further.
"""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from meshkit.types import SamplingParams
from tests.sim.scenario import Fault, Knobs, RequestSpec, Scenario

FOLDER = Path(__file__).parent / "regressions"
KNOWN = Path(__file__).parent / "mutant_seeds.json"


def save(scenario: Scenario, path: Path) -> None:
    """Write one scenario; sampling parameters at their defaults are left out."""
    data = asdict(scenario)
    plain = asdict(SamplingParams())
    for request in data["requests"]:
        request["params"] = {name: value for name, value in request["params"].items() if value != plain[name]}
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n")


def load(path: Path) -> Scenario:
    """Read it back. Knobs that no longer exist are dropped, new ones get their defaults."""
    data = json.loads(path.read_text())
    known = {knob.name for knob in fields(Knobs)}
    return Scenario(
        seed=data["seed"],
        knobs=Knobs(**{name: value for name, value in data["knobs"].items() if name in known}),
        requests=[RequestSpec(**{**request, "params": _params(request["params"])}) for request in data["requests"]],
        faults=[Fault(**fault) for fault in data["faults"]],
    )


def known_seeds() -> dict[str, int]:
    """Planted bug -> a seed that showed it when the list was written (`python -m tests.sim --mutants --write`)."""
    found: dict[str, int] = json.loads(KNOWN.read_text())
    return found


def write_known_seeds(found: dict[str, int]) -> None:
    """Add to the list, or replace in it."""
    known = known_seeds() if KNOWN.exists() else {}
    KNOWN.write_text(json.dumps(dict(sorted((known | found).items())), indent=1) + "\n")


def _params(values: dict[str, Any]) -> SamplingParams:
    """JSON has no tuples."""
    tuples: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return SamplingParams(**tuples)
