"""`python -m gateway`: read the options, listen, and leave in order.

Listens from the first second and answers 503 until the tokenizer is loaded and a worker is ready. SIGTERM and Ctrl-C
drain: no new connection, what is open or comes on open connections may finish, what is left after the grace is aborted.
SIGUSR1 drains without a grace of its own, for a supervisor that has a successor and its own idea of how long to wait.
"""

import asyncio
import gc
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from gateway.app import GATEWAY, build_admin_app, build_app
from gateway.config import GatewayConfig
from gateway.http_server import GatewayRunner
from gateway.instances.fleet import Fleet
from gateway.journal.journal import MAX_BYTES, Journal, JournalConfig
from gateway.mesh_client import MeshClient
from gateway.metrics import STAGE_SECONDS, Histogram
from gateway.rpc.listener import RpcListener
from gateway.service import Gateway
from gateway.siblings.cover import BACKLOG, Cover
from gateway.siblings.member import Member
from gateway.siblings.merge import merge
from gateway.siblings.parent import serve_many
from gateway.text.pretokenizer import TokenizerFileError
from gateway.text.tokenizer import Tokenizer
from meshkit.address import Address, check_trust, parse_address, prepare_listen
from meshkit.build import build_id
from meshkit.command import service_main
from meshkit.config import Loaded
from meshkit.errors import ModelDirError, PortError
from meshkit.exit_codes import Exit
from meshkit.models import resolve_model
from meshkit.obs import Metrics, setup_logging, start_tracing
from meshkit.server import run

_ABORT_SECONDS = 0.2  # for the farewell of streams that are aborted at the end
_LOOK_SECONDS = 0.02
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_TOGETHER_SECONDS = 3.0  # tokenizer and scheduler; later, requests are told what is missing
_LINGER_SECONDS = 0.5  # who just got an answer may ask again on the same connection, not knowing that it closes

log = logging.getLogger("gateway")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status of the gateway with these flags."""
    args = list(sys.argv[1:] if argv is None else argv)
    return service_main(GatewayConfig, "gateway", partial(_run, args), args)


def _run(args: Sequence[str], loaded: Loaded[GatewayConfig]) -> int:
    config = replace(loaded.value, model=resolve_model(loaded.value.model))
    setup_logging("gateway", fmt=config.log_format, level=config.log_level)
    return run(serve(config) if config.processes == 1 else serve_many(config, args))


async def serve(config: GatewayConfig) -> int:
    """Serve until a signal. Returns the exit status; raises StartError where it cannot."""
    address = parse_address(config.listen_http)
    secured = config.insecure or config.api_key_file is not None
    if config.listen_fds:
        check_trust(address, insecure=secured)
    else:
        prepare_listen(address, insecure=secured)
    grammars = Histogram(STAGE_SECONDS)
    mesh, mesh_metrics = _mesh(config, grammars.observe)
    tracing = start_tracing("gateway")
    app = build_app(mesh, None, config, tracing)
    gateway = app[GATEWAY]
    gateway.metrics.others.append(mesh_metrics)
    gateway.metrics.grammar = grammars
    rpc = RpcListener(gateway, tracing)
    runner, admin = _runner(app, config), _runner(build_admin_app(app), config)
    await runner.setup()
    signals = _Signals()
    linking = asyncio.create_task(mesh.run())
    member: Member | None = None
    try:
        if config.hub:
            member = gateway.siblings = await Member.join(gateway, config.hub)
        if config.listen_admin:
            await _listen_admin(admin, config)
        opening = asyncio.create_task(_open(gateway, runner, rpc, member))
        loading = asyncio.create_task(_load_tokenizer(gateway))
        await _until_stopped(signals, linking, loading, opening)
        gateway.admission.draining = True
        await _stop_listening(runner, member)
        if opening.done():
            rpc.leave()
        await _drain(gateway, runner, signals)
    finally:
        if member is not None:
            await member.stop()
        await rpc.stop(_ABORT_SECONDS)
        await runner.cleanup()
        await admin.cleanup()
        linking.cancel()
        with suppress(asyncio.CancelledError):
            await linking
        signals.close()
        tracing.shutdown()
    return int(Exit.INTERRUPTED if signals.interrupted else Exit.OK)


def _mesh(config: GatewayConfig, on_grammar: Callable[[float], None]) -> tuple[MeshClient | Fleet, Callable[[], bytes]]:
    """The way to the schedulers, and what it counts as text."""
    boot = int.from_bytes(os.urandom(8), "little")
    metrics = [Metrics() for _ in config.scheduler]
    journals = [_journal(config, boot) for _ in config.scheduler]
    pages = [_page(journal, counted) for journal, counted in zip(journals, metrics, strict=True)]
    clients = [
        MeshClient(journal, address, counted, on_grammar)
        for journal, address, counted in zip(journals, config.scheduler, metrics, strict=True)
    ]
    if len(clients) == 1:
        return clients[0], pages[0]
    own = Metrics()
    fleet = Fleet(config.scheduler, clients, random.Random(boot), own)
    return fleet, lambda: merge(page().decode() for page in (*pages, own.render))


def _page(journal: Journal, metrics: Metrics) -> Callable[[], bytes]:
    """The metrics as text, with what the journal holds at that moment."""
    entries = metrics.gauge("v4mesh_journal_requests", "Open requests in the gateway's journal")
    nbytes = metrics.gauge("v4mesh_journal_bytes", "Bytes of the gateway's journal")

    def render() -> bytes:
        entries.put(len(journal.entries))
        nbytes.put(journal.bytes_used)
        return metrics.render()

    return render


def _journal(config: GatewayConfig, boot: int) -> Journal:
    identity = JournalConfig(
        name=f"gateway-{socket.gethostname()[:64]}-{os.getpid()}",  # in containers all have the same few numbers
        boot=boot,
        build=build_id(),
        deterministic=config.deterministic,
        max_waiting=config.max_waiting,
        max_bytes=MAX_BYTES // len(config.scheduler),
    )
    return Journal(identity, random.Random(boot))


def _runner(app: web.Application, config: GatewayConfig) -> web.AppRunner:
    limits = config.limits
    return GatewayRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        max_line_size=limits.header_line,
        max_field_size=limits.header_field,
        shutdown_timeout=1.0,
    )


async def _open(gateway: Gateway, runner: web.AppRunner, rpc: RpcListener, member: Member | None) -> None:
    """Listen; a successor does so once it serves, for it takes connections that its predecessor would serve.

    At a handed over socket connections wait, so they may as well do so while the parts of this process come together;
    where siblings accept in its place there is no hurry at all.
    """
    config = gateway.config
    hasty = time.monotonic() + (_TOGETHER_SECONDS if config.listen_fds else 0.0)
    while not gateway.is_complete:
        served = member is not None and member.others_serve(len(config.sibling_fds))
        if time.monotonic() >= hasty and not served:
            break
        await asyncio.sleep(_LOOK_SECONDS)
    while config.ready_fd and not gateway.takes_requests:  # noqa: ASYNC110 - where it changes is not one place
        await asyncio.sleep(_LOOK_SECONDS)
    await _listen(runner, parse_address(config.listen_http), config.listen_fds)
    if member is not None and config.sibling_fds:
        own = config.sibling_fds.index(config.listen_fds[0])
        await member.serve(own, Cover(runner, config.sibling_fds, own))
    if config.listen_grpc:
        await rpc.start(config.listen_grpc)
    if config.ready_fd:
        with suppress(OSError):  # a sibling has said it, and nobody listens any more
            os.write(config.ready_fd, b"ready")


async def _stop_listening(runner: web.AppRunner, member: Member | None) -> None:
    """At the own socket and at those of others. Siblings that stay are there before this one stops."""
    if member is not None:
        await member.leave()
    for site in list(runner.sites):
        await site.stop()


async def _listen(runner: web.AppRunner, address: Address, handed: Sequence[int]) -> None:
    site: web.BaseSite
    if handed:
        site = web.SockSite(runner, socket.socket(fileno=handed[0]), backlog=BACKLOG)
    elif address.path is not None:
        site = web.UnixSite(runner, str(address.path))
    else:
        site = web.TCPSite(runner, address.host, address.port)
    try:
        await site.start()
    except OSError as error:  # someone took it since the check
        raise PortError(f"cannot listen on {address}: {error.strerror}") from error
    shown = f"unix:{address.path}" if address.path else f"http://{address.host}:{runner.addresses[0][1]}"
    log.info("listening on %s", shown)


async def _listen_admin(runner: web.AppRunner, config: GatewayConfig) -> None:
    """For operators. All processes of a port listen there, a successor beside its predecessor: any speaks for all."""
    address = parse_address(config.listen_admin)
    secured = config.insecure or config.admin_api_key_file is not None
    if config.hub or config.ready_fd:
        check_trust(address, insecure=secured)
    else:
        prepare_listen(address, insecure=secured)
    await runner.setup()
    site: web.BaseSite
    if address.path is not None:
        site = web.UnixSite(runner, str(address.path))
    else:
        site = web.TCPSite(runner, address.host, address.port, reuse_port=True)
    try:
        await site.start()
    except OSError as error:
        raise PortError(f"cannot listen on {address}: {error.strerror}") from error
    shown = address if address.path else f"http://{address.host}:{runner.addresses[0][1]}"
    log.info("for operators on %s", shown)


async def _load_tokenizer(gateway: Gateway) -> None:
    """In a thread: a large vocabulary takes a second or two."""
    try:
        gateway.tokenizer = await asyncio.to_thread(Tokenizer.load, gateway.config.model)
    except TokenizerFileError as error:
        raise ModelDirError(str(error)) from None
    gc.collect()
    gc.freeze()  # the vocabulary lives for ever: later collections need not walk it
    log.info("tokenizer loaded")


async def _until_stopped(signals: "_Signals", *tasks: "asyncio.Task[Any]") -> None:
    """Returns at a signal; an error of a task ends the process. All but the first task, the link, end then too."""
    waiting = asyncio.create_task(signals.stopped.wait())
    pending: set[asyncio.Task[Any]] = {waiting, *tasks}
    try:
        while not waiting.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in (waiting, *tasks[1:]):
            task.cancel()


async def _drain(gateway: Gateway, runner: web.AppRunner, signals: "_Signals") -> None:
    """Let open generations finish; abort those that have not in time."""
    idle = asyncio.create_task(_until_idle(gateway, runner))
    pressed = asyncio.create_task(signals.pressed.wait())
    await asyncio.wait((idle, pressed), return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait((idle,), timeout=gateway.config.drain_seconds)
    pressed.cancel()
    if not idle.done():
        idle.cancel()
        log.warning("%d requests did not finish in time", gateway.admission.streams)
        gateway.abort_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_SECONDS):
                await gateway.admission.idle.wait()


async def _until_idle(gateway: Gateway, runner: web.AppRunner) -> None:
    """Nothing is open and nobody who was just served has come again on the same connection."""
    metrics = gateway.metrics
    while True:
        await gateway.admission.idle.wait()
        answered = metrics.http_requests.total()
        if runner.server is None or not runner.server.connections:
            return
        await asyncio.sleep(_LINGER_SECONDS)
        if not metrics.http_active and metrics.http_requests.total() == answered:
            return


class _Signals:
    """SIGTERM and SIGINT set `stopped` and `pressed`, SIGUSR1 the former alone; one more ends the process at once."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self.pressed = asyncio.Event()  # by now there is a limit to how long open requests may go on
        self.interrupted = False
        self._loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._receive, number)

    def _receive(self, number: int) -> None:
        if self.pressed.is_set():
            raise KeyboardInterrupt
        self.interrupted = number == signal.SIGINT
        log.info("%s: draining", signal.Signals(number).name)
        self.stopped.set()
        if number != signal.SIGUSR1:
            self.pressed.set()

    def close(self) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)


if __name__ == "__main__":
    sys.exit(main())
