"""`run()` and `serve()`: from a servicer to a process that listens, answers health checks and leaves in order.

One event loop in one thread per process (uvloop where installed). SIGTERM drains and ends with status 0, Ctrl-C
drains and ends with 130, a second signal ends at once. Options: meshkit.channel. What is served is the caller's.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import grpc
from grpc_reflection.v1alpha import reflection

from meshkit.address import Address, parse_address, prepare_listen
from meshkit.channel import SERVER_OPTIONS
from meshkit.errors import PortError
from meshkit.exit_codes import Exit
from meshkit.health import Health, Step, drain
from meshkit.interceptors import DeadlineServer

DRAIN_S: Final = 30.0
GRACE_S: Final = 5.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How to listen. `reflection` names the services to describe to grpcurl and the like: admin listeners only."""

    listen: str
    insecure: bool = False
    reflection: Sequence[str] = ()
    drain_s: float = DRAIN_S
    grace_s: float = GRACE_S


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def start_server(
    serving: Serving, health: Health, add_services: Callable[[grpc.aio.Server], None]
) -> tuple[grpc.aio.Server, Address]:
    """A started server and the address it listens on (the real port where 0 was asked for)."""
    address = parse_address(serving.listen)
    prepare_listen(address, insecure=serving.insecure)
    server = grpc.aio.server(interceptors=(DeadlineServer(),), options=list(SERVER_OPTIONS))
    add_services(server)
    health.add_to(server)
    if serving.reflection:
        reflection.enable_server_reflection((*serving.reflection, reflection.SERVICE_NAME), server)
    try:
        if address.path is not None:
            credentials = grpc.local_server_credentials(grpc.LocalConnectionType.UDS)
            server.add_secure_port(str(address), credentials)
        else:
            address = replace(address, port=server.add_insecure_port(str(address)))
    except RuntimeError as error:  # someone took it since the check
        raise PortError(f"cannot listen on {address}: {error}") from error
    await health.start()
    await server.start()
    return server, address


async def serve(
    serving: Serving,
    health: Health,
    add_services: Callable[[grpc.aio.Server], None],
    *,
    work: Callable[[], Coroutine[Any, Any, None]],
    finish: Step | None = None,
) -> int:
    """Listen, run `work` (the service's own loop; it never returns), and leave on a signal. Returns the exit status.

    An exception in `work` ends the process: it is raised here after the server has stopped.
    """
    async with _signals() as signalled:
        server, address = await start_server(serving, health, add_services)
        log.info("listening on %s", address)
        worker = asyncio.create_task(work())
        waiter = asyncio.create_task(signalled.wait())
        await asyncio.wait((worker, waiter), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            await drain(health, server, finish, drain_s=serving.drain_s, grace_s=serving.grace_s)
            worker.cancel()
        else:
            await server.stop(None)
        waiter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker
        return int(Exit.INTERRUPTED if signalled.interrupted else Exit.OK)


class _Signalled(asyncio.Event):
    """Set by the first SIGTERM or SIGINT; from then on a signal does what it does by default: end the process."""

    interrupted = False

    def receive(self, number: int) -> None:
        _restore_signals()
        self.interrupted = number == signal.SIGINT
        log.info("%s: draining", signal.Signals(number).name)
        self.set()


def _restore_signals() -> None:
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def _signals() -> AsyncIterator[_Signalled]:
    signalled = _Signalled()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, signalled.receive, number)
    try:
        yield signalled
    finally:
        _restore_signals()
