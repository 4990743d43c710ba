"""Accepts connections at the sockets of siblings that are gone, besides the own one, until they are back.

Every process of a port inherits all its listening sockets. The kernel gives each socket its share of new connections,
whether anybody accepts there or not: without this, a killed process's share would wait for its successor.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from aiohttp import web

BACKLOG: Final = 1024  # connections that wait at a handed over socket while processes change

log = logging.getLogger("gateway.siblings")


class Cover:
    """Made by a process that serves. `take` says where else it accepts, as often as that changes."""

    def __init__(self, runner: web.BaseRunner, fds: Sequence[int], own: int) -> None:
        """`fds`: all listening sockets of the port, by number; `own`: the one that is not touched here. The others are
        closed by `close`, so that nobody waits there for a port that is given up.
        """
        self._runner, self._fds, self._own = runner, fds, own
        self._others = [fd for number, fd in enumerate(fds) if number != own]
        self._sites: dict[int, web.SockSite] = {}
        self._wanted: frozenset[int] = frozenset()
        self._closed = False
        self._turn = asyncio.Lock()

    @property
    def taken(self) -> list[int]:
        """Numbers of the sockets at which this process accepts for somebody else."""
        return sorted(self._sites)

    async def take(self, numbers: Iterable[int]) -> None:
        """Accept at these sockets and at no other one of a sibling. The last call counts, whichever ends last."""
        if not self._closed:
            self._wanted = frozenset(numbers) - {self._own}
        async with self._turn:
            for number in sorted(self._wanted - self._sites.keys()):
                await self._open(number)
            for number in sorted(self._sites.keys() - self._wanted):
                await self._sites.pop(number).stop()
                log.debug("gateway-%d accepts its connections itself", number)

    async def close(self) -> None:
        """Accept nowhere else, now and later."""
        self._wanted, self._closed = frozenset(), True
        async with self._turn:
            for number in self.taken:
                await self._sites.pop(number).stop()
            while self._others:
                with suppress(OSError):
                    os.close(self._others.pop())

    async def _open(self, number: int) -> None:
        """With a descriptor of its own, which the site closes: the socket itself stays for the next time."""
        try:
            site = web.SockSite(self._runner, socket.socket(fileno=os.dup(self._fds[number])), backlog=BACKLOG)
            await site.start()
        except OSError as error:
            log.warning("cannot accept for gateway-%d: %s", number, error.strerror)
            return
        self._sites[number] = site
        log.debug("accepting connections for gateway-%d", number)
