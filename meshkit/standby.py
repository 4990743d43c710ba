"""Two processes of one command line: the first to lock SOCKET.lock serves, the other stands by and takes over.

A standby has done all that takes long before the lock falls to it (imports, reading, warming up: `standing`), so that a
crash costs what its clients need to dial again. It begins with that when the serving process is ready, so as not to
slow its start. The kernel frees the lock when the process ends, however it ends; a process that is merely stopped keeps
it. TCP addresses have no standby.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
from collections.abc import AsyncIterator, Coroutine
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

log = logging.getLogger(__name__)


class Place:
    """The right to serve at one unix socket."""

    def __init__(self, socket: Path) -> None:
        path = socket.with_name(f"{socket.name}.lock")
        self.socket = socket
        try:
            socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PermError(f"cannot use {path}: {error.strerror}") from error

    def take(self) -> bool:
        """Whether this process serves from now on; never waits."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.ftruncate(self._file, 0)
        return True

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
    """Wait for the lock. Meanwhile the socket has a standby."""
    with standing(place.socket):
        while not place.take():  # noqa: ASYNC110 - another process's lock: there is only asking
            await asyncio.sleep(POLL_S)


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

    A signal before that ends it: then the status to exit with. `metrics_port` on loopback is waited for too, unless 0.
    """
    async with until_signalled() as signalled:
        log.info("standing by", extra=kv(address=str(address)))
        waiting = asyncio.create_task(standing)
        await asyncio.wait((waiting, signalled), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            return Exit.INTERRUPTED if signalled.result() is signal.SIGINT else Exit.OK
    result = waiting.result()
    log.info("taking over", extra=kv(address=str(address)))
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
