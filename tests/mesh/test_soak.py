"""Mixed load with faults: afterwards the mesh owns nothing. `python -m benchmarks soak`: five minutes; nightly an hour.

In processes of their own: the benchmarks fork, which one with gRPC must not. The five minutes run beside the rest of
the lane, so their workers are simulated ones: the mesh, not the model's arithmetic, is what has to give things back.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks._kill_mesh import MeshShape

pytestmark = pytest.mark.timeout(720)
ROOT = Path(__file__).parents[2]
EXACT = ("tokens_lost", "tokens_doubled", "ids_different", "logprobs_different", "texts_different")


def measure(tmp_path, name, *flags):
    file = tmp_path / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks", name, *flags, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(file.read_text())["metrics"], f"{done.stdout}\n{done.stderr}"


def assert_exact(found, said):
    assert {name: found[name] for name in EXACT} == dict.fromkeys(EXACT, 0), said
    assert found["client_errors"] == 0 and found["requests"] > 0, said


class Hits:
    """A tormentor that only writes down whom it would hurt."""

    def __init__(self):
        self.aim, self.hurt = {}, []

    def kill(self, service):
        self.hurt.append(self.aim.get(service, service))

    def freeze(self, service, seconds):
        self.kill(service)

    def restart(self, name):
        self.hurt.append(name)


@pytest.mark.parametrize("calm_from", range(16, 25))  # in the third round, which begins with the first ones
def test_once_settled_only_the_last_of_each_kind_is_hurt(calm_from):
    hits = Hits()
    for hit in itertools.islice(soak.faults(hits, MeshShape(), lambda: len(hits.hurt) >= calm_from), 40):
        hit()
    assert set(hits.hurt[:8]) == {"worker-0", "gateway-0", "grammar", "scheduler"}
    after = hits.hurt[calm_from + 2 :]  # a round asks once for all that has a standby
    assert set(after) == {"worker-1", "gateway-1"}
    assert not {"worker-0", "gateway-0"} & set(hits.hurt[calm_from:])


def test_after_five_minutes_of_mixed_load_and_faults_nothing_is_owned(tmp_path):
    mesh = ("--small", "--sim-step-ms", "80", "--streams", "3", "--per-kind", "1", "--tokens", "16")
    found, said = measure(tmp_path, "soak", *mesh, "--minutes", "5", "--baseline-min", "5", "--every-s", "30")
    assert_exact(found, said)
    assert found["still_owned"] == found["cannot_happen"] == found["tracebacks"] == 0, said
    assert found["faults"] >= 7 and found["kinds_of_faults"] >= 7 and found["clients_that_vanished"] >= 20, said


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_an_hour_of_mixed_load_with_a_fault_a_minute(tmp_path):
    found, said = measure(tmp_path, "soak", "--minutes", "60")
    assert_exact(found, said)
    assert found["still_owned"] == found["cannot_happen"] == found["tracebacks"] == 0, said
    assert found["rss_mib_most_more"] <= 2.0 and found["fds_more"] <= 8 and found["faults"] >= 30, said


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_rolling_restart_under_32_streams(tmp_path):
    found, said = measure(tmp_path, "rolling", "--drain-timeout", "120")
    assert_exact(found, said)
    assert found["processes"] == 6 and found["left_unclean"] == 0 and found["in_flight_at_start"] >= 30, said


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_twice_the_load_that_can_be_served(tmp_path):
    found, said = measure(tmp_path, "overload")
    assert found["goodput_of_peak"] >= 0.9 and found["overload_rps"] >= 1.8 * found["peak_goodput_rps"], said
    assert found["refused"] > 0 and found["refused_without_retry_after"] == found["client_errors"] == 0, said
    for name in ("gateway", "scheduler"):
        assert found[f"rss_mib_peak_{name}"] <= found[f"rss_mib_before_{name}"] + 64, said
