"""Drives a pure core inside one event loop: I/O becomes events, effects become I/O. Holds no decisions.

Every service's shell is this plus its own extra effects. A core that raises is a bug: the exception is kept and raised
out of `run`, which ends the process; its peers resume from their journals.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal

import grpc

from meshkit.clock import Clock, MonotonicClock
from meshkit.core import Close, Closed, Core, Count, Opened, Received, Send, Tick, WakeAt
from meshkit.errors import MeshError, QueueFull, WireError
from meshkit.frames import Bye, Envelope
from meshkit.interceptors import abort_with
from meshkit.obs import Metrics, kv
from meshkit.streams import LAST_WORDS_S, Duplex, SendQueue, run_stream
from meshkit.wire import Link

Peer = Literal["gateway", "worker", "scheduler"]
# Any: one shell carries streams of several message types.
Context = grpc.aio.ServicerContext[Any, Any]
Call = grpc.aio.StreamStreamCall[Any, Any]

_OWN: Final = frozenset({Send, Close, WakeAt, Count})  # effects that are carried out here
MAX_WAIT_NS: Final = 3600 * 10**9  # a timer further away than that is set again when it fires

log = logging.getLogger(__name__)


class Shell:
    """`extra(effect)` carries out the effects that only this service has."""

    def __init__(
        self, core: Core, extra: Callable[[Any], None], metrics: Metrics | None = None, clock: Clock | None = None
    ) -> None:
        self.core = core
        self.metrics = metrics or Metrics()
        self._clock = clock or MonotonicClock()
        self._extra = extra
        self._queues: dict[int, SendQueue] = {}
        self._attach_ids: dict[int, int] = {}  # as the core uses them, for the Bye of a shutdown
        self._conns = 0
        self._opened: set[int] = set()
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._counted = self.metrics.counter(
            "v4mesh_core_events_total", "What the core counted", event=None, fault=("0", "1")
        )
        for name in core.cannot_happen:
            self._counted.add(0, event=name, fault="1")

    async def run(self) -> None:
        """Returns never; raises what the core raised. After it the core gets no more events."""
        try:
            self.post(Tick())
            await self._failed
        finally:
            self._stopped = True
            if self._timer is not None:
                self._timer.cancel()

    def post(self, event: Any) -> None:
        """Hand one event to the core and carry out its effects, in order. Any: event types are each core's own."""
        if self._stopped or self._failed.done():
            return
        try:
            for effect in self.core.handle(event, self._clock.now_ns()):
                if type(effect) in _OWN:
                    self._carry_out(effect)
                else:
                    self._extra(effect)  # at once: a gateway has one for every token
        except Exception as error:
            log.exception("the core failed on %s", type(event).__name__)
            self._failed.set_exception(error)

    def _carry_out(self, effect: Any) -> None:
        match effect:
            case Send(conn=conn, envelope=envelope):
                if (queue := self._queues.get(conn)) is not None:
                    if envelope.attach_id:
                        self._attach_ids[conn] = envelope.attach_id
                    queue.put(envelope)
            case Close(conn=conn):
                if (queue := self._queues.get(conn)) is not None:
                    queue.close()
            case WakeAt(at_ns=at_ns):
                self._wake_at(at_ns)
            case Count(name=name, amount=amount, fault=fault):
                self._counted.add(amount, event=name, fault=str(int(fault)))
                if fault:
                    log.error("this cannot happen: %s", name)

    def _wake_at(self, at_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait_ns = min(max(0, at_ns - self._clock.now_ns()), MAX_WAIT_NS)
        self._timer = asyncio.get_running_loop().call_later(wait_ns / 1e9, self._due, at_ns)

    def _due(self, at_ns: int) -> None:
        # Event loops round to milliseconds and may be early; the core counts on its own time having come.
        if self._clock.now_ns() < at_ns:
            self._wake_at(at_ns)
        else:
            self.post(Tick())

    # ---- streams ----------------------------------------------------------------------------------------------------

    def reserve(self, conn: int, link: Link) -> SendQueue:
        """The send queue of a stream about to open; from now on the core may close it."""
        queue = self._queues[conn] = SendQueue(link)
        return queue

    async def carry(self, conn: int, peer: Peer, stream: Duplex) -> str:
        """An open stream until it ends; returns why. The caller goes on to `release`, whatever happens."""
        self._opened.add(conn)
        log.info("stream opened", extra=kv(conn=conn, kind=peer))
        self.post(Opened(conn, peer))
        return await run_stream(stream, self._queues[conn], lambda envelope: self.post(Received(conn, envelope)))

    def release(self, conn: int, reason: str) -> None:
        """The stream is gone: forget it and tell the core, once."""
        del self._queues[conn]
        self._attach_ids.pop(conn, None)
        if conn in self._opened:
            self._opened.remove(conn)
            log.info("stream closed", extra=kv(conn=conn, reason=reason))
        self.post(Closed(conn, reason))

    async def serve(self, peer: Peer, link: Link, context: Context) -> None:
        """A stream that a peer dialled, from its RPC handler: until either side ends it."""
        self._conns += 1
        conn = self._conns
        self.reserve(conn, link)
        reason = "closed"
        try:
            await context.send_initial_metadata(())  # tells the dialling side that the stream is open
            reason = await self.carry(conn, peer, context)
        except (WireError, QueueFull) as error:
            reason = reason_of(error)
            await abort_with(context, error)
        except asyncio.CancelledError:
            reason = "the peer went away"
            raise
        finally:
            self.release(conn, reason)

    def dial(self, conn: int, link: Link, start: Callable[[], Call]) -> Coroutine[Any, Any, None]:
        """Carry out a Dial: `start()` makes the call. Returns what the caller must run as a task of its own.

        Not a coroutine function: the core may close the stream from this moment on.
        """
        self.reserve(conn, link)
        return self._dial(conn, start)

    async def _dial(self, conn: int, start: Callable[[], Call]) -> None:
        queue, call, reason = self._queues[conn], start(), "closed"
        try:
            opening = asyncio.ensure_future(call.wait_for_connection())
            await asyncio.wait((opening, queue.cut), return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                opening.result()
                reason = await self.carry(conn, "scheduler", call)
                await call.done_writing()
                await asyncio.wait((asyncio.ensure_future(call.code()),), timeout=LAST_WORDS_S)
            else:
                opening.cancel()
        except (grpc.aio.AioRpcError, MeshError, asyncio.InvalidStateError) as error:
            reason = reason_of(error)
        finally:
            call.cancel()
            self.release(conn, reason)

    def farewell(self, reason: str) -> None:
        """Bye on every attached stream, then close it: the last thing before the process ends."""
        for conn, queue in self._queues.items():
            if (attach_id := self._attach_ids.get(conn)) is not None:
                queue.put(Envelope(attach_id, Bye(reason)))
            queue.close()


def reason_of(error: BaseException) -> str:
    """Why a stream ended, in words that fit a log line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    if isinstance(error, MeshError):
        return f"{error.code}: {error.message}"
    return type(error).__name__
