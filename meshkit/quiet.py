"""Keeps Python's cyclic garbage collector out of a service's steps.

What is alive after start is frozen and never walked again. From then on nothing is collected by itself: young objects
when there are some thousands of them, everything when the service is idle, or once in a while when it never is. Objects
without cycles are freed at once as ever; but every RPC that a gRPC server answers leaves a cycle of its own.
"""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from typing import Final

EVERY_S: Final = 1.0
YOUNG: Final = 2_000  # net new containers; walking so many takes a tenth of a millisecond
ROUNDS: Final = 10  # young collections between two that take what has survived them along
STALE: Final = 60  # idle rounds between full collections: there is little to find
BUSY: Final = 600  # rounds without a full one, busy or not: it walks all that has come since start, a few milliseconds


@contextlib.asynccontextmanager
async def quiet_collector(busy: Callable[[], bool]) -> AsyncIterator[None]:
    """The collector is tamed inside the block; `busy()` says whether a step may be under way."""
    gc.collect()
    gc.freeze()
    gc.disable()
    keeper = asyncio.create_task(_keep(busy))
    try:
        yield
    finally:
        keeper.cancel()
        gc.enable()
        gc.unfreeze()


async def _keep(busy: Callable[[], bool]) -> None:
    idle = since = 0
    while True:
        await asyncio.sleep(EVERY_S)
        idle, since = 0 if busy() else idle + 1, since + 1
        young, rounds, _ = gc.get_count()
        if idle % STALE == 1 or since >= BUSY:
            gc.collect()
            since = 0
        elif young > YOUNG:
            gc.collect(int(rounds >= ROUNDS))
