"""Lines of JSON between the parent's hub and its gateways: questions with a number, answers with the same number.

Both sides ask and both answer. Whoever does not answer in time is left out; a broken line ends that connection.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final

import msgspec

LONGEST_LINE: Final = 8 << 20
ANSWER_S: Final = 1.0
MAX_OPEN: Final = 1024  # questions of one connection that wait for their answer

log = logging.getLogger("gateway.siblings")

Answerer = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""(what is asked, its arguments) -> the answer, JSON either way."""


class _Line(msgspec.Struct, omit_defaults=True):
    number: int
    ask: str = ""  # empty: this is an answer
    with_: dict[str, Any] = msgspec.field(name="with", default_factory=dict)
    answer: Any = None


_decode = msgspec.json.Decoder(_Line).decode
_encode = msgspec.json.Encoder().encode


class Talk:
    """One connection, used by one event loop. `run` reads until it ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: Answerer) -> None:
        self._reader, self._writer, self._answers = reader, writer, answers
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, what: str, **arguments: Any) -> Any:
        """The other side's answer. ConnectionError or TimeoutError if there is none."""
        async with asyncio.timeout(ANSWER_S):
            return await self.ask_patiently(what, **arguments)

    async def ask_patiently(self, what: str, **arguments: Any) -> Any:
        """The same, however long it takes."""
        if len(self._waiting) >= MAX_OPEN:
            raise ConnectionError(f"{MAX_OPEN} questions wait for an answer")
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        waiting.add_done_callback(_look_at)  # whoever asked may have failed to send, and never comes to wait
        try:
            await self._send(_Line(number, what, arguments))
            return await waiting
        finally:
            del self._waiting[number]

    async def run(self) -> None:
        """Read until the other side ends the connection."""
        try:
            while line := await self._reader.readline():
                self._take(_decode(line))
        except ConnectionError:
            log.debug("a process is gone while it was told something")
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("a connection among gateway processes ends: %s", type(error).__name__)
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionError("the other side is gone"))
            for task in self._tasks:
                task.cancel()
            self._writer.close()
            with suppress(OSError, asyncio.CancelledError):
                await self._writer.wait_closed()

    def _take(self, line: _Line) -> None:
        if line.ask:
            task = asyncio.create_task(self._reply(line))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (waiting := self._waiting.get(line.number)) is not None and not waiting.done():
            waiting.set_result(line.answer)

    async def _reply(self, line: _Line) -> None:
        with suppress(ConnectionError, TimeoutError):
            answer = await self._answers(line.ask, line.with_)
            await self._send(_Line(line.number, answer=answer))

    async def _send(self, line: _Line) -> None:
        self._writer.write(_encode(line) + b"\n")
        await self._writer.drain()


def _look_at(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()
