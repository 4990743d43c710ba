"""A TCP relay in user space that breaks the way networks do: black hole, half-open, one way, slow.

Between a dialling service and the scheduler. What a mode holds back is lost only with the connection: bytes of a TCP
stream are late or the stream is dead, never missing in its middle, so a healed hole delivers what was underway.
"""

import asyncio
import contextlib
from enum import Enum
from typing import Final

CHUNK: Final = 65_536


class Mode(Enum):
    """What the relay does with the bytes of both directions."""

    PASS = "pass"
    BLACK_HOLE = "black-hole"  # nothing gets through, nobody is told
    HALF_OPEN = "half-open"  # the scheduler's side is gone, the dialling side is not told
    ONE_WAY_UP = "one-way-up"  # what the scheduler says does not get through
    ONE_WAY_DOWN = "one-way-down"  # what the dialling side says does not get through
    THROTTLE = "throttle"  # `rate` bytes a second


class Relay:
    """Listens on a loopback port of its own and forwards to `port`."""

    def __init__(self, port: int, *, rate: int = 8_192) -> None:
        self._target, self._rate = port, rate
        self.mode = Mode.PASS
        self._changed = asyncio.Event()  # of this mode; each has its own
        self._upstreams: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> int:
        """The port to dial."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def behave(self, mode: Mode) -> None:
        """From now on, for the connections there are and for new ones."""
        self.mode = mode
        self._changed.set()
        self._changed = asyncio.Event()
        if mode is Mode.HALF_OPEN:
            for writer in list(self._upstreams):
                writer.close()

    async def _until_not(self, *modes: Mode) -> None:
        while self.mode in modes:
            await self._changed.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upper: asyncio.StreamWriter | None = None
        try:
            await self._until_not(Mode.BLACK_HOLE, Mode.HALF_OPEN)
            above, upper = await asyncio.open_connection("127.0.0.1", self._target)
            self._upstreams.add(upper)
            up = asyncio.create_task(self._pump(reader, upper, Mode.BLACK_HOLE, Mode.ONE_WAY_DOWN))
            down = asyncio.create_task(self._pump(above, writer, Mode.BLACK_HOLE, Mode.ONE_WAY_UP))
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            await self._until_not(Mode.HALF_OPEN)  # the dialling side learns of it by silence alone
            for pump in (up, down):
                pump.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
        except OSError:
            pass  # nobody listens behind: the dialling side sees its connection end
        finally:
            self._tasks.discard(task)
            for end in (writer, upper):
                if end is not None:
                    self._upstreams.discard(end)
                    with contextlib.suppress(OSError, RuntimeError):
                        end.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *deaf: Mode) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK if self.mode is not Mode.THROTTLE else self._rate // 10):
                await self._until_not(*deaf)
                sink.write(data)
                await sink.drain()
                if self.mode is Mode.THROTTLE:
                    await asyncio.sleep(len(data) / self._rate)
