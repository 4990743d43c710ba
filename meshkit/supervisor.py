"""Runs services as child processes: spawns, watches, restarts with back-off, relays logs, stops cleanly.

Knows command lines and exit statuses, nothing of what a service does: readiness is a probe handed in per service. A
child that dies is restarted, unless its status says that a restart cannot help (`exit_codes.PERMANENT`) or it dies over
and over; then everything stops and `run` returns that child's status. Children never outlive this process, not even
when it is killed with SIGKILL: on Linux the kernel kills them with it. Each child leads its own session, so that Ctrl-C
in a terminal reaches the supervisor alone, which stops them in order, last started first.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshkit.exit_codes import Exit, is_permanent

PR_SET_PDEATHSIG = 1
BACKOFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # before the n-th restart in a row
STEADY_S = 30.0  # a child that lived this long starts a new row
GIVE_UP_AFTER = 6  # deaths in a row without a ready moment in between
STOP_S = 4.5  # for all children together, when a stop was asked for
LEAST_DRAIN_S = 0.3  # what slow children must leave for each one that stops after them
KEPT_LINES = 12  # last words of each child, shown when it fails for good
LONGEST_LINE = 16_384  # bytes; longer lines arrive in pieces

Probe = Callable[[], Awaitable[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One child: what to run and how to know that it serves. It inherits our environment."""

    name: str
    argv: tuple[str, ...]
    probe: Probe | None = None
    probe_every_s: float = 0.1
    drain_s: float = 1.5  # most seconds between SIGTERM and SIGKILL
    rest_s: float = 0.0  # least seconds before a restart: where a standby takes over, it has the processor first


@dataclass(frozen=True, slots=True)
class ServiceEvent:
    """A change of one child. `status` is its exit status (negative: killed by that signal)."""

    service: str
    kind: Literal["started", "ready", "exited", "gave_up", "stopped"]
    at_s: float  # since the supervisor started
    pid: int = 0
    status: int = 0
    restart_in_s: float = 0.0
    last_lines: tuple[str, ...] = ()


@dataclass(slots=True)
class Child:
    """The supervisor's view of one service."""

    spec: ServiceSpec
    process: Process | None = None
    ready: bool = False
    deaths_in_a_row: int = 0
    started_at: float = 0.0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))


def _death_pact() -> Callable[[], None] | None:
    """What a child runs between fork and exec so that the kernel kills it when we die; None without prctl."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def sign() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # we died before the pact held
            os._exit(1)

    return sign


class Supervisor:
    """Owns the children from `run` until it returns; use once."""

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        *,
        on_event: Callable[[ServiceEvent], None],
        on_line: Callable[[str, str], None],
        stop_s: float = STOP_S,
        together: bool = False,
        steady_s: float = STEADY_S,
    ) -> None:
        """`on_event` and `on_line(service, text)` are called on the event loop and must return at once.

        `stop_s` is what a stop may take for all children; `together`: they are stopped at once instead of in order.
        A child that lived for `steady_s` is restarted without a pause.
        """
        self.children = {spec.name: Child(spec) for spec in specs}
        self.on_event = on_event
        self.on_line = on_line
        self._stop_s, self._together, self._steady_s = stop_s, together, steady_s
        self.all_ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._kill_now = asyncio.Event()
        self._status = int(Exit.OK)
        self._t0 = time.monotonic()

    async def run(self) -> int:
        """Start everything, keep it running until `stop`, then stop it. Returns the exit status to end with."""
        pact = _death_pact()
        watches = [asyncio.create_task(self._keep(child, pact)) for child in self.children.values()]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([stopping, *watches], return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            await self._stop_children()
        finally:
            for task in (stopping, *watches):
                task.cancel()
            results = await asyncio.gather(*watches, return_exceptions=True)
            self._kill_leftovers()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return self._status

    def stop(self) -> None:
        """Ask for a clean stop; the second call kills at once."""
        if self._stopping.is_set():
            self._kill_now.set()
        self._stopping.set()

    def pids(self) -> dict[str, int]:
        """The living children."""
        return {n: c.process.pid for n, c in self.children.items() if c.process and c.process.returncode is None}

    async def _keep(self, child: Child, pact: Callable[[], None] | None) -> None:
        """Run one child again and again until it may not or need not be restarted."""
        while not self._stopping.is_set():
            process = await self._spawn(child, pact)
            probing = asyncio.create_task(self._probe(child))
            reading = asyncio.create_task(self._relay(child, process))
            status = await process.wait()
            probing.cancel()
            self._kill_group(process)  # a grandchild would hold the pipe open after its parent is gone
            await asyncio.wait([reading], timeout=0.5)
            reading.cancel()
            if self._stopping.is_set():
                self._say(child, "stopped", status=status)
                return
            delay = self._after_death(child, status)
            if delay is None:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    def _after_death(self, child: Child, status: int) -> float | None:
        """Seconds until the restart, or None when this death ends the mesh."""
        lived = time.monotonic() - child.started_at
        child.deaths_in_a_row = 1 if child.ready and lived >= self._steady_s else child.deaths_in_a_row + 1
        was_ready, child.ready = child.ready, False
        self.all_ready.clear()
        hopeless = is_permanent(status) or status == Exit.USAGE
        if hopeless or (not was_ready and child.deaths_in_a_row >= GIVE_UP_AFTER):
            self._status = status if 0 < status < 10 else int(Exit.BUG)
            self._say(child, "gave_up", status=status, last_lines=tuple(child.lines))
            return None
        delay = max(child.spec.rest_s, BACKOFF_S[min(child.deaths_in_a_row, len(BACKOFF_S)) - 1])
        self._say(child, "exited", status=status, restart_in_s=delay, last_lines=tuple(child.lines))
        return delay

    async def _spawn(self, child: Child, pact: Callable[[], None] | None) -> Process:
        child.lines.clear()
        child.started_at = time.monotonic()
        child.process = await asyncio.create_subprocess_exec(
            *child.spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=pact,
        )
        self._say(child, "started")
        return child.process

    async def _probe(self, child: Child) -> None:
        if child.spec.probe is None:
            self._mark_ready(child)
            return
        while not await child.spec.probe():  # noqa: ASYNC110 - another process's state: there is only asking
            await asyncio.sleep(child.spec.probe_every_s)
        self._mark_ready(child)

    def _mark_ready(self, child: Child) -> None:
        child.ready = True
        self._say(child, "ready")
        if all(c.ready for c in self.children.values()):
            self.all_ready.set()

    async def _relay(self, child: Child, process: Process) -> None:
        """Pass the child's output on, line by line; a line longer than LONGEST_LINE comes in pieces."""
        assert process.stdout is not None
        held = b""
        while chunk := await process.stdout.read(65_536):
            *lines, held = (held + chunk).split(b"\n")
            if len(held) > LONGEST_LINE:
                lines, held = [*lines, held], b""
            for line in lines:
                self._line(child, line)
        if held:
            self._line(child, held)

    def _line(self, child: Child, raw: bytes) -> None:
        text = raw.decode("utf-8", "replace").rstrip("\r")
        child.lines.append(text)
        self.on_line(child.spec.name, text)

    async def _stop_children(self) -> None:
        """SIGTERM in reverse start order, each with time to drain; SIGKILL to whoever needs longer."""
        living = [c for c in reversed(self.children.values()) if c.process and c.process.returncode is None]
        end = time.monotonic() + self._stop_s
        if self._together:
            for child in living:
                _terminate(child)
        for after, child in zip(reversed(range(len(living))), living, strict=True):
            assert child.process is not None
            if not self._together:
                _terminate(child)
            left_s = max(LEAST_DRAIN_S, end - time.monotonic() - after * LEAST_DRAIN_S)
            waits = [asyncio.create_task(child.process.wait()), asyncio.create_task(self._kill_now.wait())]
            await asyncio.wait(waits, timeout=min(child.spec.drain_s, left_s), return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
            self._kill_group(child.process)
        for child in living:
            assert child.process is not None
            await child.process.wait()

    def _kill_leftovers(self) -> None:
        """Whatever made `run` end, no child is left behind."""
        for child in self.children.values():
            if child.process is not None:
                self._kill_group(child.process)

    def _kill_group(self, process: Process) -> None:
        """Kill a child with everything it started; its session id is its pid."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def _say(
        self,
        child: Child,
        kind: Literal["started", "ready", "exited", "gave_up", "stopped"],
        *,
        status: int = 0,
        restart_in_s: float = 0.0,
        last_lines: tuple[str, ...] = (),
    ) -> None:
        pid = child.process.pid if child.process else 0
        at_s = time.monotonic() - self._t0
        self.on_event(ServiceEvent(child.spec.name, kind, at_s, pid, status, restart_in_s, last_lines))


def _terminate(child: Child) -> None:
    assert child.process is not None
    with contextlib.suppress(ProcessLookupError):
        child.process.terminate()
