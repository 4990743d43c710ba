"""Server-sent events over aiohttp: headers, framing, keep-alive, and clients that read too slowly.

`write` returns at once while the socket keeps up. Above 64 KiB of unsent bytes it waits, and what is generated in the
meantime travels in one event per choice. A client without progress for 30 s is cut off by `StallGuard`, one sweep for
all streams instead of a timer per token. What the events say is the callers' matter.
"""

import asyncio
from collections.abc import Mapping

import msgspec
from aiohttp import web

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encode = msgspec.json.Encoder().encode


def event(value: object) -> bytes:
    """One event holding `value` as JSON."""
    return b"data: " + _encode(value) + b"\n\n"


def json_text(text: str) -> bytes:
    """A JSON string literal."""
    return _encode(text)


class StallGuard:
    """Cuts connections whose client has not taken a byte for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
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
                if now - stream.blocked_since > self._seconds:
                    self.cut += 1
                    stream.abort()


class EventStream:
    """The response side of one streamed request."""

    def __init__(self, request: web.Request, guard: StallGuard, headers: Mapping[str, str]) -> None:
        self._request = request
        self._guard = guard
        self._response = web.StreamResponse(headers={**HEADERS, **headers})
        self.blocked_since: float | None = None
        self.started = False

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def start(self) -> None:
        """Send status 200 and the headers; from here on errors travel as events."""
        if not self.started:
            self.started = True
            await self._response.prepare(self._request)
            self._guard.add(self)

    async def write(self, data: bytes) -> None:
        """Write whole events; waits only while the client is behind."""
        self.blocked_since = asyncio.get_running_loop().time()
        await self._response.write(data)
        self.blocked_since = None

    async def end(self) -> None:
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
