"""A gateway's side: what it asks about all processes of its port, and what it answers for itself."""

import asyncio
import logging
from contextlib import suppress
from typing import Any

from gateway.service import Gateway
from gateway.siblings.wire import LONGEST_LINE, Talk

log = logging.getLogger("gateway.siblings")


class Member:
    """Made by `join`; `stop` leaves."""

    def __init__(self, gateway: Gateway, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._gateway = gateway
        self._talk = Talk(reader, writer, self._answer)
        self._running = asyncio.create_task(self._talk.run())

    @classmethod
    async def join(cls, gateway: Gateway, path: str) -> "Member":
        """Connect to the parent's hub. Raises OSError."""
        return cls(gateway, *await asyncio.open_unix_connection(path, limit=LONGEST_LINE))

    async def stop(self) -> None:
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running

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

    async def _answer(self, what: str, arguments: dict[str, Any]) -> Any:
        if what == "metrics":
            return self._gateway.metrics.exposition().decode()
        if what == "abort":
            self._abort(str(arguments["tenant"]), str(arguments["rid"]))
            return True
        return None

    def _abort(self, tenant: str, rid: str) -> None:
        if rid:
            self._gateway.abort(tenant, rid)
        else:
            self._gateway.abort_all(tenant)
