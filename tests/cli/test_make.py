"""The Makefile and .ci/run hold what people and CI are told to type."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*args: str, folder: Path = ROOT) -> str:
    # -n prints the commands and runs none; VENV points nowhere, so nothing looks finished.
    return subprocess.run(
        ["make", "--no-print-directory", *args], cwd=folder, capture_output=True, text=True, check=True, timeout=60
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
        ("static", ["'.[dev,grammar]'", "ruff check", "ruff format --check", "mypy", "lint-imports"]),
        ("static", ["gen_protos.sh --check"]),
        ("test", ["'.[dev,grammar]'", "tools/lane.sh nowhere/bin 10000"]),
        ("nightly", ["tests.sim --seeds 200000", 'pytest -m "not gpu"']),
        ("sim SEEDS=7", ["tests.sim --seeds 7"]),
    ],
)
def test_a_target_runs_these_commands(target: str, commands: list[str]):
    shown = make("-n", "VENV=nowhere", *target.split())
    assert [c for c in commands if c not in shown] == []


def test_the_lane_says_what_its_parts_took_and_ends_with_pytests_summary(tmp_path: Path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "lane.sh", tmp_path / "tools")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    tools = {f".venv/bin/{name}": "exit 0" for name in ("python", "ruff", "mypy", "lint-imports")}
    tools |= {".venv/bin/pytest": "echo 7 passed in 1.00s", "tools/gen_protos.sh": "exit 0"}
    for name, code in tools.items():
        program(tmp_path / name, code)
    for stamp in (".setup", ".setup-dev"):
        (tmp_path / ".venv" / stamp).touch()
    lines = make("test", folder=tmp_path).splitlines()
    assert sorted(line.split(":")[0] for line in lines if re.fullmatch(r"\w+: \d+ s", line)) == ["static"]
    assert re.fullmatch(r"checks, tests and simulation together: \d+ s", lines[-2])
    assert re.fullmatch(r"21 passed in \d+s", lines[-1])  # both halves and the soak
    for broken in (".venv/bin/mypy", ".venv/bin/python", ".venv/bin/pytest"):  # in static, in sim, at the end
        program(tmp_path / broken, "exit 1")
        with pytest.raises(subprocess.CalledProcessError):
            make("test", folder=tmp_path)
        program(tmp_path / broken, tools[broken])


def program(path: Path, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


def test_a_finished_set_up_is_not_repeated(tmp_path: Path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for stamp in ("bin/python", ".setup", ".setup-dev"):
        (venv / stamp).touch()
    assert "pip install" not in make("-n", f"VENV={venv}", "setup", "setup-dev")


def test_the_hooks_run_tools_that_set_up_installs():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    packages = {re.split(r"[^a-z-]", name)[0] for name in installed} | {"lint-imports"}  # of import-linter
    tools = set(re.findall(r"entry: \.venv/bin/([a-z-]+)", hooks))
    assert {"ruff", "mypy", "lint-imports", "typos"} == tools
    assert tools <= packages


def test_ci_runs_the_lane_that_people_run():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("exec make test")
