"""A gateway's side: what it asks about all processes of its port, and what it answers for itself.

Where there are several schedulers it also tells the others where it has sent prompts, ten times a second: the next turn
of a conversation may come to any process. It says when it serves, and accepts where the parent says that nobody does.
"""

import asyncio
import logging
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from os import getpid
from typing import Any, Final

from gateway.instances.fleet import Fleet
from gateway.service import Gateway
from gateway.siblings.cover import Cover
from gateway.siblings.wire import LONGEST_LINE, Talk

TELL_S: Final = 0.1
MOST_TOLD: Final = 1 << 17  # page keys told at once; of what is beyond, the others know nothing
_KEY: Final = 16

log = logging.getLogger("gateway.siblings")


class Member:
    """Made by `join`; `serve` once this process accepts connections, `leave` before it stops to; `stop` at the end."""

    def __init__(self, gateway: Gateway, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._gateway = gateway
        self._talk = Talk(reader, writer, self._answer)
        self._running = asyncio.create_task(self._talk.run())
        self._cover: Cover | None = None
        self._orphans: tuple[int, ...] | None = None  # sockets at which nobody accepts
        self._placed: list[tuple[int, bytes]] = []
        self._untold = 0  # keys in it
        self._telling: asyncio.Task[None] | None = None
        if isinstance(gateway.mesh, Fleet):
            gateway.mesh.on_placed = self._note_placed

    @classmethod
    async def join(cls, gateway: Gateway, path: str) -> "Member":
        """Connect to the parent's hub. Raises OSError."""
        return cls(gateway, *await asyncio.open_unix_connection(path, limit=LONGEST_LINE))

    def others_serve(self, processes: int) -> bool:
        """Whether one of the others accepts connections, so that this one may take its time; `processes`: of all."""
        return self._orphans is not None and len(self._orphans) < processes

    async def serve(self, number: int, cover: Cover) -> None:
        """This process accepts at socket `number`, and from now on where nobody does, which `cover` does."""
        self._cover = cover
        with suppress(OSError, TimeoutError):
            self._orphans = tuple(await self._talk.ask("serves", number=number, pid=getpid()))
            await cover.take(self._orphans)

    async def leave(self) -> None:
        """It accepts at no other socket any more, and soon not at its own."""
        if self._cover is not None:
            await self._cover.close()
            with suppress(OSError, TimeoutError):
                await self._talk.ask("leaves")

    async def stop(self) -> None:
        for task in (self._running, self._telling):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def metrics(self) -> bytes:
        """Of all processes; of this one alone while the parent does not answer."""
        try:
            return str(await self._talk.ask("metrics")).encode()
        except (OSError, TimeoutError) as error:
            log.warning("metrics of this process alone: %s", type(error).__name__)
            return self._gateway.metrics.exposition()

    async def abort(self, tenant: str, rid: str) -> None:
        """In every process; an empty rid stands for all of the tenant's requests."""
        try:
            await self._talk.ask("abort", tenant=tenant, rid=rid)
        except (OSError, TimeoutError) as error:
            log.warning("aborted in this process alone: %s", type(error).__name__)
            self._abort(tenant, rid)

    async def stored(self, tenant: str, name: str) -> bytes | None:
        """A response that any of them keeps; None while the parent does not answer."""
        with suppress(OSError, TimeoutError):
            found = await self._talk.ask("stored", tenant=tenant, name=name)
            return None if found is None else str(found).encode()
        return None

    async def forget(self, tenant: str, name: str) -> bool:
        """Whether one of them had it, and no longer has."""
        with suppress(OSError, TimeoutError):
            return bool(await self._talk.ask("forget", tenant=tenant, name=name))
        return False

    def _note_placed(self, index: int, keys: Sequence[bytes]) -> None:
        if self._untold + len(keys) > MOST_TOLD:
            return
        self._untold += len(keys)
        self._placed.append((index, b"".join(keys)))
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        """What has been placed in the meantime, as one message."""
        await asyncio.sleep(TELL_S)
        placed, self._placed, self._untold = self._placed, [], 0
        with suppress(OSError, TimeoutError):
            await self._talk.ask("placed", prompts=[[index, b64encode(keys).decode()] for index, keys in placed])
        if self._placed:
            self._telling = asyncio.create_task(self._tell())

    async def _answer(self, what: str, arguments: dict[str, Any]) -> Any:
        if what == "beat":
            return True
        if what == "orphans":
            self._orphans = tuple(int(number) for number in arguments["numbers"])
            if self._cover is not None:
                await self._cover.take(self._orphans)
            return True
        if what == "metrics":
            return self._gateway.metrics.exposition().decode()
        if what == "abort":
            self._abort(str(arguments["tenant"]), str(arguments["rid"]))
            return True
        if what == "stored":
            found = self._gateway.stored.get(str(arguments["tenant"]), str(arguments["name"]))
            return None if found is None else found.decode()
        if what == "forget":
            return self._gateway.stored.drop(str(arguments["tenant"]), str(arguments["name"]))
        if what == "placed" and isinstance(self._gateway.mesh, Fleet):
            for index, text in arguments["prompts"]:
                keys = b64decode(text)
                chain = [keys[at : at + _KEY] for at in range(0, len(keys), _KEY)]
                self._gateway.mesh.heard(int(index), chain)
            return True
        return None

    def _abort(self, tenant: str, rid: str) -> None:
        if rid:
            self._gateway.abort(tenant, rid)
        else:
            self._gateway.abort_all(tenant)
