"""A worker's life: load and warm up on the compute thread, then serve the scheduler. Health says which.

A worker answers health checks only; everything else travels on the stream that it dials.
"""

import asyncio
import logging
import sys
import time
from typing import Final

from meshkit.errors import PeerError
from meshkit.health import Health
from meshkit.obs import Metrics, Tracing
from meshkit.peer import diagnose
from worker_svc.compute import ComputeThread
from worker_svc.config import WorkerConfig
from worker_svc.loaded import Loaded
from worker_svc.loop import WorkerLoop

WATCH_S: Final = 3.0
SWITCH_S: Final = 0.0002  # how long the event loop may hold Python while a step's thread wants it

log = logging.getLogger(__name__)


class WorkerProcess:
    """`run` is the service's work; `finish` its part of a drain."""

    def __init__(
        self, config: WorkerConfig, health: Health, metrics: Metrics, compute: ComputeThread, tracing: Tracing
    ) -> None:
        self._config = config
        self._tracing = tracing
        self._health = health
        self._metrics = metrics
        self._compute = compute
        self._loop: WorkerLoop | None = None

    async def run(self) -> None:
        config = self._config
        loaded = await self._compute.call(self._load)
        sys.setswitchinterval(SWITCH_S)
        self._loop = WorkerLoop(
            loaded.executor,
            self._compute,
            group=config.group,
            model=loaded.info,
            pools=loaded.pools,
            scheduler=config.scheduler,
            grammar=config.grammar,
            metrics=self._metrics,
            tracing=self._tracing,
        )
        await self._health.set_ready(True)
        watching = asyncio.create_task(self._watch_scheduler(self._loop))
        serving = asyncio.create_task(self._loop.run())
        try:
            await asyncio.wait((watching, serving), return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, serving):
                if task.done():
                    task.result()
        finally:
            for task in (watching, serving):
                task.cancel()
            await asyncio.gather(watching, serving, return_exceptions=True)

    async def _watch_scheduler(self, loop: WorkerLoop) -> None:
        """Say every few seconds why there is no attachment; give up where the config says so."""
        config, start, met = self._config, time.monotonic(), False
        while True:
            await asyncio.sleep(WATCH_S)
            met = met or loop.machine.attached
            if loop.machine.attached:
                continue
            waited, limit = time.monotonic() - start, config.scheduler_wait_s
            trouble = await diagnose(config.scheduler)
            if limit and not met and waited >= limit:
                raise PeerError(f"scheduler at {trouble}. waited {waited:.0f} s of {limit:.0f} s")
            if not loop.machine.attached:
                log.warning("no scheduler at %s", trouble)

    def _load(self) -> Loaded:
        if self._config.backend == "sim":
            from worker_svc.sim.loading import load as load_sim

            return load_sim(self._config)
        from worker_svc.loading import load  # brings torch: health answers and bad options fail before that

        return load(self._config)

    async def finish(self) -> None:
        if self._loop is not None:
            await self._loop.finish()
