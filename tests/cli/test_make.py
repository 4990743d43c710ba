"""The Makefile and .ci/run hold what people and CI are told to type."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*args: str) -> str:
    # -n prints the commands and runs none; VENV points nowhere, so nothing looks finished.
    return subprocess.run(
        ["make", "--no-print-directory", *args], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_help_lists_what_the_readme_promises():
    listed = {line.split()[0] for line in make("help").splitlines()}
    promised = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert {"setup", "demo", "test", "nightly", "sim", "protos", "fmt", "clean"} <= listed
    assert promised <= listed


@pytest.mark.parametrize(
    ("target", "commands"),
    [
        ("demo", ["-m venv nowhere", "-c constraints.txt", "'.[cpu]'", "v4mesh demo"]),
        ("test", ["'.[dev]'", "ruff check", "ruff format --check", "mypy", "lint-imports", "gen_protos.sh --check"]),
        ("test", ["tests.sim --seeds 5000", 'pytest -m "not nightly and not gpu"']),
        ("nightly", ["tests.sim --seeds 200000", 'pytest -m "not gpu"']),
        ("sim SEEDS=7", ["tests.sim --seeds 7"]),
    ],
)
def test_a_target_runs_these_commands(target: str, commands: list[str]):
    shown = make("-n", "VENV=nowhere", *target.split())
    assert [c for c in commands if c not in shown] == []


def test_a_finished_set_up_is_not_repeated(tmp_path: Path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for stamp in ("bin/python", ".setup", ".setup-dev"):
        (venv / stamp).touch()
    assert "pip install" not in make("-n", f"VENV={venv}", "setup", "setup-dev")


def test_ci_runs_the_lane_that_people_run():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("exec make test")
