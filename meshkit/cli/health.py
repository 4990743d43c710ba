"""`v4mesh health SERVICE`: exit 0 if it is ready to serve, 1 if not; the command of container health checks.

The gateway is asked over HTTP, the others by the standard gRPC health service. Waits for nothing unless --timeout says
so, starts nothing.
"""

import asyncio
import time

import click

from meshkit.cli.help_pages import command
from meshkit.cli.http_client import Endpoint, get_answer
from meshkit.cli.screen import Screen, shared_options

TARGETS = {
    "gateway": "http://127.0.0.1:8000",
    "scheduler": "unix:/run/v4mesh/scheduler.sock",
    "worker": "unix:/run/v4mesh/worker.sock",
    "cache": "unix:/run/v4mesh/cache.sock",
    "grammar": "unix:/run/v4mesh/grammar.sock",
}


@command()
@click.argument("service", type=click.Choice([*TARGETS, "mesh"]))
@click.option("--target", metavar="ADDRESS", help="http://HOST:PORT, unix:PATH or HOST:PORT.")
@click.option("--live", is_flag=True, help="Only: does the process work? Not: can it do its job now?")
@click.option("--timeout", "timeout_s", default=0.0, metavar="SECONDS", help="Keep asking this long.")
@shared_options
@click.pass_obj
def health(screen: Screen, *, service: str, target: str | None, live: bool, timeout_s: float) -> int:
    """Is SERVICE ready? `gateway` answers from its first second on; `mesh` asks it whether a worker serves."""
    where = target or TARGETS["gateway" if service == "mesh" else service]
    until = time.monotonic() + timeout_s
    while True:
        ready, said = ask(service, where, live=live)
        if ready or time.monotonic() >= until:
            break
        time.sleep(0.2)
    screen.note(f"{service} at {where}: {said}")
    return 0 if ready else 1


def ask(service: str, target: str, *, live: bool = False) -> tuple[bool, str]:
    """One question: is it ready, and in which words."""
    if service in ("gateway", "mesh"):
        path = "/health" if service == "gateway" else "/ready"
        status, why = asyncio.run(get_answer(Endpoint.parse(target), path, timeout_s=3.0))
        return status == 200, "ready" if status == 200 else f"{path} answered {status}: {why}" if status else why
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from meshkit.health import READY

    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service="" if live else READY), timeout=3.0)
        except grpc.RpcError as e:
            return False, f"{e.code().name}: {e.details()}"
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return reply.status == health_pb2.HealthCheckResponse.SERVING, name
