"""Real processes, killed and restarted under streams of every kind: nothing is lost, doubled or different.

The reduced form of `python -m benchmarks kill_matrix`, in a process of its own: it forks, which one with gRPC must not.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._kill_load import Asked, Run, Told, compare
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


@pytest.mark.nightly
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
