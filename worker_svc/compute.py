"""The compute thread: runs jobs one after the other, in order.

Tensors are touched by this thread only. It is a daemon: a process that must go does not wait for a step.
"""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class ComputeThread:
    """Make it inside the event loop that is to get the results of `call`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after all earlier ones. It must not raise."""
        self._jobs.put(job)

    async def call(self, job: Callable[[], T]) -> T:
        """The job's result, or the error it raised."""
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - handed to the caller whole
                self._loop.call_soon_threadsafe(_fail, future, error)
            else:
                self._loop.call_soon_threadsafe(_resolve, future, result)

        self._jobs.put(run)
        return await future

    def stop(self, wait_s: float = 0.3) -> bool:
        """Let the thread end after what is queued; waits a bounded time. False if it is still at work."""
        self._jobs.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _resolve(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
