"""Two processes of one command line: the first to lock SOCKET.lock serves, the other stands by and takes over.

A standby has done all that takes long before the lock falls to it (imports, reading, warming up: `standing`), so that a
crash costs what its clients need to dial again. It begins with that when the serving process is ready, so as not to
slow its start. The kernel frees the lock when the process ends, however it ends. A process that is merely stopped keeps
it: then its heartbeat in the lock file stands still, and the standby ends it, or, where it cannot (a process of another
container), puts a lock file of its own in the place of the old one, which the other finds when it is thawed.

TCP addresses have no standby.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from meshkit.address import Address, prepare_listen
from meshkit.errors import PermError, PortError
from meshkit.exit_codes import Exit
from meshkit.obs import kv
from meshkit.standing import standing

T = TypeVar("T")

POLL_S: Final = 0.01
SETTLE_S: Final = 2.0  # after the serving process is ready: whatever else starts with it may finish
FREE_S: Final = 2.0  # a process that ends frees its lock a moment before its sockets
READY: Final = b"ready"
OWNER: Final = struct.Struct("<8xQQQ")  # behind the word: heartbeats, pid, its PID namespace
BEAT_S: Final = 0.25
FROZEN_S: Final = 2.0  # without a heartbeat: a stopped process is ended, ...
HUNG_S: Final = 5.0  # ... after so long one that runs or whose state is not to be seen
LOOK_S: Final = 0.5  # longest time between two looks that counts as the owner's silence and not as our own sleep

log = logging.getLogger(__name__)


class Place:
    """The right to serve at one unix socket."""

    def __init__(self, socket: Path) -> None:
        self.socket, self._path = socket, socket.with_name(f"{socket.name}.lock")
        self._beats = 0
        try:
            socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PermError(f"cannot use {self._path}: {error.strerror}") from error

    def beside(self, suffix: str) -> Path:
        """A path for what the processes of this place hand on to each other."""
        return self.socket.with_name(f"{self.socket.name}.{suffix}")

    def take(self) -> bool:
        """Whether this process serves from now on; never waits."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.ftruncate(self._file, 0)
        self._beats = 0
        self._sign()
        return True

    def _sign(self) -> None:
        here = OWNER.pack(self._beats, os.getpid(), _pid_namespace())
        os.pwrite(self._file, here[8:], 8)

    def beat(self) -> bool:
        """The serving process is at work. False: another one serves here since, and this one must not go on."""
        with contextlib.suppress(FileNotFoundError):  # somebody tidied up: whoever waits has this file open too
            if self._path.stat().st_ino != os.fstat(self._file).st_ino:
                return False
        self._beats += 1
        self._sign()
        return True

    def owner(self) -> tuple[int, int]:
        """Heartbeats of the process that holds the lock, 0 before its first, and its pid, 0 if not to be seen here."""
        raw = os.pread(self._file, OWNER.size, 0)
        if len(raw) < OWNER.size:
            return 0, 0
        beats, pid, namespace = OWNER.unpack(raw)
        return beats, pid if namespace == _pid_namespace() else 0

    def seize(self) -> None:
        """Serve from now on although the lock is held: whoever holds it finds that this is no longer its place."""
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(self._path)
        os.close(self._file)
        self._file, self._beats = file, 0
        self._sign()
        self.socket.unlink(missing_ok=True)

    def announce(self) -> None:
        """The serving process is ready: a standby may use the processor now."""
        os.pwrite(self._file, READY, 0)

    @property
    def announced(self) -> bool:
        return os.pread(self._file, len(READY), 0) == READY

    def leave(self) -> None:
        """Let another process serve."""
        os.close(self._file)


async def until_served(place: Place) -> bool:
    """Wait until the serving process is ready and its surroundings have settled; True if its place is ours instead."""
    loop = asyncio.get_running_loop()
    settled = float("inf")
    while loop.time() < settled:
        if place.take():
            return True
        if settled == float("inf") and place.announced:
            settled = loop.time() + SETTLE_S
        await asyncio.sleep(POLL_S)
    return False


async def until_taken(place: Place) -> None:
    """Wait for the lock, and fence a process that holds it and is frozen. Meanwhile the socket has a standby."""
    loop, watch = asyncio.get_running_loop(), Watch()
    with standing(place.socket):
        while not place.take():
            beats, pid = place.owner()
            if watch.is_dead(beats, loop.time(), partial(_is_stopped, pid)):
                log.error("the serving process is frozen: nothing for %.1f s", watch.silent_s, extra=kv(pid=pid))
                if _fence(place, pid):
                    return
                watch = Watch()
            await asyncio.sleep(POLL_S)


@dataclass(slots=True)
class Watch:
    """How long the serving process has been silent, by this process's own running time: both may have been stopped."""

    silent_s: float = 0.0
    _beats: int = 0
    _looked: float = float("inf")

    def is_dead(self, beats: int, now: float, stopped: Callable[[], bool]) -> bool:
        """Look once. One that has not beaten yet is still starting: nobody waits for it in vain, it has no clients."""
        if beats != self._beats or not beats:
            self._beats, self.silent_s = beats, 0.0
        else:
            self.silent_s += min(max(0.0, now - self._looked), LOOK_S)
        self._looked = now
        return self.silent_s > HUNG_S or (self.silent_s > FROZEN_S and stopped())


def _is_stopped(pid: int) -> bool:
    """By a signal or a tracer, as the kernel says."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def _fence(place: Place, pid: int) -> bool:
    """End the process that holds the lock; True if the place had to be seized instead."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return False
    place.seize()
    return True


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # not Linux: there is one
        return 1


@contextlib.asynccontextmanager
async def beating(place: Place | None) -> AsyncIterator[None]:
    """The serving process's heartbeat, from its event loop. One that has been fenced ends at once, without a word."""

    async def beat(place: Place) -> None:
        while place.beat():  # noqa: ASYNC110 - not a wait
            await asyncio.sleep(BEAT_S)
        log.error("another process serves here since: ending")
        os._exit(Exit.PEER)  # no drain, no farewell, and no removal of the socket, which is the other's

    task = asyncio.create_task(beat(place)) if place is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until_free(address: Address) -> None:
    """Wait, after the lock has been taken, for the socket of the process that held it. Raises PortError."""
    end = asyncio.get_running_loop().time() + FREE_S
    while True:
        try:
            prepare_listen(address)
            return
        except PortError:
            if asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(POLL_S)


async def take_over(address: Address, standing: Coroutine[Any, Any, T], *, metrics_port: int = 0) -> T | Exit:
    """Run `standing`, which returns when the place is this process's, and wait for its sockets; what it returned.

    A signal before that ends it: then the status to exit with, also when it came while `standing` kept the loop from
    running and the place has become this process's. `metrics_port` on loopback is waited for too, unless 0.
    """
    async with until_signalled() as signalled:
        log.info("standing by", extra=kv(address=str(address)))
        waiting = asyncio.create_task(_settled(address, standing, metrics_port))
        await asyncio.wait((waiting, signalled), return_when=asyncio.FIRST_COMPLETED)
        if signalled.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            return Exit.INTERRUPTED if signalled.result() is signal.SIGINT else Exit.OK
    return waiting.result()


async def _settled(address: Address, standing: Coroutine[Any, Any, T], metrics_port: int) -> T:
    result = await standing
    log.info("taking over", extra=kv(address=str(address)))
    await asyncio.sleep(0)  # a signal that came while the loop stood still is told now
    await until_free(address)
    if metrics_port:
        await until_free(Address("127.0.0.1", metrics_port))
    return result


@contextlib.asynccontextmanager
async def until_signalled() -> AsyncIterator[asyncio.Future[signal.Signals]]:
    """A future that SIGTERM or SIGINT completes, for as long as nothing is served that would have to be drained."""
    loop = asyncio.get_running_loop()
    got: asyncio.Future[signal.Signals] = loop.create_future()

    def receive(number: signal.Signals) -> None:
        if not got.done():
            got.set_result(number)

    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, receive, number)
        yield got
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
