"""`--processes N`: N gateways that share one port, kept running by this process, which serves no request itself.

The kernel spreads connections over them (SO_REUSEPORT). This process holds their listening sockets, or got them from
whoever started it: port 0 then means the same port to all, nobody else takes it while a gateway restarts, and whoever
connects while none is there waits for the next one. Every gateway inherits all of them and accepts at its own; at that
of one that is gone or frozen the others do. A socket of the gRPC port is held too, which never listens. When all are to
leave it lets go of the sockets, so that connections are refused where no successor holds them.
"""

import asyncio
import logging
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from gateway.config import GatewayConfig
from gateway.siblings.cover import BACKLOG
from gateway.siblings.hub import Hub
from meshkit.address import Address, check_trust, parse_address, prepare_listen
from meshkit.errors import ConfigError, PortError
from meshkit.exit_codes import Exit
from meshkit.own_folder import make_own_folder
from meshkit.supervisor import ServiceEvent, ServiceSpec, Supervisor

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

log = logging.getLogger("gateway")


async def serve_many(config: GatewayConfig, argv: Sequence[str]) -> int:
    """Run `config.processes` gateways with this command line until a signal. Returns the exit status."""
    http = parse_address(config.listen_http)
    if http.path is not None:
        raise ConfigError(f"processes = {config.processes} share a TCP port; listen_http is {http}")
    secured = config.insecure or config.api_key_file is not None
    if config.listen_admin:
        admin = parse_address(config.listen_admin)
        if admin.path is not None or not admin.port:
            raise ConfigError(f"processes = {config.processes} share a TCP port of a number; listen_admin is {admin}")
    sockets, http = _listening(config, http, secured)
    flags = ["--processes", "1", "--listen-http", str(http)]
    held = list(sockets)
    if config.listen_grpc:
        grpc = parse_address(config.listen_grpc)
        if grpc.path is not None:
            raise ConfigError(f"processes = {config.processes} share a TCP port; listen_grpc is {grpc}")
        if config.listen_fds:
            check_trust(grpc, insecure=secured)
        else:
            prepare_listen(grpc, insecure=secured)
        holder, grpc = _hold(grpc)
        held.append(holder)
        flags += ["--listen-grpc", str(grpc)]
    fds = [it.fileno() for it in sockets]
    folder = make_own_folder(Path(tempfile.gettempdir()), "gateways-")
    try:
        path = folder / "hub.sock"
        hub = Hub(len(fds))
        await hub.start(path)
        flags += ["--hub", str(path), "--sibling-fds", ",".join(map(str, fds))]
        command = (sys.executable, "-m", "gateway", *argv, *flags)
        told = (config.ready_fd,) if config.ready_fd else ()
        specs = [
            ServiceSpec(
                name=f"gateway-{number}",
                argv=(*command, "--listen-fds", str(fd)),
                drain_s=config.drain_seconds + 1,
                retire=signal.SIGUSR1,
                passed=(*fds, *told),
            )
            for number, fd in enumerate(fds)
        ]
        try:
            return await _supervise(specs, str(http), config.drain_seconds + 2, held)
        finally:
            await hub.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _listening(config: GatewayConfig, http: Address, secured: bool) -> tuple[list[socket.socket], Address]:
    """The sockets at which the processes accept, one each, and their address with the real port."""
    if config.listen_fds:
        check_trust(http, insecure=secured)
        return [socket.socket(fileno=fd) for fd in config.listen_fds], http
    prepare_listen(http, insecure=secured)
    sockets = []
    for _ in range(config.processes):
        holder, http = _hold(http)
        holder.listen(BACKLOG)
        sockets.append(holder)
    return sockets, http


async def _supervise(specs: Sequence[ServiceSpec], shown: str, stop_s: float, holders: Sequence[socket.socket]) -> int:
    interrupted = False

    def let_go() -> None:
        for holder in holders:
            holder.close()

    supervisor = Supervisor(specs, on_event=_say, on_line=_relay, stop_s=stop_s, together=True, on_stop=let_go)
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        nonlocal interrupted
        interrupted = interrupted or number == signal.SIGINT
        if number == signal.SIGUSR1:
            supervisor.retire()
        else:
            supervisor.stop()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    log.info("listening on http://%s with %d processes", shown, len(specs))
    try:
        status = await supervisor.run()
    finally:
        for number in _SIGNALS:
            with suppress(ValueError):
                loop.remove_signal_handler(number)
    return int(Exit.INTERRUPTED) if interrupted and status == Exit.OK else status


def _hold(address: Address) -> tuple[socket.socket, Address]:
    """A bound socket that does not listen yet, and the address with its real port."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else closed connections keep the port for a minute
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        holder.bind((address.host, address.port))
    except OSError as error:
        holder.close()
        raise PortError(f"cannot listen on {address}: {error.strerror}") from error
    return holder, Address(host=address.host, port=holder.getsockname()[1])


def _say(event: ServiceEvent) -> None:
    how = f"was killed by signal {-event.status}" if event.status < 0 else f"ended with status {event.status}"
    if event.kind == "exited":
        level = logging.ERROR if event.status else logging.INFO
        when = f" in {event.restart_in_s:g} s" if event.restart_in_s else ""
        log.log(level, "%s (pid %d) %s; the next one starts%s", event.service, event.pid, how, when)
    elif event.kind == "gave_up":
        log.error("%s (pid %d) %s: all processes end, another one would fail too", event.service, event.pid, how)


def _relay(service: str, text: str) -> None:
    sys.stderr.write(f"{service}: {text}\n")
