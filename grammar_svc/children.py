"""The pool of compile processes: a warm spare takes over when one is killed, so nobody waits for an import.

A compile is killed at `hard_s` of wall time, or at `soft_s` when others wait for a process. A process that dies (limit
or crash) costs its own compile alone and is replaced in the background. Starting one takes about 2.5 s.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from grammar_svc.child import LENGTHS, pack
from grammar_svc.sources import Source
from grammar_svc.verdict import Outcome, SourceError
from meshkit.config import environment
from meshkit.errors import StartError
from meshkit.obs import kv

START_S: Final = 60.0
RESTART_S: Final = 1.0  # pause before a process that could not start is tried again
POLL_S: Final = 0.05

log = logging.getLogger(__name__)


class ChildError(Exception):
    """The compile ended without an answer; `outcome` is TIMEOUT, CRASHED or TOO_LARGE."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    """What one compile may use. Bytes are on top of what the imports take."""

    at_once: int = 2
    spares: int = 1
    soft_s: float = 2.0
    hard_s: float = 10.0
    memory_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Compiled:
    """Of a source that compiles: its size in memory, and the wall time it took (microseconds)."""

    memory: int
    micros: int


@dataclass(slots=True, eq=False)
class _Child:
    process: asyncio.subprocess.Process
    grammar_rev: str = ""
    served: int = 0
    killed_for: str = field(default="")

    def kill(self, why: str) -> None:
        if self.process.returncode is None:
            self.killed_for = why
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


class Children:
    """`await start()` first; `compile` from any task; `stop` at the end."""

    def __init__(
        self,
        model: Path,
        limits: ChildLimits,
        *,
        vocab_size: int = 0,
        eos_ids: tuple[int, ...] = (),
        whitespace: int = 1,
    ) -> None:
        self._setup: dict[str, Any] = {
            "model": str(model),
            "vocab_size": vocab_size,
            "eos_ids": eos_ids,
            "memory_bytes": limits.memory_bytes,
            "whitespace": whitespace,
        }
        self.limits = limits
        self._idle: asyncio.LifoQueue[_Child] = asyncio.LifoQueue()  # the spare stays cold, the others stay warm
        self._alive: set[_Child] = set()
        self._running = asyncio.Semaphore(limits.at_once)
        self._starting: set[asyncio.Task[None]] = set()
        self._stopped = False
        self.waiting = 0
        self.deaths = 0

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._alive]

    async def start(self, processes: int = 0) -> str:
        """Have so many processes, 0 for all, those that run counted; returns their `grammar_rev` once one serves."""
        wanted = processes or self.limits.at_once + self.limits.spares
        for _ in range(wanted - len(self._alive)):
            self._replace()
        getter = asyncio.create_task(self._idle.get())
        done, _ = await asyncio.wait((getter, *self._starting), return_when=asyncio.FIRST_COMPLETED, timeout=START_S)
        for task in done - {getter}:
            if not task.cancelled() and (error := task.exception()) is not None:
                getter.cancel()
                raise error
        child = await asyncio.wait_for(getter, START_S)
        self._idle.put_nowait(child)
        return child.grammar_rev

    async def stop(self) -> None:
        """Kill every process; compiles under way end as CRASHED."""
        self._stopped = True
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for child in list(self._alive):
            child.kill("the service stops")
            await child.process.wait()
        self._alive.clear()

    async def compile(self, source: Source) -> Compiled:
        """Raises SourceError when the compiler refuses the source, ChildError when the process did not answer."""
        self.waiting += 1
        try:
            await self._running.acquire()
        finally:
            self.waiting -= 1
        try:
            child = await self._take()
            try:
                return await self._ask(child, source)
            finally:
                await self._put_back(child)
        finally:
            self._running.release()

    async def _take(self) -> _Child:
        while True:
            child = await self._idle.get()
            if child.process.returncode is None:
                return child
            self._lost(child)

    async def _put_back(self, child: _Child) -> None:
        # An answer half read, or a caller that went away: such a process cannot be used again.
        if child.process.returncode is None and not child.killed_for and child.served >= 0:
            self._idle.put_nowait(child)
            return
        child.kill("unusable")
        await child.process.wait()
        self._lost(child)

    def _lost(self, child: _Child) -> None:
        self._alive.discard(child)
        self.deaths += 1
        log.info("compile process gone", extra=kv(state=child.killed_for or "exit", status=child.process.returncode))
        self._replace()

    # ---- one compile ------------------------------------------------------------------------------------------------

    async def _ask(self, child: _Child, source: Source) -> Compiled:
        served, child.served = child.served, -1  # until the whole answer is here
        watcher = asyncio.create_task(self._watch(child))
        try:
            assert child.process.stdin is not None
            ask = {"kind": int(source.kind), "cpu_s": self.limits.hard_s}
            child.process.stdin.write(pack(ask, source.text.encode()))
            await child.process.stdin.drain()
            header = await _read(child.process)
        except (asyncio.IncompleteReadError, ConnectionError):
            await child.process.wait()
            raise self._why(child) from None
        finally:
            watcher.cancel()
        child.served = served + 1
        if "error" in header:
            raise SourceError(f"the compiler refuses it: {_own_words(header['error'])}")
        if "memory_error" in header:
            child.served = -1  # its heap is full of the attempt
            raise ChildError(Outcome.TOO_LARGE, f"compiling needs more than {self.limits.memory_bytes >> 20} MiB")
        return Compiled(int(header["memory"]), int(header["us"]))

    async def _watch(self, child: _Child) -> None:
        """Kill at the hard limit, or at the soft one as soon as somebody waits."""
        started = time.monotonic()
        while (passed := time.monotonic() - started) < self.limits.hard_s:
            if passed >= self.limits.soft_s and self.waiting:
                child.kill(f"{self.limits.soft_s:g} s, and others wait")
                return
            await asyncio.sleep(POLL_S)
        child.kill(f"{self.limits.hard_s:g} s")

    def _why(self, child: _Child) -> ChildError:
        status = child.process.returncode or 0
        if child.killed_for or status == -signal.SIGXCPU:
            return ChildError(Outcome.TIMEOUT, f"not compiled within {child.killed_for or 'its processor time'}")
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        return ChildError(Outcome.CRASHED, f"the compile process ended with {name}")

    # ---- starting ---------------------------------------------------------------------------------------------------

    def _replace(self) -> None:
        if not self._stopped:
            task = asyncio.create_task(self._spawn())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _spawn(self) -> None:
        first = not self._alive
        while True:
            child = await self._launch()
            try:
                async with asyncio.timeout(START_S):
                    header = await _read(child.process)
                child.grammar_rev = str(header["grammar_rev"])
                self._idle.put_nowait(child)
                return
            except (asyncio.IncompleteReadError, TimeoutError):
                self._alive.discard(child)
                child.kill("did not start")
                await child.process.wait()
                if first and self._idle.empty() and not self.deaths:
                    raise StartError("a compile process does not start; its own lines on stderr say why") from None
                log.error("a compile process did not start")
                await asyncio.sleep(RESTART_S)
            except BaseException:
                child.kill("not wanted any more")
                raise

    async def _launch(self) -> _Child:
        env = {**environment(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "grammar_svc.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,  # Ctrl-C reaches the service, which drains; a compile under way goes on
            limit=1 << 20,
        )
        child = _Child(process)
        self._alive.add(child)
        assert process.stdin is not None
        process.stdin.write(pack(self._setup))
        return child


async def _read(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    head, _ = LENGTHS.unpack(await process.stdout.readexactly(LENGTHS.size))
    answer: dict[str, Any] = json.loads(await process.stdout.readexactly(head))
    return answer


def _own_words(text: str) -> str:
    """Without the time and source line that XGrammar puts before its message."""
    return (text.rsplit(".cc:", 1)[-1].partition(": ")[2] or text).strip()
