"""grpc.health.v1 of a service, and the order of a graceful drain.

The empty name answers liveness: this process works. `v4mesh.ready` answers readiness: it can do its job now (a worker
has loaded and warmed up, a scheduler has a worker). Probes and load balancers ask for the latter.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

READY: Final = "v4mesh.ready"

log = logging.getLogger(__name__)

Step = Callable[[], Awaitable[None]]


class Health:
    """State of the two names; starts alive and not ready."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()
        self._ready = False
        self._draining = False

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    @property
    def ready(self) -> bool:
        return self._ready and not self._draining

    async def start(self) -> None:
        await self._publish()

    async def set_ready(self, ready: bool) -> None:
        """Idempotent and cheap: call it whenever readiness may have changed."""
        if ready != self._ready:
            self._ready = ready
            log.info("ready" if ready else "not ready")
            await self._publish()

    async def enter_drain(self) -> None:
        """Everything NOT_SERVING, for good."""
        self._draining = True
        await self._servicer.enter_graceful_shutdown()

    async def _publish(self) -> None:
        status = health_pb2.HealthCheckResponse
        await self._servicer.set(READY, status.SERVING if self._ready else status.NOT_SERVING)


async def drain(
    health_of: Health, server: grpc.aio.Server, finish: Step | None, *, drain_s: float, grace_s: float
) -> None:
    """Leave in order: NOT_SERVING, `finish` (stop admitting, let work end, say Bye) for at most `drain_s`, then stop.

    Streams that are still open after `grace_s` are cut.
    """
    await health_of.enter_drain()
    if finish is not None:
        try:
            async with asyncio.timeout(drain_s):
                await finish()
        except TimeoutError:
            log.warning("drain not finished after %.0f s: closing anyway", drain_s)
    await server.stop(grace_s)
