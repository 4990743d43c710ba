"""The journal's shell: carries out its effects over gRPC and feeds it what happens, on the gateway's event loop.

One bidirectional stream to the scheduler at a time and unary Submits beside it. All decisions are the journal's; the
common effects are `meshkit.shell`'s.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
from meshpb.v1 import scheduler_pb2
from meshpb.v1.scheduler_pb2_grpc import SchedulerStub

from gateway.errors import unavailable
from gateway.journal.entry import resumed
from gateway.journal.events import AbortRequest, ClientGone, Emit, Ended, Refused, Start, StopChoice
from gateway.journal.journal import Journal
from gateway.mesh import Instance, Sink
from meshkit import wire
from meshkit.channel import open_channel
from meshkit.clock import MonotonicClock
from meshkit.core import Call, Dial, Replied
from meshkit.errors import MeshError
from meshkit.frames import SchedulerStatus, Verdict
from meshkit.obs import Metrics
from meshkit.shell import Shell, reason_of
from meshkit.types import RequestId
from meshkit.wire import Link

_FAREWELL_SECONDS = 1.0
_ASK_SECONDS = 10.0
_JUDGED = {Verdict.ACCEPTED, Verdict.BAD_GRAMMAR}

log = logging.getLogger(__name__)


class MeshClient:
    """A `Mesh` that reaches a real scheduler. Made inside an event loop; `run` must be running."""

    def __init__(
        self,
        journal: Journal,
        scheduler: str,
        metrics: Metrics | None = None,
        on_grammar: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`scheduler` is its address; `on_grammar` hears how long each verdict on a grammar took."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called, perhaps more than once, when there is no attachment any more and before one is tried again."""
        self._on_grammar = on_grammar
        self._journal = journal
        self._scheduler = scheduler
        self._clock = MonotonicClock()
        self._shell = Shell(journal, self._carry_out, metrics, self._clock)
        self._sinks: dict[RequestId, Sink] = {}  # who hears of a request
        self._open: dict[RequestId, set[int]] = {}  # and which of its choices have not ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False
        self._stub: Any = None  # Any: the generated stub is typed for the blocking API

    # ---- what handlers call -----------------------------------------------------------------------------------------

    @property
    def status(self) -> SchedulerStatus | None:
        """The last word of the scheduler attached, or of the one lost (not ready then)."""
        status = self._journal.status
        return status if self._journal.attached or status.model is not None else None

    @property
    def attached(self) -> bool:
        return self._journal.attached

    @property
    def instances(self) -> tuple[Instance, ...]:
        return (Instance(self._scheduler, self._journal.attached, self.status),)

    def start(self, start: Start, sink: Sink) -> None:
        ended = {index for index, ids in enumerate(start.emitted) if ids is None}
        self._sinks[start.request_id] = sink
        self._open[start.request_id] = set(range(start.n)) - ended
        self._shell.post(start)

    def take_back(self, request_id: RequestId) -> Start | None:
        """An open request as one that can go on at another scheduler; here it is forgotten. None if it has ended."""
        entry = self._journal.entries.get(request_id)
        if entry is None:
            return None
        start = resumed(entry, self._clock.now_ns())
        self.client_gone(request_id)
        return start

    def accepted(self, request_id: RequestId) -> bool:
        return self._journal.accepted(request_id)

    def client_gone(self, request_id: RequestId) -> None:
        self._forget(request_id)
        self._shell.post(ClientGone(request_id))

    def stop_choice(self, request_id: RequestId, choice: int, keep: int) -> None:
        self._shell.post(StopChoice(request_id, choice, keep))
        self._closed(request_id, choice)

    def abort(self, request_id: RequestId) -> None:
        self._shell.post(AbortRequest(request_id))

    async def flush_cache(self) -> tuple[int, int]:
        reply = await self._ask("FlushCache", scheduler_pb2.FlushCacheRequest())
        return reply.pages, reply.open

    async def explain(self, page_keys: tuple[bytes, ...], tokens: int) -> list[dict[str, Any]]:
        request = scheduler_pb2.ExplainRequest(tokens=tokens, page_keys=b"".join(page_keys))
        reply = await self._ask("Explain", request)
        return [
            {
                "group": it.group,
                "rank": it.rank,
                "pages": {"asked": it.asked, "present": it.present, "servable": it.servable, "idle": it.idle},
                "why": it.why,
                "first_missing": it.first_missing if it.first_missing >= 0 else None,
                "missing_classes": list(it.missing_classes),
                "tier": it.tier or None,
                "start": {"action": it.action, "token": it.start},
            }
            for it in reply.ranks
        ]

    async def _ask(self, name: str, request: Any) -> Any:
        """A question outside of any request; an ApiError if the scheduler cannot be asked."""
        if self._stub is None:
            raise unavailable("no scheduler is attached", retry_after_s=2)
        try:
            return await getattr(self._stub, name)(request, timeout=_ASK_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.warning("%s failed: %s", name, reason_of(error))
            raise unavailable("the scheduler did not answer", retry_after_s=2) from error

    # ---- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Dial and keep going until cancelled; says Bye on the way out. Raises what the journal raised."""
        async with open_channel(self._scheduler) as channel:
            self._stub = SchedulerStub(channel)
            try:
                await self._shell.run()
            finally:
                await self._leave()

    async def _leave(self) -> None:
        self._leaving = True
        self._shell.farewell("the gateway leaves")
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=_FAREWELL_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- effects ----------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: Any) -> None:
        match effect:
            case Emit(request_id=request_id):
                self._sinks[request_id](effect)
            case Ended(request_id=request_id, choice=choice):
                self._sinks[request_id](effect)
                self._closed(request_id, choice)
            case Refused(request_id=request_id):
                sink = self._sinks[request_id]
                self._forget(request_id)
                sink(effect)
            case Call():
                self._spawn(self._submit(effect))
            case Dial(conn=conn):
                if not self._leaving:
                    self.on_lost()
                    self._spawn(self._shell.dial(conn, Link.GATEWAY_UP, self._stub.AttachGateway))
            case _:
                raise AssertionError(f"the journal has no effect {effect!r}")

    def _closed(self, request_id: RequestId, choice: int) -> None:
        """A choice has ended; with the last one nothing more comes."""
        left = self._open.get(request_id)
        if left is not None:
            left.discard(choice)
            if not left:
                self._forget(request_id)

    def _forget(self, request_id: RequestId) -> None:
        self._sinks.pop(request_id, None)
        self._open.pop(request_id, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, call: Call) -> None:
        """One Submit. Whatever goes wrong leaves the outcome unknown; the journal tries the same key again."""
        reply = None
        asked_s = time.monotonic()
        try:
            message = await self._stub.Submit(wire.encode_submit(call.request), timeout=call.timeout_ms / 1000)
            reply = wire.decode_submit_reply(message)
            if call.request.grammar is not None and reply.verdict in _JUDGED:
                self._on_grammar(time.monotonic() - asked_s)
        except (MeshError, grpc.aio.AioRpcError) as error:
            log.warning("Submit failed: %s", reason_of(error))
        self._shell.post(Replied(call.call, reply))
