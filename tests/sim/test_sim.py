"""The simulator in the test lane: a few hundred seeds hold, runs repeat exactly, every planted bug is found."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS, hunt, planted
from tests.sim.runner import run_batch
from tests.sim.saved import FOLDER, known_seeds, load, save
from tests.sim.scenario import draw
from tests.sim.shrink import attempt, shrink

ROOT = Path(__file__).parents[2]
SEEDS = 60  # the lane runs thousands of fresh ones beside the tests
MUTANT_SEEDS = 400
RARE = {
    "row_generation_unchecked": 4000,
    "orphans_not_dropped": 2000,
    "failed_step_keeps_slots": 2000,
    "spare_published_while_written": 8000,
    "mask_of_another_position": 8000,
    "mask_of_another_generation": 8000,
}
"""Bugs that need so many seeds that only the nightly lane looks for them."""

DIGEST = """
import hashlib
from tests.sim.scenario import draw
from tests.sim.shrink import attempt
digest = hashlib.sha256()
for seed in range(12):
    trace = []
    attempt(draw(seed), trace)
    digest.update("\\n".join(trace).encode())
print(digest.hexdigest())
"""


def test_invariants_hold():
    tally = run_batch(0, SEEDS)
    assert not tally.failures
    assert tally.completed > SEEDS and tally.tokens > 20 * SEEDS
    for name in (
        "preemptions",
        "prefix_hits",
        "replays",
        "resumed_from_tail",
        "slots_adopted",
        "rebinds",
        "workers_lost",
        "gateways_lost",
        "step_errors",
        "stale_conn",
        "constrained_completed",
        "grammars_later",
        "rows_failed",
    ):
        assert tally.counts[name], f"{name} never happened: the seeds have lost their bite"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_fixed_bug_stays_fixed(path):
    assert attempt(load(path))[1] is None


def test_scenarios_survive_a_file(tmp_path):
    save(draw(7), tmp_path / "s.json")
    assert load(tmp_path / "s.json") == draw(7)


def test_runs_repeat_under_another_hash_seed():
    def digest(hash_seed):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}"}
        command = [sys.executable, "-c", DIGEST]
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, check=True, text=True).stdout

    first = digest("1")
    assert len(first.strip()) == hashlib.sha256().digest_size * 2
    assert first == digest("2")


@pytest.mark.parametrize(
    "mutant", [m for m in MUTANTS if m.name not in RARE or m.name in known_seeds()], ids=lambda mutant: mutant.name
)
def test_planted_bug_is_found(mutant):
    """At a seed that showed it before; `python -m tests.sim --mutants --write` makes that list anew."""
    known = known_seeds().get(mutant.name)
    if known is None or hunt(mutant, first=known, limit=1) is None:
        assert hunt(mutant, first=0, limit=MUTANT_SEEDS) is not None


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name in RARE], ids=lambda mutant: mutant.name)
def test_rare_planted_bug_is_found(mutant):
    assert hunt(mutant, first=0, limit=RARE[mutant.name]) is not None


def test_a_failure_is_shrunk_and_still_fails():
    (mutant,) = [m for m in MUTANTS if m.name == "emitted_not_carried"]
    found = hunt(mutant, first=0, limit=MUTANT_SEEDS)
    assert found is not None
    scenario = draw(found.seed)
    with planted(mutant):
        failure = attempt(scenario)[1]
        assert failure is not None
        small = shrink(scenario, failure.rule, runs=60)
        assert attempt(small)[1] is not None
    assert attempt(small)[1] is None
    assert len(small.requests) <= 3 and len(small.faults) <= 2
