"""How request handlers see the mesh: start generations, take their effects, end them early.

`Mesh` is the interface; `gateway.mesh_client` implements it with the journal and gRPC, tests with deterministic
tokens. Calls return at once; effects arrive through the sink given at `start`, on the event loop.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.journal.events import Emit, Ended, Refused, Start
from meshkit.frames import SchedulerStatus
from meshkit.types import RequestId

Answer = Emit | Ended | Refused
Sink = Callable[[Answer], None]


@dataclass(frozen=True, slots=True)
class Instance:
    """One scheduler behind this gateway, for those who look at the mesh."""

    address: str
    attached: bool
    status: SchedulerStatus | None  # its last word
    open: int = 0  # choices that this gateway has there
    known_pages: int = 0  # pages of prompts that this gateway believes to be there


class Mesh(Protocol):
    """Where tokens come from."""

    @property
    def status(self) -> SchedulerStatus | None:
        """The scheduler's last word, of several the sum; None while no scheduler is attached."""

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Every scheduler, in the order of the configuration."""

    def start(self, start: Start, sink: Sink) -> None:
        """Open a request. Each choice ends with one Ended, or the whole request with one Refused."""

    def accepted(self, request_id: RequestId) -> bool:
        """Whether the scheduler has taken the request, so that it can be refused no more; or it has ended."""

    def client_gone(self, request_id: RequestId) -> None:
        """Nobody listens any more: cancel what is open. No more effects come. Harmless once all choices ended."""

    def stop_choice(self, request_id: RequestId, choice: int, keep: int) -> None:
        """A stop string ended the choice after `keep` ids. No Ended comes for it."""

    def abort(self, request_id: RequestId) -> None:
        """An operator takes the request back: its open choices end with ABORT."""

    async def flush_cache(self) -> tuple[int, int]:
        """Empty the prefix cache: (pages given back, requests that are open and prevented it)."""

    async def explain(self, page_keys: tuple[bytes, ...], tokens: int) -> list[dict[str, Any]]:
        """Why a prompt would be served from the prefix cache as far as it would, one answer per rank."""


class Mailbox:
    """Answers of all generations of one HTTP request, in arrival order; one reader. Made inside the event loop."""

    __slots__ = (
        "_answers",
        "_failure",
        "_idle",
        "_idle_s",
        "_last_s",
        "_loop",
        "_served",
        "_timer",
        "_waiter",
        "anew",
        "direct",
    )

    def __init__(self, idle_s: float) -> None:
        """`idle_s`: how long `take` waits for an answer before it says that none came."""
        self.direct: Callable[[Answer], bool] | None = None
        """Tried first while the reader has nothing to do: True if that was all the answer needed. Must not wait."""
        self.anew: Callable[[Answer], bool] | None = None
        """Takes the place of `direct` when the reader has taken answers itself."""
        self._answers: list[Answer] = []
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._last_s = 0.0  # when the reader began to wait, or was known to have been spared an answer
        self._served = False  # an answer was handled directly since the last look
        self._idle_s = idle_s
        self._idle = False
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, answer: Answer) -> None:
        """Hand an answer over. Never raises: what goes wrong with it is raised in the reader."""
        if self.direct is not None and self._waiter is not None:
            try:
                if self.direct(answer):
                    self._served = True
                    return
            except Exception as error:  # noqa: BLE001 - the mesh must not fail for one request; the reader does
                self._failure = error
        self._answers.append(answer)
        self.wake()

    def wake(self) -> None:
        """Let the reader look, also without a new answer."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def take(self) -> list[Answer] | None:
        """All answers there are, waiting for the first or a `wake`; None when nothing came for a while."""
        if not self._answers:
            waiter = self._waiter = self._loop.create_future()
            self._idle = False
            self._last_s = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(self._idle_s / 3, self._look)
            try:
                await waiter
            finally:
                self._waiter = None
            if self._idle:
                return None
        if self._failure is not None:
            raise self._failure
        answers, self._answers = self._answers, []
        self.direct = self.anew
        return answers

    def close(self) -> None:
        """Nobody takes any more."""
        self.direct = self.anew = None
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """One timer for many waits, and no clock read per answer: idle means up to a third longer than `idle_s`."""
        now = self._loop.time()
        if self._served:
            self._served, self._last_s = False, now
        left = self._last_s + self._idle_s - now
        if self._waiter is None or left > 0:
            self._timer = self._loop.call_later(min(max(left, self._idle_s / 4), self._idle_s / 3), self._look)
            return
        self._timer = None
        self._idle = True
        self.wake()
