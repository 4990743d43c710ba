"""A worker's life: load and warm up on the compute thread, then serve the scheduler. Health says which.

A worker answers health checks only; everything else travels on the stream that it dials.
"""

from typing import TYPE_CHECKING

from meshkit.health import Health
from meshkit.obs import Metrics
from worker_svc.compute import ComputeThread
from worker_svc.config import WorkerConfig
from worker_svc.loop import WorkerLoop

if TYPE_CHECKING:
    from worker_svc.loading import Loaded


class WorkerProcess:
    """`run` is the service's work; `finish` its part of a drain."""

    def __init__(self, config: WorkerConfig, health: Health, metrics: Metrics, compute: ComputeThread) -> None:
        self._config = config
        self._health = health
        self._metrics = metrics
        self._compute = compute
        self._loop: WorkerLoop | None = None

    async def run(self) -> None:
        config = self._config
        loaded = await self._compute.call(self._load)
        self._loop = WorkerLoop(
            loaded.executor,
            self._compute,
            group=config.group,
            model=loaded.executor.info,
            pools=loaded.pools,
            scheduler=config.scheduler,
            metrics=self._metrics,
        )
        await self._health.set_ready(True)
        await self._loop.run()

    def _load(self) -> "Loaded":
        from worker_svc.loading import load  # brings torch: health answers and bad options fail before that

        return load(self._config)

    async def finish(self) -> None:
        if self._loop is not None:
            await self._loop.finish()
