"""What a person sees of a mesh that starts, loses a service, or cannot run here."""

import io
import sys

import pytest

from meshkit.cli import progress as module
from meshkit.cli.progress import LiveProgress, Progress, how_it_ended, open_progress
from meshkit.cli.screen import Screen
from meshkit.exit_codes import Exit, Problem
from meshkit.supervisor import ServiceEvent

SERVICES = ("scheduler", "worker", "gateway")


def plain(*, show_log: bool = False) -> Progress:
    return Progress(Screen(), SERVICES, show_log=show_log)


def test_one_line_per_change_aligned(capsys: pytest.CaptureFixture[str]):
    shown = plain()
    shown.event(ServiceEvent("scheduler", "started", 0.0, 11))
    shown.event(ServiceEvent("scheduler", "ready", 0.84, 11))
    shown.event(ServiceEvent("worker", "ready", 5.81, 12))
    assert capsys.readouterr().err == "scheduler   ready  0.8 s\nworker      ready  5.8 s\n"


def test_a_death_says_how_and_a_recovery_how_long(capsys: pytest.CaptureFixture[str]):
    shown = plain()
    shown.event(ServiceEvent("worker", "exited", 10.0, 12, -9, 0.0, ("a step",)))
    shown.event(ServiceEvent("worker", "exited", 10.5, 13, 1, 0.2, ("last words",)))
    shown.event(ServiceEvent("worker", "ready", 14.0, 14))
    assert capsys.readouterr().err.splitlines() == [
        "worker      killed by SIGKILL; restarting",
        "worker      exited with 1; restarting in 0.2 s",
        "worker    | last words",
        "worker      ready again after 4.0 s",
    ]


@pytest.mark.parametrize(("status", "why"), [(6, "a restart would not help"), (1, "it never got ready")])
def test_giving_up_says_why(status: int, why: str, capsys: pytest.CaptureFixture[str]):
    plain().event(ServiceEvent("worker", "gave_up", 1.0, 12, status))
    assert capsys.readouterr().err == f"worker      exited with {status}; given up: {why}\n"


@pytest.mark.parametrize(
    ("lines", "code", "fact"),
    [
        (("loading", "KEY  no such KV format", "  There is: auto"), "KEY", "worker: no such KV format"),
        (("Traceback:", "ValueError: 7", "this is a bug; please report"), "SERVICE", "worker: ValueError: 7"),
        ((), "SERVICE", "worker: exited with 3"),
    ],
)
def test_the_cause_of_a_failed_start_is_kept_for_the_end(lines: tuple[str, ...], code: str, fact: str):
    shown = plain()
    assert shown.cause is None
    shown.event(ServiceEvent("worker", "gave_up", 1.0, 12, 3, 0.0, lines))
    assert shown.cause == Problem(code, Exit.CONFIG, fact)


def test_a_restart_says_how_long_the_former_process_took_to_leave(capsys: pytest.CaptureFixture[str]):
    shown = plain()
    shown.finish_start()
    shown.event(ServiceEvent("gateway", "started", 8.0, 22))  # beside its predecessor
    shown.event(ServiceEvent("gateway", "leaving", 10.0, 12))
    shown.event(ServiceEvent("gateway", "ready", 10.0, 22))
    shown.event(ServiceEvent("gateway", "left", 12.5, 12, 0))
    shown.event(ServiceEvent("worker", "leaving", 13.0, 13))
    shown.event(ServiceEvent("worker", "left", 48.0, 13, -9))
    shown.event(ServiceEvent("worker", "started", 48.0, 23))
    shown.event(ServiceEvent("worker", "ready", 53.0, 23))
    assert capsys.readouterr().err.splitlines() == [
        "gateway     is restarted: finishes what it does",
        "gateway     ready again after 2.0 s",
        "gateway     left after 2.5 s",
        "worker      is restarted: finishes what it does",
        "worker      left after 35.0 s, killed by SIGKILL",
        "worker      ready again after 5.0 s",
    ]


def test_a_clean_stop_is_silent_and_a_forced_one_is_not(capsys: pytest.CaptureFixture[str]):
    shown = plain()
    shown.event(ServiceEvent("gateway", "stopped", 1.0, 12, 0))
    shown.event(ServiceEvent("worker", "stopped", 1.0, 12, -15))
    assert capsys.readouterr().err == ""
    shown.event(ServiceEvent("worker", "stopped", 1.0, 12, -9))
    assert capsys.readouterr().err == "worker      stopped: killed by SIGKILL\n"


def test_waiting_is_never_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    shown = plain()
    shown.event(ServiceEvent("gateway", "ready", 0.8))
    shown.line("worker", "weights 96.0/159.6 GB")
    shown.why["worker"] = "no worker is ready"
    now[0] += 4.9
    shown.tick()
    assert "waiting" not in capsys.readouterr().err
    now[0] += 0.2
    shown.tick()
    assert capsys.readouterr().err.splitlines() == [
        "waiting for scheduler, worker  5 s",
        "  worker: no worker is ready",
        "  worker: weights 96.0/159.6 GB",
    ]
    shown.finish_start()
    now[0] += 60
    shown.tick()
    assert capsys.readouterr().err == ""


def test_logs_are_prefixed_or_left_out(capsys: pytest.CaptureFixture[str]):
    plain(show_log=True).line("worker", "layers 1/5")
    plain().line("worker", "layers 1/5")
    assert capsys.readouterr().err == "worker    | layers 1/5\n"


def test_a_reader_that_went_away_is_no_error(monkeypatch: pytest.MonkeyPatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    plain(show_log=True).line("worker", "layers 1/5")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_live_table_that_goes_away(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with open_progress(Screen(), SERVICES, show_log=True) as shown:
        assert isinstance(shown, LiveProgress)
        shown.line("worker", "layers 1/5")
        shown.event(ServiceEvent("scheduler", "ready", 0.8))
        shown.finish_start()
        shown.event(ServiceEvent("worker", "exited", 9.0, 1, -9))
    text = terminal.getvalue()
    assert "layers 1/5" in text
    assert "killed by SIGKILL" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


def test_no_colour_or_no_terminal_means_plain_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    with open_progress(Screen(), SERVICES, show_log=True) as shown:
        assert type(shown) is Progress


def test_statuses_in_words():
    assert [how_it_ended(s) for s in (0, 6, -9, -250)] == [
        "exited with 0",
        "exited with 6",
        "killed by SIGKILL",
        "killed by signal 250",
    ]
