"""Real processes, killed and restarted under streams of every kind: nothing is lost, doubled or different.

The reduced form of `python -m benchmarks kill_matrix`, in a process of its own: it forks, which one with gRPC must not.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._kill_load import Asked, Run, Told, compare
from benchmarks._kill_outcome import Outcome, figures, resume
from benchmarks._kill_parts import Hurt, Part, judge, pause, quantile

pytestmark = pytest.mark.timeout(420)
ROOT = Path(__file__).parents[2]
EXACT = ("tokens_lost", "tokens_doubled", "ids_different", "logprobs_different", "texts_different")


def measure(tmp_path, *flags):
    file = tmp_path / "kills.json"
    command = [sys.executable, "-m", "benchmarks", "kill_matrix", *flags, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(file.read_text())["metrics"], done.stdout


def assert_exact(found, said):
    assert {name: found[name] for name in EXACT} == dict.fromkeys(EXACT, 0), said
    assert found["client_errors"] == found["cannot_happen"] == found["tracebacks"] == 0, said


@pytest.mark.timeout(600)
def test_a_few_kills_and_restarts_of_every_service(tmp_path):
    found, said = measure(tmp_path, "--quick")
    assert_exact(found, said)
    assert found["quick_faults"] == 7 and found["quick_in_flight_least"] >= 6 and not found["quick_invalid"]
    assert found["tokens"] > 300 and found["clients_of_killed_gateways"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_the_whole_matrix(tmp_path):
    found, said = measure(tmp_path, "--kills", "200")
    assert_exact(found, said)
    assert found["kills_faults"] == 200 and found["kills_in_flight_least"] >= 16
    services = ("gateway", "scheduler", "worker", "grammar")
    assert min(found[f"kills_{service}_least_phase"] for service in services) >= 5
    frozen = {name: seconds for name, seconds in found.items() if name.startswith("detected_s_")}
    assert len(frozen) == 8 and all(0 < seconds <= 2.5 for seconds in frozen.values()), frozen


# ---- the judge itself ------------------------------------------------------------------------------------------------


def run(ids, *, name="a", gateway=0, started=0.0, ended=10.0, **options):
    told = Told(list(ids), [0.5] * len(ids), "text", "length")
    return Run(Asked(name, "decode", "/", {}), gateway, started, ended, usage=len(ids), choices={0: told}, **options)


@pytest.mark.parametrize(
    "ids, lost, doubled, other",
    [
        ((1, 2, 3, 4, 5), 0, 0, 0),
        ((1, 2, 4, 5), 1, 0, 0),
        ((1, 2, 3, 3, 4, 5), 0, 1, 0),
        ((1, 2, 9, 4, 5), 0, 0, 1),
        ((1, 2), 3, 0, 0),
    ],
)
def test_differences_are_told_apart(ids, lost, doubled, other):
    found = compare(run(ids), run((1, 2, 3, 4, 5)))
    assert (found.lost, found.doubled, found.other) == (lost, doubled, other)


def test_logprobs_texts_ends_and_usage_count_too():
    whole, off = run((1, 2, 3)), run((1, 2, 3))
    off.choices[0].logprobs[1] = 0.25
    off.choices[0].finish = "stop"
    off.usage = 2
    found = compare(off, whole)
    assert (found.logprobs, found.text, found.lost) == (1, 1, 1)
    del off.choices[0]
    assert compare(off, whole).lost == 4


def test_only_clients_of_the_killed_gateway_may_fail():
    hurt = Hurt("gateway", "gateway-1", 5.0, [], {}, deadly_for=1)
    fine, cut = run((1, 2)), run((1,), gateway=1, error="reset")
    early, other = run((1,), gateway=1, ended=4.0, error="reset"), run((1,), gateway=0, error="reset")
    found = judge(Part("kills", [hurt], [fine, cut, early, other]), {"a": run((1, 2))})
    assert found.clients_of_killed_gateways == 1 and len(found.errors) == 2 and not found.different


def test_pauses_are_measured_from_the_fault_on():
    one = run((1, 2), marks=[1.0, 2.0, 2.1, 4.0, 9.0])
    assert pause(one, 2.05, 6.0) == pytest.approx(1.9)
    assert pause(one, 2.05, 2.08) is None
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0 and quantile([], 0.5) == -1


def test_a_resume_is_the_pause_that_begins_with_the_fault():
    one = run((1, 2), marks=[1.0, 2.0, 2.1, 4.0, 9.0])
    assert resume(one, 2.05, 8.0) == pytest.approx(1.9), "2.1 was on its way"
    assert resume(one, 3.5, 9.5) == pytest.approx(5.0)
    assert resume(one, 0.1, 9.5) == pytest.approx(1.0) and resume(one, 9.1, 9.5) == 0.0


def test_what_was_found_is_kept_and_gone_on_from(tmp_path):
    struck = run((1, 2), started=0.5, marks=[1.0, 5.0])
    waited, cut = run((1, 2), started=3.0, marks=[6.0, 6.1]), run((1,), gateway=1, error="reset")
    hurts = [Hurt("worker", "worker-0", 2.0, [struck, waited], {"decode": 1, "prefill": 1}, over=7.0)]
    part = Part("kills", hurts, [struck, waited, cut], calm=[0.25])
    outcome = Outcome()
    outcome.add(part, judge(part, {"a": run((1, 2))}))
    outcome.blame({"worker:slots": 2}, 1)
    outcome.broken.append("a mesh")
    outcome.save(tmp_path / "kept")
    again = Outcome.load(tmp_path / "kept")
    assert again == outcome and [path.name for path in tmp_path.iterdir()] == ["kept"]
    again.add(part, judge(part, {"a": run((1, 2))}))
    again.blame({"worker:slots": 1}, 0)
    found = figures(again, ("worker",))
    assert found["kills_faults"] == found["kills_worker"] == 2 and found["kills_worker_least_phase"] == 0
    assert found["resume_p99_s_worker"] == 3.0, "one whose first token came later is not resumed"
    assert found["resume_less_prefill_p99_s_worker"] == 1.25, "its first token takes 1.75 s in the median"
    assert found["client_errors"] == 2 and found["cannot_happen"] == 3 and found["not_followed"] == 1
