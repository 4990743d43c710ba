"""How request handlers see the mesh: start generations, take their effects, end them early.

`Mesh` is the interface; `gateway.mesh_client` implements it with the journal and gRPC, tests with deterministic
tokens. Calls return at once; effects arrive through the sink given at `start`, on the event loop.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from gateway.journal.events import Emit, Ended, Refused, Start
from meshkit.frames import SchedulerStatus
from meshkit.types import RequestId

Answer = Emit | Ended | Refused
Sink = Callable[[Answer], None]


class Mesh(Protocol):
    """Where tokens come from."""

    @property
    def status(self) -> SchedulerStatus | None:
        """The scheduler's last word; None while no scheduler is attached."""

    def start(self, start: Start, sink: Sink) -> None:
        """Open a request. Each choice ends with one Ended, or the whole request with one Refused."""

    def client_gone(self, request_id: RequestId) -> None:
        """Nobody listens any more: cancel what is open. No more effects come. Harmless once all choices ended."""

    def stop_choice(self, request_id: RequestId, choice: int, keep: int) -> None:
        """A stop string ended the choice after `keep` ids. No Ended comes for it."""

    def abort(self, request_id: RequestId) -> None:
        """An operator takes the request back: its open choices end with ABORT."""


class Mailbox:
    """Answers of all generations of one HTTP request, in arrival order; one reader."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._wake()

    async def take(self, timeout_s: float) -> list[Answer]:
        """All answers there are, waiting for the first; empty when `timeout_s` passed without one."""
        if not self._answers:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                timer.cancel()
        answers, self._answers = self._answers, []
        return answers

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
