"""The worker's shell: the scheduler's stream to events of the slot machine, its orders to the compute thread.

No decisions: what a frame does, when to redial and what to answer is the slot machine's.
"""

import asyncio
import random
import secrets
from functools import partial
from typing import Any, Final

from meshkit.build import build_id
from meshkit.channel import open_channel
from meshkit.core import Dial
from meshkit.obs import Metrics
from meshkit.shell import Shell
from meshkit.types import ModelInfo
from meshkit.wire import Link
from worker_svc.clients import attach_worker
from worker_svc.compute import ComputeThread
from worker_svc.core.effects import Ran, Refresh, RefreshFailed, Run
from worker_svc.core.slots import SlotMachine, SlotMachineConfig
from worker_svc.core.table import PoolConfig
from worker_svc.core.work import Executor, StepOutcome

FAREWELL_S: Final = 2.0


class WorkerLoop:
    """One attachment to one scheduler, for life. Make it inside the event loop."""

    def __init__(
        self,
        executor: Executor,
        compute: ComputeThread,
        *,
        group: str,
        model: ModelInfo,
        pools: PoolConfig,
        scheduler: str,
        metrics: Metrics | None = None,
    ) -> None:
        boot = secrets.randbits(64) | 1
        config = SlotMachineConfig(group=group, boot=boot, build=build_id(), model=model, pools=pools)
        self.machine = SlotMachine(config, random.Random(secrets.randbits(128)))
        self.shell = Shell(self.machine, self._effect, metrics)
        self._executor = executor
        self._compute = compute
        self._channel = open_channel(scheduler)
        self._dials: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Dial and serve until cancelled."""
        try:
            await self.shell.run()
        finally:
            for task in self._dials:
                task.cancel()
            await asyncio.gather(*self._dials, return_exceptions=True)
            await self._channel.close()

    async def finish(self) -> None:
        """Say Bye, so that the scheduler places our requests elsewhere at once, and wait until it is sent."""
        self.shell.farewell("the worker is shutting down")
        if self._dials:
            await asyncio.wait(self._dials, timeout=FAREWELL_S)

    def _effect(self, effect: Any) -> None:
        match effect:
            case Run(work=work):
                self._compute.submit(partial(self._executor.run, work), self._ran)
            case Refresh(saves=saves):
                self._compute.submit(partial(self._executor.refresh, saves), partial(self._refreshed, saves))
            case Dial(conn=conn):
                dialling = self.shell.dial(conn, Link.WORKER_UP, partial(attach_worker, self._channel))
                task = asyncio.create_task(dialling)
                self._dials.add(task)
                task.add_done_callback(self._dials.discard)
            case _:
                raise AssertionError(f"unknown effect {effect}")

    def _ran(self, outcome: StepOutcome | None, error: Exception | None) -> None:
        self.shell.post(Ran(outcome, "" if error is None else f"{type(error).__name__}: {error}"))

    def _refreshed(self, saves: Any, _: None, error: Exception | None) -> None:
        if error is not None:
            self.shell.post(RefreshFailed(saves, f"{type(error).__name__}: {error}"))
