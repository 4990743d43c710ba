"""Runs services as child processes: spawns, watches, restarts with back-off, relays logs, stops cleanly.

Knows command lines and exit statuses, nothing of what a service does: readiness is a probe handed in per service. A
child that dies is restarted, unless its status says that a restart cannot help (`exit_codes.PERMANENT`) or it dies over
and over; then everything stops and `run` returns that child's status. `restart` replaces one child by a fresh process:
after it, or, where both may serve at once, beside it. Children never outlive this process, not even
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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshkit.exit_codes import Exit, is_permanent

PR_SET_PDEATHSIG = 1
BACKOFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # before the n-th restart in a row
STEADY_S = 30.0  # a child that lived this long starts a new row
GIVE_UP_AFTER = 6  # deaths in a row without a ready moment in between
STOP_S = 4.5  # for all children together, when a stop was asked for
LEAST_DRAIN_S = 0.3  # what slow children must leave for each one that stops after them
ENDED_EVERY_S = 0.1  # between two looks whether a child has ended
KEPT_LINES = 12  # last words of each child, shown when it fails for good
LONGEST_LINE = 16_384  # bytes; longer lines arrive in pieces
BESIDE_S = 120.0  # a successor that serves beside its predecessor is ready by then, or is not wanted
FINISH_S = 3_600.0  # for a process whose successor serves: it is in nobody's way
LAST_WORDS_S = 0.5  # to read what an ended process has written
FAREWELL_S = 5.0  # to say so to clients, for a process that was given all its time to finish

Probe = Callable[[], Awaitable[bool]]
Kind = Literal["started", "ready", "exited", "gave_up", "stopped", "leaving", "left"]


class RestartError(Exception):
    """A child could not be replaced; says which and why. What served before goes on where it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One child: what to run and how to know that it serves. It inherits our environment."""

    name: str
    argv: tuple[str, ...]
    probe: Probe | None = None
    probe_every_s: float = 0.1
    drain_s: float = 1.5  # most seconds between SIGTERM and SIGKILL
    rest_s: float = 0.0  # least seconds before a restart: where a standby takes over, it has the processor first
    beside: bool = False  # told --ready-fd N, where it says that it serves; its successor starts before it leaves
    retire: int = signal.SIGTERM  # leave when all is done; a SIGTERM after it: at once
    passed: tuple[int, ...] = ()  # file descriptors that it inherits, by the same numbers
    settled: Probe | None = None  # after a restart: whether the next process may be restarted
    stops_with: str = ""  # a word that children share of which none may take over while the others stop


@dataclass(frozen=True, slots=True)
class ServiceEvent:
    """A change of one child. `status` is its exit status (negative: killed by that signal)."""

    service: str
    kind: Kind
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
    leaving: list[Process] = field(default_factory=list)  # they finish beside `process`
    ready: bool = False
    asked: bool = False  # its end was asked for
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
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_event` and `on_line(service, text)` are called on the event loop and must return at once.

        `stop_s` is what a stop may take for all children; `together`: they are stopped at once instead of in order.
        A child that lived for `steady_s` is restarted without a pause. `on_stop` is called once, before the first child
        is asked to leave for good.
        """
        self.children = {spec.name: Child(spec) for spec in specs}
        self.on_event = on_event
        self.on_line = on_line
        self._stop_s, self._together, self._steady_s, self._on_stop = stop_s, together, steady_s, on_stop
        self.all_ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._kill_now = asyncio.Event()
        self._pressed = asyncio.Event()
        self._retiring = False
        self._pact = _death_pact()
        self._watches: list[asyncio.Task[None]] = []
        self._restarting = asyncio.Lock()
        self._status = int(Exit.OK)
        self._t0 = time.monotonic()

    async def run(self) -> int:
        """Start everything, keep it running until `stop`, then stop it. Returns the exit status to end with."""
        for child in self.children.values():
            self._watch(self._keep(child))
        try:
            await self._stopping.wait()
            self._on_stop()
            await self._stop_children()
            if self._watches:
                await asyncio.wait(self._watches, timeout=LAST_WORDS_S)
        finally:
            watches = self._watches.copy()
            for task in watches:
                task.cancel()
            results = await asyncio.gather(*watches, return_exceptions=True)
            self._kill_leftovers()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return self._status

    def _watch(self, keeping: Coroutine[object, object, None]) -> None:
        """Run it beside everything else; an error in it ends everything."""

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and task.exception() is not None:
                self._stopping.set()
            else:
                self._watches.remove(task)

        task = asyncio.create_task(keeping)
        task.add_done_callback(ended)
        self._watches.append(task)

    def stop(self) -> None:
        """Ask for a clean stop; the second call kills at once."""
        if self._retiring:
            self._retiring = False
            self._pressed.set()
        elif self._stopping.is_set():
            self._kill_now.set()
        self._stopping.set()

    def retire(self) -> None:
        """End when all children have finished what they do, however long that takes; `stop` after it presses them."""
        self._retiring = not self._stopping.is_set()
        self._stopping.set()

    def pids(self) -> dict[str, int]:
        """The living children."""
        return {n: c.process.pid for n, c in self.children.items() if c.process and c.process.returncode is None}

    async def restart(self, name: str, leave_s: float) -> bool:
        """Replace a child by a fresh process, and return when that is ready and the former one has left.

        The former one has `leave_s` seconds to finish what it does; beside its successor it may take longer, and then
        this returns False and leaves it to that. One after the other, whoever asks. Raises RestartError.
        """
        async with self._restarting:
            child = self.children[name]
            if self._stopping.is_set():
                raise RestartError(f"{name} is not restarted: the mesh stops")
            if child.process is None or child.process.returncode is not None:
                raise RestartError(f"{name} is not running: it is restarted already")
            left = True
            if child.spec.beside:
                left = await self._replace(child, leave_s)
            else:
                await self._renew(child, leave_s)
            settled = child.spec.settled
            while settled and not self._stopping.is_set() and not await settled():  # noqa: ASYNC110 - a child's state
                await asyncio.sleep(child.spec.probe_every_s)
            return left

    async def _renew(self, child: Child, leave_s: float) -> None:
        """Leave first, start then."""
        process, child.asked = child.process, True
        assert process is not None
        self._say(child, "leaving")
        await self._let_leave(process, child.spec.retire, leave_s)
        while child.process is process or not child.ready:
            if self._stopping.is_set():
                raise RestartError(f"{child.spec.name} does not come back: the mesh stops")
            await asyncio.sleep(0.02)

    async def _replace(self, child: Child, leave_s: float) -> bool:
        """Start first, leave then: both serve for a while. Returns whether the former has left in time."""
        told, says = os.pipe()
        try:
            successor = await self._start(child, ready_fd=says)
        finally:
            os.close(says)
        child.leaving.append(successor)  # until it is wanted: a stop ends it with the others
        reading = asyncio.create_task(self._relay(child, successor))
        serves = await _hears(told, BESIDE_S)
        child.leaving.remove(successor)
        if not serves:
            self._kill_group(successor)
            await successor.wait()
            await self._end_reading(reading)
            raise RestartError(f"{child.spec.name}: its successor did not get ready; the former process goes on")
        former, child.process = child.process, successor
        assert former is not None
        child.leaving.append(former)
        child.started_at, child.deaths_in_a_row = time.monotonic(), 0
        self._watch(self._keep(child, successor, reading))
        self._say(child, "leaving", process=former)
        self._watch(self._let_leave(former, child.spec.retire, FINISH_S))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(former.wait(), leave_s)
        return former.returncode is not None

    async def _let_leave(self, process: Process, signal_number: int, leave_s: float) -> None:
        """Ask once; where it takes too long, press; then end it."""
        for number, wait_s in ((signal_number, leave_s), (signal.SIGTERM, FAREWELL_S)):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            waits = [asyncio.create_task(process.wait()), asyncio.create_task(self._stopping.wait())]
            await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
            if self._stopping.is_set():  # the stop is in charge of it
                return
            if process.returncode is not None:
                return
        self._kill_group(process)
        await process.wait()

    async def _keep(
        self, child: Child, running: Process | None = None, reading: "asyncio.Task[None] | None" = None
    ) -> None:
        """Run one child again and again until it may not or need not be restarted.

        `running`: it has been started already, is ready, and `reading` relays what it says.
        """
        while not self._stopping.is_set():
            process, probing = running, None
            if process is None:
                process = child.process = await self._start(child)
                probing = asyncio.create_task(self._probe(child))
                reading = asyncio.create_task(self._relay(child, process))
            else:
                self._mark_ready(child)
            assert reading is not None
            status = await _ended(process)
            if probing is not None:
                probing.cancel()
            self._kill_group(process)  # a grandchild would hold the pipe open after its parent is gone
            await self._end_reading(reading)
            running = None
            if self._stopping.is_set():
                self._say(child, "stopped", status=status, process=process)
                return
            if process in child.leaving:
                child.leaving.remove(process)
                self._say(child, "left", status=status, process=process)
                return
            delay = self._after_death(child, status)
            if delay is None:
                self._stopping.set()
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _end_reading(self, reading: "asyncio.Task[None]") -> None:
        """The last words of a process that has ended."""
        await asyncio.wait([reading], timeout=LAST_WORDS_S)
        reading.cancel()

    def _after_death(self, child: Child, status: int) -> float | None:
        """Seconds until the restart, or None when this death ends the mesh."""
        lived = time.monotonic() - child.started_at
        child.deaths_in_a_row = 1 if child.ready and lived >= self._steady_s else child.deaths_in_a_row + 1
        was_ready, child.ready = child.ready, False
        self.all_ready.clear()
        if child.asked:
            child.asked, child.deaths_in_a_row = False, 0
            self._say(child, "left", status=status)
            return child.spec.rest_s
        hopeless = is_permanent(status) or status == Exit.USAGE
        if hopeless or (not was_ready and child.deaths_in_a_row >= GIVE_UP_AFTER):
            self._status = status if 0 < status < 10 else int(Exit.BUG)
            self._say(child, "gave_up", status=status, last_lines=tuple(child.lines))
            return None
        delay = max(child.spec.rest_s, BACKOFF_S[min(child.deaths_in_a_row, len(BACKOFF_S)) - 1])
        self._say(child, "exited", status=status, restart_in_s=delay, last_lines=tuple(child.lines))
        return delay

    async def _start(self, child: Child, ready_fd: int = -1) -> Process:
        """A process of a child. It says that it serves at `ready_fd`, if that is given."""
        argv, passed = child.spec.argv, child.spec.passed
        if ready_fd >= 0:
            argv, passed = (*argv, "--ready-fd", str(ready_fd)), (*passed, ready_fd)
        else:
            child.lines.clear()
            child.started_at = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=self._pact,
            pass_fds=passed,
        )
        self._say(child, "started", process=process)
        return process

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
        pairs = ((c, p) for c in reversed(self.children.values()) for p in (*c.leaving, c.process))
        living = [(child, process) for child, process in pairs if process and process.returncode is None]
        if self._retiring:
            for child, process in living:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(child.spec.retire)
            ends = asyncio.gather(*(process.wait() for _, process in living))
            pressed = asyncio.create_task(self._pressed.wait())
            await asyncio.wait((ends, pressed), return_when=asyncio.FIRST_COMPLETED)
            pressed.cancel()
            ends.cancel()
            living = [(child, process) for child, process in living if process.returncode is None]
        end, asked = time.monotonic() + self._stop_s, set[Process]()
        for after, (child, process) in zip(reversed(range(len(living))), living, strict=True):
            for now in {it for other, it in living if self._stops_with(child, other)} - asked:
                _terminate(now)
                asked.add(now)
            left_s = max(LEAST_DRAIN_S, end - time.monotonic() - after * LEAST_DRAIN_S)
            waits = [asyncio.create_task(process.wait()), asyncio.create_task(self._kill_now.wait())]
            await asyncio.wait(waits, timeout=min(child.spec.drain_s, left_s), return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
            self._kill_group(process)
        for _, process in living:
            await process.wait()

    def _stops_with(self, child: Child, other: Child) -> bool:
        """Whether both are asked to leave at the same moment."""
        return self._together or other is child or "" != child.spec.stops_with == other.spec.stops_with

    def _kill_leftovers(self) -> None:
        """Whatever made `run` end, no child is left behind."""
        for child in self.children.values():
            for process in (*child.leaving, child.process):
                if process is not None:
                    self._kill_group(process)

    def _kill_group(self, process: Process) -> None:
        """Kill a child with everything it started; its session id is its pid."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def _say(
        self,
        child: Child,
        kind: Kind,
        *,
        process: Process | None = None,
        status: int = 0,
        restart_in_s: float = 0.0,
        last_lines: tuple[str, ...] = (),
    ) -> None:
        process = process or child.process
        pid = process.pid if process else 0
        at_s = time.monotonic() - self._t0
        self.on_event(ServiceEvent(child.spec.name, kind, at_s, pid, status, restart_in_s, last_lines))


async def _ended(process: Process) -> int:
    """The status of a process once it has ended. `wait` alone also waits for what it started, which has the pipe."""
    waiting = asyncio.create_task(process.wait())
    try:
        while not waiting.done() and process.returncode is None:
            await asyncio.wait([waiting], timeout=ENDED_EVERY_S)
    finally:
        waiting.cancel()
    assert process.returncode is not None
    return process.returncode


def _terminate(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


async def _hears(pipe: int, limit_s: float) -> bool:
    """Whether somebody writes to a pipe before all its writers are gone or the time is over. Closes it."""
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe, heard.set)
    try:
        async with asyncio.timeout(limit_s):
            await heard.wait()
        return bool(os.read(pipe, 1))
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pipe)
        os.close(pipe)
