"""Server-sent events over aiohttp: headers, framing, keep-alive, and clients that read too slowly.

`write` returns at once while the socket keeps up. With more than 64 KiB unsent it waits, and what is generated in the
meantime travels in one event per choice. A client without progress for 30 s is cut off by `StallGuard`, one sweep for
all streams instead of a timer per token. `Outbox` writes the tokens of a step to all their sockets in one go. What the
events say is the callers' matter.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import lru_cache

import msgspec
from aiohttp import HttpVersion11, web

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
BUFFER = 64 * 1024
"""Unsent bytes above which a stream waits for its client."""
KEEP_ALIVE = b": keep-alive\n\n"
REST = 8
"""How many times as long as it wrote does an `Outbox` rest, so that writing takes a ninth of the time at most ..."""
MERGE_SECONDS = 0.02
"""... but no longer than this: how late a token may be for the sake of fewer writes."""

_encode = msgspec.json.Encoder().encode


def event(value: object) -> bytes:
    """One event holding `value` as JSON."""
    return b"data: " + _encode(value) + b"\n\n"


def named_event(kind: str, value: object) -> bytes:
    """One event with a name."""
    return b"event: " + kind.encode() + b"\ndata: " + _encode(value) + b"\n\n"


@lru_cache(256)
def shared(data: bytes) -> bytes:
    """One object for equal bytes: what all streams have alike stays in the processor's caches."""
    return data


def json_text(text: str) -> bytes:
    """A JSON string literal."""
    return _encode(text)


class Outbox:
    """Writes what a step has brought to many streams in one go.

    Parsing all rows first and writing them all then is cheaper than by turns: either work finds its code in the
    processor's caches. Tokens that come while it rests after writing, which is only when steps follow each other faster
    than the loop can well write them, travel with those before them.
    """

    def __init__(self) -> None:
        self._streams: list[EventStream] = []
        self._rests_until_s = 0.0

    def add(self, stream: "EventStream") -> None:
        """The stream has something to send, and had nothing before."""
        if not self._streams:
            rest_s = self._rests_until_s - time.monotonic()
            loop = asyncio.get_running_loop()
            if rest_s > 0:
                loop.call_later(rest_s, self.flush)
            else:
                loop.call_soon(self.flush)
        self._streams.append(stream)

    def flush(self) -> None:
        began_s = time.monotonic()
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.flush()
        ended_s = time.monotonic()
        self._rests_until_s = ended_s + min(REST * (ended_s - began_s), MERGE_SECONDS)


class StallGuard:
    """Cuts connections whose client has made no progress for `seconds`, or is more than `backlog` steps behind."""

    def __init__(self, seconds: float, backlog: int) -> None:
        self._seconds = seconds
        self._backlog = backlog
        self._streams: set[EventStream] = set()
        self.outbox = Outbox()
        self.cut = 0

    def add(self, stream: "EventStream") -> None:
        self._streams.add(stream)

    def discard(self, stream: "EventStream") -> None:
        self._streams.discard(stream)

    async def run(self) -> None:
        """Sweep for ever; cancel to end."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self._seconds / 4))
            now = loop.time()
            for stream in [s for s in self._streams if s.blocked_since is not None]:
                assert stream.blocked_since is not None
                if now - stream.blocked_since > self._seconds or stream.behind() > self._backlog:
                    self.cut += 1
                    stream.abort()


class EventStream:
    """The response side of one streamed request.

    Events go straight to the transport in HTTP chunks of our own while the client keeps up, which halves the cost per
    event; the response object sends headers, waits for slow clients and ends the body.
    """

    __slots__ = (
        "_guard",
        "_outbox",
        "_request",
        "_response",
        "_transport",
        "_unsent",
        "behind",
        "blocked_since",
        "keeps_up",
        "started",
    )

    def __init__(
        self, request: web.Request, guard: StallGuard, headers: Mapping[str, str], behind: Callable[[], int]
    ) -> None:
        """`behind` says how many steps wait to be written."""
        self.behind = behind
        self._request = request
        self._guard = guard
        self._outbox = guard.outbox
        self._response = web.StreamResponse(headers={**HEADERS, **headers})
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []  # pieces of whole events, until the outbox flushes
        self.keeps_up = False
        """True while `send` may be used."""
        self.blocked_since: float | None = None
        self.started = False

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def start(self, data: bytes) -> None:
        """Send status 200, the headers and the first events; from here on errors travel as events."""
        assert data and not self.started
        self.started = True
        chunked = self._request.version >= HttpVersion11
        if chunked:
            self._response.enable_chunked_encoding()
        await self._response.prepare(self._request)
        self._guard.add(self)
        if chunked:
            self._transport = self._request.transport
        await self._write_waiting(data)  # the headers leave with it

    def send(self, *pieces: bytes) -> None:
        """Send whole events, in pieces, with the others of this step; only while the client keeps up."""
        if not self._unsent:
            self._outbox.add(self)
        self._unsent += pieces

    def flush(self) -> None:
        """Hand over to the socket what `send` has gathered."""
        pieces, transport = self._unsent, self._transport
        if not pieces:
            return
        assert transport is not None
        self._unsent = []
        if transport.is_closing():
            self.keeps_up = False  # the next one waits, and hears of it
            return
        transport.write(b"".join((b"%x\r\n" % sum(map(len, pieces)), *pieces, b"\r\n")))
        self.keeps_up = transport.get_write_buffer_size() <= BUFFER

    async def write(self, data: bytes) -> None:
        """Write whole events, after those before; waits only while the client is behind."""
        self.flush()
        if self.keeps_up:
            self._unsent.append(data)
            self.flush()
        else:
            await self._write_waiting(data)

    async def end(self) -> None:
        """The end of the body."""
        self.flush()
        self.blocked_since = asyncio.get_running_loop().time()
        await self._response.write_eof()
        self.blocked_since = None

    def abort(self) -> None:
        """Drop the connection without farewell; the handler is cancelled by the server."""
        transport = self._request.transport
        if transport is not None:
            transport.abort()

    def close(self) -> None:
        self._guard.discard(self)

    async def _write_waiting(self, data: bytes) -> None:
        self.keeps_up = False
        self.blocked_since = asyncio.get_running_loop().time()
        await self._response.write(data)
        self.blocked_since = None
        self.keeps_up = self._transport is not None and self._transport.get_write_buffer_size() <= BUFFER
