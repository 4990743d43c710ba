"""Steps on their way through the executor: launched in order on the compute thread, waited for on a second thread.

So a step is launched while the one before it runs, whatever the event loop is doing. After a failure, steps of the same
era that are still to be launched are answered with an error instead. Answers come to the event loop in order.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from worker_svc.compute import ComputeThread
from worker_svc.core.effects import Ran, Run
from worker_svc.core.work import Executor, StepOutcome

BEHIND = "a step before it failed"

log = logging.getLogger(__name__)


class Pipeline:
    """Make it inside the event loop; `done` is called there."""

    def __init__(self, executor: Executor, compute: ComputeThread, done: Callable[[Ran], None]) -> None:
        self._executor = executor
        self._compute = compute
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._failed_era = -1
        self._launched: SimpleQueue[tuple[int, Any, str] | None] = SimpleQueue()
        threading.Thread(target=self._collect, name="collect", daemon=True).start()

    def submit(self, run: Run) -> None:
        """Launch behind everything submitted before."""
        self._compute.submit(lambda: self._launch(run))

    def close(self) -> None:
        """Let the collecting thread end after what was launched."""
        self._launched.put(None)

    def _launch(self, run: Run) -> None:
        handle, error = None, BEHIND
        if run.era != self._failed_era:
            try:
                handle, error = self._executor.launch(run.work), ""
            except Exception as failure:
                log.exception("a step failed")
                error = self._failed(run.era, failure)
        self._launched.put((run.era, handle, error))

    def _collect(self) -> None:
        while (launched := self._launched.get()) is not None:
            era, handle, error = launched
            outcome: StepOutcome | None = None
            if not error:
                try:
                    outcome = self._executor.collect(handle)
                except Exception as failure:
                    log.exception("a step failed")
                    error = self._failed(era, failure)
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._done, Ran(outcome, error))

    def _failed(self, era: int, failure: Exception) -> str:
        self._failed_era = era
        return f"{type(failure).__name__}: {failure}"
