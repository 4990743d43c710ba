"""For tests: a clock turned by hand, a mesh of real servicers in one process, waiting without fixed sleeps.

Servers listen on unix sockets in a folder that pytest gives; nothing here is imported by a service.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc

from meshkit.health import Health
from meshkit.server import Serving, start_server


class FakeClock:
    """A clock that stands still until told otherwise."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, *, ms: int = 0, ns: int = 0) -> None:
        self._now_ns += ms * 1_000_000 + ns


@contextlib.asynccontextmanager
async def serving(
    folder: Path, name: str, add_services: Callable[[grpc.aio.Server], None], health: Health | None = None
) -> AsyncIterator[str]:
    """A started server for these services; yields its address. Stops at once on leaving."""
    spec = Serving(listen=f"unix:{folder / name}.sock")
    server, address = await start_server(spec, health or Health(), add_services)
    try:
        yield str(address)
    finally:
        await server.stop(None)


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Return as soon as `condition()` holds; AssertionError after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not so within {timeout_s} s: {condition}"
        await asyncio.sleep(0.005)
