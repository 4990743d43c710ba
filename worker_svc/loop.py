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
from meshkit.obs import Metrics, Tracing
from meshkit.quiet import quiet_collector
from meshkit.shell import Shell
from meshkit.types import ModelInfo
from meshkit.wire import Link
from worker_svc.clients import attach_worker
from worker_svc.compute import ComputeThread
from worker_svc.core.effects import Freed, Run
from worker_svc.core.slots import SlotMachine, SlotMachineConfig
from worker_svc.core.table import PoolConfig
from worker_svc.core.work import Executor
from worker_svc.masks.book import MaskBook
from worker_svc.masks.stream import MaskStream
from worker_svc.pipeline import Pipeline
from worker_svc.spans import SlotSpans

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
        grammar: str = "",
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        boot = secrets.randbits(64) | 1
        config = SlotMachineConfig(group=group, boot=boot, build=build_id(), model=model, pools=pools)
        self.machine = SlotMachine(config, random.Random(secrets.randbits(128)))
        self.shell = Shell(SlotSpans(self.machine, tracing or Tracing()), self._effect, metrics)
        self._pipeline = Pipeline(executor, compute, self.shell.post)
        self._masks: MaskStream | None = None
        if grammar:
            book = MaskBook(model.vocab_size, model.eos_ids, self.shell.metrics)
            self._masks = MaskStream(
                book,
                grammar,
                group=f"{group}@{scheduler}",  # unique on the host, whatever else it serves
                boot=boot,
                vocab_size=model.vocab_size,
                slots=pools.slots * pools.ranks,
                max_verify=pools.max_verify,
                metrics=self.shell.metrics,
            )
            executor.use_masks(book)
        self._channel = open_channel(scheduler)
        self._dials: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False

    async def run(self) -> None:
        """Dial and serve until cancelled."""
        if self._masks is not None:
            self._tasks.add(asyncio.create_task(self._masks.run()))
        try:
            async with quiet_collector(lambda: self.machine.busy):
                await self.shell.run()
        finally:
            tasks = (*self._dials, *self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._channel.close()
            self._pipeline.close()

    async def finish(self) -> None:
        """Say Bye, so that the scheduler places our requests elsewhere at once, and wait until it is sent.

        It must stay the last word: a worker that attached again and then ended would have crashed.
        """
        self._leaving = True
        self.shell.farewell("the worker is shutting down")
        if self._dials:
            await asyncio.wait(self._dials, timeout=FAREWELL_S)

    def _effect(self, effect: Any) -> None:
        match effect:
            case Run():
                self._pipeline.submit(effect)
            case Freed(slot=slot, slot_gen=slot_gen):
                if self._masks is not None:
                    self._masks.book.free(slot, slot_gen)
            case Dial(conn=conn):
                if self._leaving:
                    return
                dialling = self.shell.dial(conn, Link.WORKER_UP, partial(attach_worker, self._channel))
                task = asyncio.create_task(dialling)
                self._dials.add(task)
                task.add_done_callback(self._dials.discard)
            case _:
                raise AssertionError(f"unknown effect {effect}")
