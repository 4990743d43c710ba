"""`python -m gateway`: read the options, listen, and leave in order.

Listens from the first second and answers 503 until the tokenizer is loaded and a worker is ready. SIGTERM and Ctrl-C
drain: no new connection, open streams may finish, what is left after the grace is aborted.
"""

import asyncio
import gc
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from gateway.app import GATEWAY, build_app
from gateway.config import GatewayConfig
from gateway.http_server import GatewayRunner
from gateway.instances.fleet import Fleet
from gateway.journal.journal import MAX_BYTES, Journal, JournalConfig
from gateway.mesh_client import MeshClient
from gateway.metrics import STAGE_SECONDS, Histogram
from gateway.rpc.listener import RpcListener
from gateway.service import Gateway
from gateway.siblings.member import Member
from gateway.siblings.merge import merge
from gateway.siblings.parent import serve_many
from gateway.text.pretokenizer import TokenizerFileError
from gateway.text.tokenizer import Tokenizer
from meshkit.address import Address, parse_address, prepare_listen
from meshkit.build import build_id
from meshkit.command import service_main
from meshkit.config import Loaded
from meshkit.errors import ModelDirError, PortError
from meshkit.exit_codes import Exit
from meshkit.models import resolve_model
from meshkit.obs import Metrics, setup_logging, start_tracing
from meshkit.server import run

_ABORT_SECONDS = 0.2  # for the farewell of streams that are aborted at the end

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
    if not config.hub:
        prepare_listen(address, insecure=config.insecure or config.api_key_file is not None)
    grammars = Histogram(STAGE_SECONDS)
    mesh, mesh_metrics = _mesh(config, grammars.observe)
    tracing = start_tracing("gateway")
    app = build_app(mesh, None, config, tracing)
    gateway = app[GATEWAY]
    gateway.metrics.others.append(mesh_metrics)
    gateway.metrics.grammar = grammars
    rpc = RpcListener(gateway, tracing)
    runner = _runner(app, config)
    await runner.setup()
    signals = _Signals()
    linking = asyncio.create_task(mesh.run())
    try:
        if config.hub:
            gateway.siblings = await Member.join(gateway, config.hub)
        site = await _listen(runner, address, shared=bool(config.hub))
        if config.listen_grpc:
            await rpc.start(config.listen_grpc)
        loading = asyncio.create_task(_load_tokenizer(gateway))
        await _until_stopped(signals, linking, loading)
        gateway.admission.draining = True
        await site.stop()
        await _drain(gateway, config.drain_seconds)
    finally:
        if gateway.siblings is not None:
            await gateway.siblings.stop()
        await rpc.stop(_ABORT_SECONDS)
        await runner.cleanup()
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
    clients = [
        MeshClient(_journal(config, boot), address, counted, on_grammar)
        for address, counted in zip(config.scheduler, metrics, strict=True)
    ]
    if len(clients) == 1:
        return clients[0], metrics[0].render
    own = Metrics()
    fleet = Fleet(config.scheduler, clients, random.Random(boot), own)
    return fleet, lambda: merge(it.render().decode() for it in (*metrics, own))


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


async def _listen(runner: web.AppRunner, address: Address, *, shared: bool) -> web.BaseSite:
    site: web.BaseSite
    if address.path is not None:
        site = web.UnixSite(runner, str(address.path))
    else:
        site = web.TCPSite(runner, address.host, address.port, reuse_port=shared or None)
    try:
        await site.start()
    except OSError as error:  # someone took it since the check
        raise PortError(f"cannot listen on {address}: {error.strerror}") from error
    shown = f"unix:{address.path}" if address.path else f"http://{address.host}:{runner.addresses[0][1]}"
    log.info("listening on %s", shown)
    return site


async def _load_tokenizer(gateway: Gateway) -> None:
    """In a thread: a large vocabulary takes a second or two."""
    try:
        gateway.tokenizer = await asyncio.to_thread(Tokenizer.load, gateway.config.model)
    except TokenizerFileError as error:
        raise ModelDirError(str(error)) from None
    gc.collect()
    gc.freeze()  # the vocabulary lives for ever: later collections need not walk it
    log.info("tokenizer loaded")


async def _until_stopped(signals: "_Signals", linking: "asyncio.Task[None]", loading: "asyncio.Task[None]") -> None:
    """Returns at a signal; an error of a task ends the process."""
    waiting = asyncio.create_task(signals.stopped.wait())
    pending: set[asyncio.Task[Any]] = {waiting, linking, loading}
    try:
        while not waiting.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        waiting.cancel()
        loading.cancel()


async def _drain(gateway: Gateway, seconds: float) -> None:
    """Let open generations finish; abort those that have not by then."""
    try:
        async with asyncio.timeout(seconds):
            await gateway.admission.idle.wait()
    except TimeoutError:
        log.warning("%d requests did not finish in time", gateway.admission.streams)
        gateway.abort_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_SECONDS):
                await gateway.admission.idle.wait()


class _Signals:
    """SIGTERM and SIGINT set `stopped`; a second one ends the process at once."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self.interrupted = False
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._receive, number)

    def _receive(self, number: int) -> None:
        if self.stopped.is_set():
            raise KeyboardInterrupt
        self.interrupted = number == signal.SIGINT
        log.info("%s: draining", signal.Signals(number).name)
        self.stopped.set()

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)


if __name__ == "__main__":
    sys.exit(main())
