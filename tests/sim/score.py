"""The mutation score: how many of the planted bugs are found, each within a budget of processor time.

Bugs of one patch are single removals of a rule. Those of several take out rules that cover each other; their patches
are tried alone too, on a fourth of the budget: what holds alone is covered by the rest, which is no miss.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.sim.mutants import MUTANTS, Found, Mutant, hunt
from tests.sim.saved import write_known_seeds

GATE = 0.95
SEEDS = 1_000_000
"""No limit: processor time is."""


def score(only: str, cpu_s: float, jobs: int, *, write: bool = False) -> int:
    """Hunt all whose name contains `only`, print a table and the score. Returns 0 if that reaches the gate.

    `write`: the seeds go to the list that the test lane begins with.
    """
    wanted = [mutant for mutant in MUTANTS if only in mutant.name]
    parts = [part for mutant in wanted for part in mutant.halves]
    names = [(mutant.name, cpu_s) for mutant in wanted] + [(part.name, cpu_s / 4) for part in parts]
    singles, pairs, slowest = [0, 0], [0, 0], 0.0  # found, of
    with ProcessPoolExecutor(jobs) as pool:
        for number, found in enumerate(pool.map(_hunt, *zip(*names, strict=True))):
            if number < len(wanted):
                if write and found is not None:
                    write_known_seeds({wanted[number].name: found.seed})
                tally = pairs if wanted[number].halves else singles
                tally[0] += found is not None
                tally[1] += 1
                slowest = max(slowest, found.cpu_s if found else cpu_s)
            print(f"{names[number][0]:60s} {_verdict(found, alone=number >= len(wanted))}", flush=True)
    killed, planted = singles[0] + pairs[0], singles[1] + pairs[1]
    print(f"found within {cpu_s:.0f} CPU-s each: singles {singles[0]} of {singles[1]}, pairs {pairs[0]} of {pairs[1]}")
    print(f"mutants_killed {killed / planted:.3f}; the slowest took {slowest:.1f} CPU-s")
    return 0 if killed >= GATE * planted else 1


def _verdict(found: Found | None, *, alone: bool) -> str:
    if found is None:
        return "covered by the other" if alone else "NOT FOUND"
    return f"seed {found.seed:5d} {found.cpu_s:6.1f} CPU-s  {found.message[:90]}"


def _hunt(name: str, cpu_s: float) -> Found | None:
    """By name: a patch does not travel to another process."""
    (mutant,) = [m for m in _all() if m.name == name]
    return hunt(mutant, first=0, limit=SEEDS, cpu_s=cpu_s)


def _all() -> Iterator[Mutant]:
    for mutant in MUTANTS:
        yield mutant
        yield from mutant.halves
