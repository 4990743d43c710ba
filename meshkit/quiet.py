"""Keeps Python's cyclic garbage collector out of a service's steps.

What is alive after start is frozen and never walked again. From then on nothing is collected by itself: young objects
when there are many of them, everything when the service is idle. Objects without cycles are freed at once as ever.
"""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from typing import Final

EVERY_S: Final = 1.0
YOUNG: Final = 20_000  # net new containers; walking so many takes a millisecond or two
STALE: Final = 60  # idle rounds between full collections: there is little to find


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
    idle = 0
    while True:
        await asyncio.sleep(EVERY_S)
        idle = 0 if busy() else idle + 1
        if idle % STALE == 1:
            gc.collect()
        elif gc.get_count()[0] > YOUNG:
            gc.collect(0)
