"""The mutation score: how many of the planted bugs are found, each within a budget of processor time.

Bugs of one patch are single removals of a rule. Those of several take out rules that cover each other; their patches
are tried alone too, on a fourth of the budget: what holds alone is covered by the rest, which is no miss. Not here: the
bugs (`mutants`) and the seeds that the test lane begins with (`saved`), which this can write.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.__main__ import machine
from tests.sim.mutants import MUTANTS, Found, Mutant, hunt
from tests.sim.saved import write_known_seeds

GATE = 0.95
SEEDS = 1_000_000
"""No limit: processor time is."""


def score(only: str, cpu_s: float, jobs: int, *, write: bool = False, file: Path | None = None) -> int:
    """Hunt all whose name contains `only`, print a table and the score. Returns 0 if that reaches the gate.

    `write`: the seeds go to the list that the test lane begins with. `file`: where the score goes as JSON.
    """
    wanted = [mutant for mutant in MUTANTS if only in mutant.name]
    parts = [part for mutant in wanted for part in mutant.halves]
    names = [(mutant.name, cpu_s) for mutant in wanted] + [(part.name, cpu_s / 4) for part in parts]
    found: dict[str, Found | None] = {}
    with ProcessPoolExecutor(jobs) as pool:
        for (name, limit_s), one in zip(names, pool.map(_hunt, *zip(*names, strict=True)), strict=True):
            found[name] = one
            if write and one is not None and len(found) <= len(wanted):
                write_known_seeds({name: one.seed})
            print(f"{name:60s} {_verdict(one, limit_s, alone=len(found) > len(wanted))}", flush=True)
    result = summary(wanted, found, cpu_s)
    if file is not None:
        file.write_text(json.dumps({**result, "machine": machine()}, indent=1) + "\n")
    print(
        f"found within {cpu_s:.0f} CPU-s each: singles {result['singles_killed']} of {result['singles']}, "
        f"pairs {result['pairs_killed']} of {result['pairs']}; of the {len(parts)} parts of pairs alone "
        f"{result['parts_seen_alone']} are seen"
    )
    print(f"mutants_killed {result['mutants_killed']:.3f}; the slowest took {result['slowest_cpu_s']:.1f} CPU-s")
    return 0 if result["mutants_killed"] >= GATE else 1


def summary(wanted: list[Mutant], found: dict[str, Found | None], cpu_s: float) -> dict[str, Any]:
    """The score and its table: a row for each bug, with those of its parts behind it."""
    singles = [mutant for mutant in wanted if not mutant.halves]
    pairs = [mutant for mutant in wanted if mutant.halves]
    parts = [part for mutant in pairs for part in mutant.halves]
    killed = [mutant for mutant in wanted if found[mutant.name] is not None]
    return {
        "budget_cpu_s": cpu_s,
        "mutants_killed": round(len(killed) / len(wanted), 4),
        "singles": len(singles),
        "singles_killed": sum(found[mutant.name] is not None for mutant in singles),
        "pairs": len(pairs),
        "pairs_killed": sum(found[mutant.name] is not None for mutant in pairs),
        "parts_seen_alone": sum(found[part.name] is not None for part in parts),
        "slowest_cpu_s": round(max((one.cpu_s if one else cpu_s) for one in map(found.get, _names(wanted))), 2),
        "cpu_s": round(sum(one.cpu_s if one else cpu_s for one in map(found.get, _names(wanted))), 1),
        "missed": [mutant.name for mutant in wanted if found[mutant.name] is None],
        "mutants": {mutant.name: _row(mutant, found) for mutant in wanted},
    }


def _names(mutants: list[Mutant]) -> list[str]:
    return [mutant.name for mutant in mutants]


def _row(mutant: Mutant, found: dict[str, Found | None]) -> dict[str, Any]:
    one = found[mutant.name]
    row: dict[str, Any] = {"patches": len(mutant.patches), "found": None if one is None else asdict(one)}
    if mutant.halves:
        row["alone"] = {part.name: part_found and asdict(part_found) for part, part_found in _alone(mutant, found)}
    return row


def _alone(mutant: Mutant, found: dict[str, Found | None]) -> Iterator[tuple[Mutant, Found | None]]:
    return ((part, found[part.name]) for part in mutant.halves)


def _verdict(found: Found | None, limit_s: float, *, alone: bool) -> str:
    if found is None:
        return f"covered by the other, {limit_s:.0f} CPU-s" if alone else "NOT FOUND"
    return f"seed {found.seed:5d} {found.cpu_s:6.1f} CPU-s  {found.message[:90]}"


def _hunt(name: str, cpu_s: float) -> Found | None:
    """By name: a patch does not travel to another process."""
    (mutant,) = [m for m in _all() if m.name == name]
    return hunt(mutant, first=0, limit=SEEDS, cpu_s=cpu_s)


def _all() -> Iterator[Mutant]:
    for mutant in MUTANTS:
        yield mutant
        yield from mutant.halves
