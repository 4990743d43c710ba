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
    """Answers of all generations of one HTTP request, in arrival order; one reader. Made inside the event loop."""

    def __init__(self, idle_s: float) -> None:
        """`idle_s`: how long `take` waits for an answer before it returns none."""
        self._answers: list[Answer] = []
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since = 0.0
        self._idle_s = idle_s
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, answer: Answer) -> None:
        self._answers.append(answer)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            waiter.set_result(None)

    async def take(self) -> list[Answer]:
        """All answers there are, waiting for the first; empty when none came for a while."""
        if not self._answers:
            waiter = self._waiter = self._loop.create_future()
            self._waiting_since = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(self._idle_s, self._look)
            try:
                await waiter
            finally:
                self._waiter = None
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Nobody takes any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """One timer for many waits: a wait that is shorter than the period costs nothing."""
        left = self._waiting_since + self._idle_s - self._loop.time()
        if self._waiter is None or left > 0:
            self._timer = self._loop.call_later(max(left, self._idle_s / 4), self._look)
            return
        self._timer = None
        waiter, self._waiter = self._waiter, None
        waiter.set_result(None)
