"""Overlapped launches: who is launched so waits first, and the switch reaches kernels and libraries."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker_svc.ops import launches

OPS = Path(launches.__file__).parent
WAITS = {"after_others", "after_others_alone"}


def calls(node: ast.AST) -> list[str]:
    return [c.func.id for c in ast.walk(node) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)]


def kernels() -> list[tuple[str, bool, list[str]]]:
    """Name, whether it is chained, the waits it calls: of all functions of ops but the module of launches itself."""
    found = []
    for path in sorted(OPS.rglob("*.py")):
        if path.name == "launches.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                chained = any(isinstance(d, ast.Name) and d.id == "chained" for d in node.decorator_list)
                found.append((node.name, chained, [name for name in calls(node) if name in WAITS]))
    return found


def test_every_chained_kernel_waits_once_and_no_other_does():
    chained = {name: waits for name, on, waits in kernels() if on}
    assert len(chained) >= 15 and all(len(waits) == 1 for waits in chained.values()), chained
    assert not [name for name, on, waits in kernels() if waits and not on]


def test_who_sorts_the_experts_lets_nobody_come_early():
    waits = {name: waits for name, _, waits in kernels()}
    assert waits["_place"] == ["after_others_alone"], "humming reads the sort before it waits"


class Kernel:
    """As Triton's: `run` belongs to the class."""

    def run(self, *args: object, **options: object) -> tuple[object, ...]:
        return args, options


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launches, "INTERPRETED", False)
    monkeypatch.setattr(launches, "_options", {})
    monkeypatch.setattr(launches, "_switches", [])


@pytest.mark.usefixtures("compiled")
def test_the_switch_reaches_kernels_and_who_follows():
    kernel, told = launches.chained(Kernel()), list[bool]()
    launches.follow(told.append)
    assert kernel.run(1, grid=2) == ((1,), {"grid": 2}) and told == [False]
    with launches.overlapped(True):
        assert kernel.run(1, grid=2) == ((1,), {"launch_pdl": True, "grid": 2}) and told == [False, True]
    assert kernel.run() == ((), {}) and told == [False, True, False]


@pytest.mark.usefixtures("compiled")
def test_a_triton_without_such_launches_is_asked_for_none(monkeypatch: pytest.MonkeyPatch):
    from triton.backends.nvidia import compiler

    monkeypatch.setattr(compiler, "CUDAOptions", SimpleNamespace(__dataclass_fields__={}))
    launches.overlap(True)
    assert launches.chained(Kernel()).run() == ((), {})


def test_interpreted_kernels_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launches, "INTERPRETED", True)
    kernel = Kernel()
    assert launches.chained(kernel) is kernel and "run" not in vars(kernel)
