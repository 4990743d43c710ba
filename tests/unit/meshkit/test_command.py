"""The command line that every service shares: flags from fields, statuses from errors."""

from dataclasses import dataclass

import pytest

from meshkit.command import option, service_main
from meshkit.config import FieldError
from meshkit.errors import PeerError, QueueFull


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A service that does nothing."""

    name: str = option("x", "What it is called.")
    fast_mode: bool = option(False, "Faster.")
    size: int = option(1, "How large.")

    def __post_init__(self):
        if self.size > 10:
            raise FieldError("size", "at most 10")


def main(argv, run=lambda loaded: 0):
    return service_main(Config, "worker", run, argv)


def test_flags_reach_the_config(tmp_path, monkeypatch):
    file = tmp_path / "v4mesh.toml"
    file.write_text("[worker]\nsize = 5\n")
    seen = []
    assert main(["--config", str(file), "--name", "y", "--fast-mode"], lambda loaded: seen.append(loaded.value)) == 0
    monkeypatch.setenv("V4MESH_CONFIG", str(file))
    assert main(["--no-fast-mode"], lambda loaded: seen.append(loaded.value)) == 0
    assert seen == [Config(name="y", fast_mode=True, size=5), Config(size=5)]


@pytest.mark.parametrize(
    "error, status, text",
    [
        (PeerError("scheduler at x: refused"), 8, "PEER  scheduler at x: refused\n"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("oops"), 1, "ZeroDivisionError: oops"),
        (QueueFull("never a reason to end"), 1, "Traceback"),
    ],
)
def test_how_a_service_ends(capsys, error, status, text):
    def run(loaded):
        raise error

    assert main([], run) == status
    assert text in capsys.readouterr().err


def test_mistakes_on_the_command_line(capsys):
    assert main(["--sizee", "3"]) == 2
    assert main(["--size", "11"]) == 3
    assert "KEY  [worker] size = 11 (flag --size): at most 10" in capsys.readouterr().err


def test_help_lists_fields_with_defaults(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "--name VALUE" in out
    assert "What it is called. (default x)" in out
    assert "--fast-mode / --no-fast-mode" in out
