"""Server-sent events over aiohttp: headers, framing, keep-alive, and clients that read too slowly.

`write` returns at once while the socket keeps up. With more than 64 KiB unsent it waits, and what is generated in the
meantime travels in one event per choice. A client without progress for 30 s is cut off by `StallGuard`, one sweep for
all streams instead of a timer per token. What the events say is the callers' matter.
"""

import asyncio
from collections.abc import Callable, Mapping

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

_encode = msgspec.json.Encoder().encode


def event(value: object) -> bytes:
    """One event holding `value` as JSON."""
    return b"data: " + _encode(value) + b"\n\n"


def named_event(kind: str, value: object) -> bytes:
    """One event with a name."""
    return b"event: " + kind.encode() + b"\ndata: " + _encode(value) + b"\n\n"


def json_text(text: str) -> bytes:
    """A JSON string literal."""
    return _encode(text)


class StallGuard:
    """Cuts connections whose client has made no progress for `seconds`, or is more than `backlog` steps behind."""

    def __init__(self, seconds: float, backlog: int) -> None:
        self._seconds = seconds
        self._backlog = backlog
        self._streams: set[EventStream] = set()
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

    def __init__(
        self, request: web.Request, guard: StallGuard, headers: Mapping[str, str], behind: Callable[[], int]
    ) -> None:
        """`behind` says how many steps wait to be written."""
        self.behind = behind
        self._request = request
        self._guard = guard
        self._response = web.StreamResponse(headers={**HEADERS, **headers})
        self._transport: asyncio.Transport | None = None
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
        await self._write_waiting(data)  # the headers leave with it
        if chunked:
            self._transport = self._request.transport

    @property
    def keeps_up(self) -> bool:
        """True while `write_now` may be used."""
        transport = self._transport
        return transport is not None and transport.get_write_buffer_size() <= BUFFER and not transport.is_closing()

    def write_now(self, data: bytes) -> None:
        """Write whole events without waiting; only while the client keeps up."""
        assert self._transport is not None
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def write(self, data: bytes) -> None:
        """Write whole events; waits only while the client is behind."""
        if self.keeps_up:
            self.write_now(data)
        else:
            await self._write_waiting(data)

    async def end(self) -> None:
        """The end of the body."""
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
        self.blocked_since = asyncio.get_running_loop().time()
        await self._response.write(data)
        self.blocked_since = None
