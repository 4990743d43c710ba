"""`--help`, `--help all`, `--help WORD` and the completion scripts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshkit.cli import services
from meshkit.cli.flag_table import FLAGS
from meshkit.cli.help_pages import MOST_OPTIONS
from meshkit.cli.main import COMMANDS, main
from meshkit.exit_codes import Exit

ROOT = Path(__file__).parents[2]
OWN = [name for name in COMMANDS if name not in services.PACKAGES]


def shown(args: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(args.split()) == 0
    return capsys.readouterr().out


def options(page: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", page, re.MULTILINE))


@pytest.mark.parametrize("name", OWN)
def test_the_first_page_is_short_and_all_has_more_or_the_same(name: str, capsys: pytest.CaptureFixture[str]):
    first, everything = options(shown(f"{name} --help", capsys)), options(shown(f"{name} --help all", capsys))
    assert len(first) <= MOST_OPTIONS
    assert first <= everything
    assert options(shown(f"{name} -h", capsys)) == first


def test_all_holds_every_flag_of_the_guide_and_the_first_page_those_in_effect(capsys: pytest.CaptureFixture[str]):
    first, everything = options(shown("serve --help", capsys)), options(shown("serve --help all", capsys))
    assert {e.name for e in FLAGS} <= everything
    assert {e.name for e in FLAGS if not e.needs} == first & {e.name for e in FLAGS}


@pytest.mark.parametrize("word", ["speculative", "EAGLE", "draft_model"])
def test_a_word_finds_options_hidden_or_not(word: str, capsys: pytest.CaptureFixture[str]):
    page = shown(f"serve --help {word}", capsys)
    assert "--speculative-eagle-model-path" in page
    assert "--port" not in page
    assert "15 more" in shown("serve --help", capsys)  # a search leaves the first page as it was


def test_a_word_that_finds_nothing_is_a_usage_error(capsys: pytest.CaptureFixture[str]):
    assert main(["up", "--help", "nonsense"]) == Exit.USAGE
    assert main(["--help", "nonsense"]) == Exit.USAGE
    assert capsys.readouterr().err.count("about 'nonsense'") == 2


def test_the_root_searches_all_commands(capsys: pytest.CaptureFixture[str]):
    page = shown("--help goodput", capsys)
    assert "v4mesh bench:" in page
    assert "--goodput-share" in page
    assert "v4mesh up:" not in page
    everything = shown("--help all", capsys)
    assert all(f"v4mesh {name}:" in everything for name in COMMANDS)
    assert shown("--help chat", capsys) == shown("chat --help", capsys)


def test_services_that_are_not_built_are_marked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(services.PACKAGES, "cache", "no_such_package")
    page = shown("--help", capsys)
    assert re.search(r"^  cache +\(not built yet\)", page, re.MULTILINE)
    assert not re.search(r"^  gateway +\(not built yet\)", page, re.MULTILINE)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_shells_script(shell: str, capsys: pytest.CaptureFixture[str]):
    script = shown(f"completion {shell}", capsys)
    assert f"{shell}_complete" in script
    assert "_V4MESH_COMPLETE" in script
    assert script.startswith("# ")


def test_completion_of_another_shell_is_a_usage_error():
    assert main(["completion", "tcsh"]) == Exit.USAGE


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("v4mesh c", {"chat", "config", "completion", "cache"}),
        ("v4mesh up --po", {"--port"}),
        ("v4mesh --j", {"--json"}),
    ],
)
def test_a_shell_is_told_what_fits(typed: str, expected: set[str]):
    words = typed.split()
    env = {**os.environ, "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1), "_V4MESH_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [sys.executable, "-m", "meshkit.cli"], env=env, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert {line.partition(",")[2] for line in done.stdout.split()} == expected, done.stderr
