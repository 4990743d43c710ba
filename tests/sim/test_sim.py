"""The simulator in the test lane: a few hundred seeds hold, runs repeat exactly, every planted bug is found."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS, Found, hunt, planted
from tests.sim.runner import run_batch
from tests.sim.saved import FOLDER, known_seeds, load, save
from tests.sim.scenario import draw
from tests.sim.score import GATE, summary
from tests.sim.shrink import attempt, shrink

ROOT = Path(__file__).parents[2]
SEEDS = 60  # the lane runs thousands of fresh ones beside the tests
MUTANT_SEEDS = 400
RARE = {
    "fences_off": 4000,
    "row_generation_unchecked": 4000,
    "orphans_not_dropped": 4000,
    "late_grammar_waited_for": 4000,
    "failed_step_keeps_slots": 4000,
    "freed_slot_is_bound_again": 4000,
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
for seed in range(6):
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


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_the_score_of_the_whole_catalogue(tmp_path):
    """Every planted bug and every part of those of several, two processor minutes each, as one run."""
    file = tmp_path / "score.json"
    command = [sys.executable, "-m", "tests.sim", "--mutants", "--cpu-s", "120", "--json", str(file)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    score = json.loads(file.read_text())
    assert done.returncode == 0 and score["mutants_killed"] >= GATE, done.stdout
    assert score["singles"] + score["pairs"] == len(MUTANTS) >= 50 and score["slowest_cpu_s"] <= 121


def test_the_score_counts_whole_bugs_and_shows_their_parts():
    single, pair = (next(m for m in MUTANTS if bool(m.halves) is halves) for halves in (False, True))
    found = dict.fromkeys((single.name, pair.name, *(part.name for part in pair.halves)))
    found[pair.name] = Found(7, 1.5, "I1: wrong")
    found[pair.halves[0].name] = Found(9, 2.0, "I2: twice")
    score = summary([single, pair], found, cpu_s=3.0)
    assert (score["mutants_killed"], score["missed"], score["slowest_cpu_s"]) == (0.5, [single.name], 3.0)
    assert [score[name] for name in ("singles", "singles_killed", "pairs", "pairs_killed")] == [1, 0, 1, 1]
    assert score["parts_seen_alone"] == 1 and score["cpu_s"] == 4.5
    assert next(iter(score["mutants"][pair.name]["alone"].values()))["seed"] == 9
    assert json.loads(json.dumps(score)) == score


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
