"""Shows a mesh starting and running: one line per service that turns to ready, then one log stream.

On a terminal the lines are alive (rich); elsewhere one line per change and one every 5 s while something is awaited, so
that a log never looks dead. Writes to stderr only and decides nothing.
"""

import contextlib
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from meshkit.cli.screen import Screen
from meshkit.exit_codes import Exit, Problem, is_permanent
from meshkit.supervisor import ServiceEvent

if TYPE_CHECKING:
    from rich.table import Table

WAITING_EVERY_S = 5.0
REFUSAL = re.compile(r"([A-Z][A-Z_]+)  (\S.*)")
BUG_NOTE = "this is a bug"
COLORS = ("cyan", "yellow", "green")


class Progress:
    """Plain lines; the base of the live display."""

    def __init__(self, screen: Screen, services: Sequence[str], *, show_log: bool) -> None:
        self.screen = screen
        self.show_log = show_log
        self.width = max(len(s) for s in services)
        self.color = {s: COLORS[i % len(COLORS)] for i, s in enumerate(services)}
        self.state = dict.fromkeys(services, "starting")
        self.died_at: dict[str, float] = {}
        self.asked_at: dict[int, float] = {}  # processes that were asked to leave
        self.why: dict[str, str] = {}  # what a service's probe was told last
        self.last_line: dict[str, str] = {}
        self.words: dict[str, tuple[str, ...]] = {}
        self.cause: Problem | None = None  # why everything ends, once a service has given up
        self.t0 = time.monotonic()
        self._said_at = self.t0
        self._starting = True

    def event(self, event: ServiceEvent) -> None:
        """Say what became of a service."""
        name = event.service
        match event.kind:
            case "started":
                if not self._starting and self.state[name] != "restarting":  # by request; who died is timed from there
                    self.died_at[name] = event.at_s
                self.state[name] = "starting"
            case "ready":
                self.state[name] = f"ready  {event.at_s:.1f} s"
                since = self.died_at.pop(name, None)
                self._service(name, f"ready again after {event.at_s - since:.1f} s" if since else self.state[name])
            case "leaving":
                self.state[name] = "leaving"
                self.asked_at[event.pid] = event.at_s
                self._service(name, "is restarted: finishes what it does")
            case "left":
                took = event.at_s - self.asked_at.pop(event.pid, event.at_s)
                how = "" if event.status == 0 else f", {how_it_ended(event.status)}"
                self._service(name, f"left after {took:.1f} s{how}", "yellow" if how else "")
            case "exited":
                self.state[name] = "restarting"
                self.died_at.setdefault(name, event.at_s)
                pause = f" in {event.restart_in_s:g} s" if event.restart_in_s else ""
                self._service(name, f"{how_it_ended(event.status)}; restarting{pause}", "yellow")
                self._last_words(event)
            case "gave_up":
                self.state[name] = "failed"
                why = "a restart would not help" if is_permanent(event.status) else "it never got ready"
                self._service(name, f"{how_it_ended(event.status)}; given up: {why}", "red")
                self._last_words(event)
                self.cause = cause_of(event)
            case "stopped":
                self.state[name] = "stopped"
                if event.status not in (0, -signal.SIGTERM):
                    self._service(name, f"stopped: {how_it_ended(event.status)}", "yellow")

    def line(self, service: str, text: str) -> None:
        """One line a service wrote."""
        self.last_line[service] = text
        if self.show_log:
            self.write(f"{self.screen.paint(f'{service:{self.width}}', self.color[service])} | {text}")

    def note(self, service: str, text: str) -> None:
        """What somebody else has noticed about a service."""
        self._service(service, text, "yellow")

    def tick(self) -> None:
        """Called often; says what is awaited when nothing was said for a while."""
        if self._starting and time.monotonic() - self._said_at >= WAITING_EVERY_S:
            waiting = [s for s, state in self.state.items() if not state.startswith("ready")]
            self.write(f"waiting for {', '.join(waiting)}  {time.monotonic() - self.t0:.0f} s")
            for name in waiting:
                for said in (self.why.get(name), None if self.show_log else self.last_line.get(name)):
                    if said:
                        self.write(f"  {name}: {said}")

    def finish_start(self) -> None:
        """Everything is ready for the first time."""
        self._starting = False

    def write(self, text: str) -> None:
        """One line to stderr. A reader that went away (`| head`) must not stop the mesh, nor block a service's pipe."""
        self._said_at = time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            self.screen.note(text)

    def _service(self, name: str, text: str, style: str = "") -> None:
        said = self.screen.paint(text, style) if style else text
        self.write(f"{self.screen.paint(f'{name:{self.width}}', self.color[name])}   {said}")

    def _last_words(self, event: ServiceEvent) -> None:
        """A dead service's last lines, where its log was not shown anyway; the same words only once.

        Who was killed from outside had nothing to say about it.
        """
        killed = event.status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
        if self.show_log or killed or event.last_lines == self.words.get(event.service):
            return
        self.words[event.service] = event.last_lines
        for line in event.last_lines:
            self.write(f"{event.service:{self.width}} | {line}")


class LiveProgress(Progress):
    """The same on a terminal: a small table that changes in place while starting, logs scroll above it."""

    def __init__(self, screen: Screen, services: Sequence[str], *, show_log: bool) -> None:
        super().__init__(screen, services, show_log=show_log)
        from rich.console import Console
        from rich.live import Live

        self._live: Live | None = Live(
            console=Console(stderr=True), get_renderable=self._table, refresh_per_second=8, transient=True
        )
        self._live.start()

    def write(self, text: str) -> None:
        """Above the table while it is there."""
        if self._live is None:
            super().write(text)
            return
        from rich.text import Text

        self._live.console.print(Text.from_ansi(text), soft_wrap=True)

    def tick(self) -> None:
        """The table shows what is awaited."""

    def finish_start(self) -> None:
        """Take the table away: its lines have been written above."""
        super().finish_start()
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> "Table":
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 3))
        for name, state in self.state.items():
            if not state.startswith("ready"):
                said = self.last_line.get(name, "")
                seconds = f"{state}  {time.monotonic() - self.t0:.0f} s"
                table.add_row(
                    name, Spinner("dots", seconds), Text(said, style="dim", no_wrap=True, overflow="ellipsis")
                )
        return table


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def cause_of(event: ServiceEvent) -> Problem:
    """Why a service cannot run here: the refusal among its last lines (`CODE  fact`), else the last of them."""
    status = Exit(event.status) if event.status in set(Exit) and event.status else Exit.BUG
    lines = [line for line in event.last_lines if line.strip() and not line.startswith(BUG_NOTE)]
    for line in reversed(lines):
        if found := REFUSAL.match(line):
            return Problem(found[1], status, f"{event.service}: {found[2]}")
    said = lines[-1].strip() if lines else how_it_ended(event.status)
    return Problem("SERVICE", status, f"{event.service}: {said}")


@contextlib.contextmanager
def open_progress(screen: Screen, services: Sequence[str], *, show_log: bool) -> Iterator[Progress]:
    """The live display on a terminal, plain lines elsewhere."""
    if not (sys.stderr.isatty() and screen.colors(sys.stderr)):
        yield Progress(screen, services, show_log=show_log)
        return
    progress = LiveProgress(screen, services, show_log=show_log)
    try:
        yield progress
    finally:
        progress.close()
