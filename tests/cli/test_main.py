"""The root of the command line: fast help, shared options, and how errors end a process."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from meshkit.cli import main as cli
from meshkit.cli import services
from meshkit.cli.main import COMMANDS, main
from meshkit.errors import ConfigError
from meshkit.exit_codes import Exit

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "grpc", "rich", "numpy", "aiohttp", "asyncio")


def test_help_loads_nothing_heavy_and_is_quick():
    code = (
        "import sys; from meshkit.cli.main import main; status = main(['--help']);"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(status)"
    )
    costs = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.stderr.strip() == "[]"
    assert all(name in done.stdout for name in COMMANDS)
    assert min(costs) <= 0.150  # of processor time: wall-clock time on a busy machine says nothing


@pytest.mark.parametrize(
    "args",
    [
        ["chat", "--help"],
        ["bench", "--help"],
        ["health", "gateway", "--target", "127.0.0.1:9"],
        ["completion", "bash"],
        ["nonsense"],
    ],
)
def test_light_commands_load_nothing_heavy(args: list[str]):
    code = (
        f"import sys; from meshkit.cli.main import main; main({args!r});"
        "sys.exit([m for m in ('torch', 'numpy', 'grpc', 'rich', 'aiohttp') if m in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_loads_and_is_listed(name: str, capsys: pytest.CaptureFixture[str]):
    context = cli.root.make_context("v4mesh", [name], resilient_parsing=True)
    command = cli.root.get_command(context, name)
    assert command is not None
    assert command.name == name


def test_a_mistyped_command_names_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert main(["chta"]) == Exit.USAGE
    assert "Did you mean 'chat'?" in capsys.readouterr().err


def test_a_mistyped_option_is_a_usage_error_that_points_at_help(capsys: pytest.CaptureFixture[str]):
    assert main(["up", "--prot", "1"]) == Exit.USAGE
    err = capsys.readouterr().err
    assert "--port" in err
    assert "v4mesh up --help" in err


def test_underscores_are_accepted_in_flags(capsys: pytest.CaptureFixture[str]):
    assert main(["up", "--launcher", "print", "--served_model_name", "fox"]) == 0
    assert "--served-model-name fox" in capsys.readouterr().out


@pytest.mark.parametrize("place", [["--json", "up"], ["up", "--json"]])
def test_errors_as_json_wherever_the_flag_stands(place: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*place, "--model-path", "/nonexistent/model"]) == Exit.MODEL
    out = json.loads(capsys.readouterr().out)
    assert out["schema_version"] == 1
    assert [(e["code"], e["exit"]) for e in out["errors"]] == [("MODEL_DIR", 6)]


def test_a_config_error_ends_with_its_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def fail(*args: object, **flags: object) -> None:
        raise ConfigError("unknown option prot in [up] (v4mesh.toml:2). Nearest: port")

    monkeypatch.setattr("meshkit.cli.health.ask", fail)
    assert main(["health", "gateway"]) == Exit.CONFIG
    assert capsys.readouterr().err == "KEY  unknown option prot in [up] (v4mesh.toml:2). Nearest: port\n"


@pytest.mark.parametrize(("flags", "traceback"), [([], False), (["-v"], True)])
def test_a_bug_is_one_screen_and_a_traceback_only_with_v(
    flags: list[str], traceback: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: object, **flags: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("meshkit.cli.health.ask", fail)
    assert main([*flags, "health", "gateway"]) == Exit.BUG
    err = capsys.readouterr().err
    assert "BUG  ZeroDivisionError: by zero" in err
    assert ("Traceback" in err) == traceback


def test_colours_only_where_they_belong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    main(["chta"])
    assert "\x1b[31m" in capsys.readouterr().err
    monkeypatch.setenv("NO_COLOR", "1")
    main(["chta"])
    assert "\x1b" not in capsys.readouterr().err


def test_output_into_a_closed_pipe_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m meshkit.cli --help | true",
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stderr == ""


def test_a_service_that_is_not_there_is_said_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(services.PACKAGES, "cache", "no_such_package")
    assert main(["cache", "--listen", "unix:/x"]) == Exit.USAGE
    assert "cache service is not part of this version yet" in capsys.readouterr().err
