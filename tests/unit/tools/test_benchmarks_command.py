"""`python -m benchmarks`: what is listed and helped with, on a machine that lacks what some benchmarks need."""

import sys

import pytest

from benchmarks import __main__ as command


def test_the_list_imports_no_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    assert command.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == command.names() and all(len(line.split()) > 3 for line in lines)


def test_help_is_the_benchmarks_own_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["scheduler", "--help"])
    assert end.value.code == 0 and "--json" not in capsys.readouterr().out
    assert command.main(["flags", "--help"]) == 0
    assert "it takes no options" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "NAME --help" in capsys.readouterr().out


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.flags", None)
    assert command.main(["flags"]) == 2
    assert "flags needs the Python module benchmarks.flags" in capsys.readouterr().err
    assert command.main(["nothing"]) == 2
