"""The tree is what the README says: paths exist, every op has its torch truth and a test, benchmarks have titles."""

import importlib
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import names

ROOT = Path(__file__).parent.parent


def test_every_path_the_readme_names_exists():
    text = (ROOT / "README.md").read_text()
    paths = set(re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]*(?:\.[a-z]+)?)`", text))
    assert len(paths) >= 9, "the README names the path of a token through at least nine files"
    missing = sorted(p for p in paths if not (ROOT / p).exists())
    assert missing == []


@pytest.mark.parametrize(
    "op", sorted(p.name for p in (ROOT / "worker_svc/ops").iterdir() if (p / "__init__.py").exists())
)
def test_every_op_has_its_reference_and_a_test(op):
    assert (ROOT / "worker_svc/ops" / op / "ref.py").exists(), f"{op} has no plain torch reference"
    tests = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("*.py"))
    assert re.search(rf"worker_svc\.ops(\.| import .*\b){op}\b", tests), f"no test imports worker_svc.ops.{op}"


@pytest.mark.parametrize("name", names())
def test_every_benchmark_has_a_title_and_a_run(name):
    module = importlib.import_module(f"benchmarks.{name}")
    assert isinstance(module.TITLE, str)
    assert callable(module.run)


def test_no_module_is_named_after_nothing():
    banned = {"utils", "helpers", "misc", "common", "base", "manager"}
    folders = ["meshkit", "gateway", "scheduler_svc", "worker_svc", "cache_svc", "grammar_svc", "benchmarks"]
    found = [p for folder in folders for p in (ROOT / folder).rglob("*.py") if p.stem in banned]
    assert found == []


def test_every_module_says_what_it_is():
    folders = ["meshkit", "gateway", "scheduler_svc", "worker_svc", "cache_svc", "grammar_svc", "benchmarks"]
    silent = []
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if text.strip() and not text.lstrip().startswith(('"""', 'r"""', "#!")):
                silent.append(str(path.relative_to(ROOT)))
    assert silent == []
