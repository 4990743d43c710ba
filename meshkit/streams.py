"""One long-lived stream of frames, either end of it: a bounded send queue, a reader and a writer.

Shells put frames and get frames; nothing here decides. A peer that does not read lets the queue grow to its bound and
is then cut: memory stays bounded whatever a peer does. A frame that breaks the contract ends the stream (WireError).
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc

from meshkit.errors import QueueFull
from meshkit.frames import Envelope
from meshkit.wire import Link, StreamMessage, decode, encode

MAX_QUEUE_BYTES: Final = 32 << 20  # a dump of 1M tokens' slots fits; a peer silent for seconds does not
LAST_WORDS_S: Final = 0.5  # how long a closed stream may take to send what is queued


class Duplex(Protocol):
    """What a servicer context and a client call have in common. Any: their stubs are generic over the messages."""

    async def read(self) -> Any: ...

    async def write(self, message: Any, /) -> None: ...


class SendQueue:
    """Frames on their way out, in order. `put` never waits; make it inside the event loop."""

    def __init__(self, link: Link, max_bytes: int = MAX_QUEUE_BYTES) -> None:
        self._link = link
        self._max_bytes = max_bytes
        self._messages: deque[tuple[StreamMessage, int]] = deque()
        self._bytes = 0
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None  # of `pump`, while there is nothing to write
        self._closed = False
        self.overflowed = False
        self.cut: asyncio.Future[None] = self._loop.create_future()  # done: end the stream at once

    def put(self, envelope: Envelope) -> None:
        """Queue a frame. Beyond the bound the stream is cut and nothing more is taken."""
        if self._closed or self.cut.done():
            return
        message = encode(envelope, self._link)
        size = message.ByteSize()
        if self._bytes + size > self._max_bytes:
            self.overflowed = True
            self._cut()
            return
        self._bytes += size
        self._messages.append((message, size))
        self._wake()

    def close(self) -> None:
        """No more frames; what is queued is still sent, if the peer takes it soon."""
        if not self._closed:
            self._closed = True
            self._wake()
            self._loop.call_later(LAST_WORDS_S, self._cut)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _cut(self) -> None:
        if not self.cut.done():
            self.cut.set_result(None)

    async def pump(self, stream: Duplex) -> None:
        """Write until closed and empty."""
        while True:
            while self._messages:
                message, size = self._messages.popleft()
                await stream.write(message)
                self._bytes -= size
            if self._closed:
                return
            self._waiting = self._loop.create_future()  # an Event costs three times as much, in every step
            await self._waiting


async def run_stream(stream: Duplex, queue: SendQueue, receive: Callable[[Envelope], None]) -> str:
    """Carry frames both ways until one side ends; returns why. WireError, QueueFull and RPC errors are raised."""
    reader = asyncio.create_task(_read(stream, receive))
    writer = asyncio.create_task(queue.pump(stream))
    try:
        await asyncio.wait((reader, writer, queue.cut), return_when=asyncio.FIRST_COMPLETED)
        if queue.overflowed:
            raise QueueFull("the peer does not read its stream")
        for task in (reader, writer):
            if task.done():
                task.result()
        if not reader.done():
            return "closed here"
        queue.close()
        await asyncio.wait((writer,), timeout=LAST_WORDS_S)
        return "the peer ended the stream"
    finally:
        for task in (reader, writer):
            task.cancel()
        await asyncio.gather(reader, writer, return_exceptions=True)


async def _read(stream: Duplex, receive: Callable[[Envelope], None]) -> None:
    while (message := await stream.read()) is not grpc.aio.EOF:
        receive(decode(message))
