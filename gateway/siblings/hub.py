"""The parent's side: passes a question of one gateway on to all of them, and brings the answers together.

`metrics` merges their expositions; `abort` ends a request wherever it runs; `placed` tells all where prompts went. A
gateway that does not answer within a second is left out. `stored` and `forget` find who keeps a response. It also
watches who serves: where nobody does, because a process was killed, leaves or is frozen, its siblings are told to
accept in its place. The end of a connection says that a process is gone before anything else does.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from gateway.siblings.attendance import Attendance
from gateway.siblings.merge import merge
from gateway.siblings.wire import LONGEST_LINE, Talk

BEAT_S: Final = 0.5  # between a process's answer and the next question whether it is there
FROZEN_S: Final = 2.0  # without an answer: its siblings accept its connections

log = logging.getLogger("gateway.siblings")


class Hub:
    """Listens on a unix socket in a private folder, for the gateways of one port."""

    def __init__(self, processes: int) -> None:
        self.attendance = Attendance(processes)
        self._told = self.attendance.orphans
        self._talks: dict[Talk, str] = {}  # and the name of who serves
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, path: Path) -> None:
        self._server = await asyncio.start_unix_server(self._meet, str(path), limit=LONGEST_LINE)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def answer(what: str, arguments: dict[str, Any]) -> Any:
            return await self._answer(talk, what, arguments)

        talk = Talk(reader, writer, answer)
        self._talks[talk] = ""
        self._do(self._tell(talk))
        watching = self._do(self._watch(talk))
        try:
            await talk.run()
        finally:
            watching.cancel()
            name = self._talks.pop(talk)
            served = self.attendance.is_serving(talk)
            self.attendance.leaves(talk)
            self._tell_changes()
            if served:
                meanwhile = "its siblings accept" if self.attendance.anybody else "nobody accepts"
                log.warning("%s is gone: %s its connections until the next one serves", name, meanwhile)

    async def _answer(self, talk: Talk, what: str, arguments: dict[str, Any]) -> Any:
        if what == "serves":
            number = int(arguments["number"])
            self.attendance.serves(talk, number)
            self._talks[talk] = f"gateway-{number} (pid {int(arguments['pid'])})"
            self._tell_changes()
            return list(self.attendance.orphans)
        if what == "leaves":
            self.attendance.leaves(talk)
            self._tell_changes()
            return True
        return await self._ask_all(what, arguments)

    async def _ask_all(self, what: str, arguments: dict[str, Any]) -> Any:
        """Of a frozen process nobody waits for the answer, and only aborts still matter to it when it goes on."""
        frozen = [talk for talk in self._talks if self.attendance.is_frozen(talk)]
        if what == "abort":
            for talk in frozen:
                self._do(self._ask_once(talk, what, arguments))
        answers = await asyncio.gather(
            *(talk.ask(what, **arguments) for talk in self._talks if talk not in frozen), return_exceptions=True
        )
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        if what in ("stored", "forget"):  # one of them has it
            return next((answer for answer in found if answer), None)
        if what == "metrics":
            return merge(text for text in found if isinstance(text, str)).decode()
        return len(found)

    async def _watch(self, talk: Talk) -> None:
        """Ask one process again and again whether it is there, until its connection ends."""
        with suppress(ConnectionError):
            while True:
                await asyncio.sleep(BEAT_S)
                asked_at, beat = time.monotonic(), asyncio.create_task(talk.ask_patiently("beat"))
                try:
                    await asyncio.wait({beat}, timeout=FROZEN_S)
                    if not beat.done():
                        self._freeze(talk)
                    await beat
                finally:
                    beat.cancel()
                if self.attendance.is_frozen(talk):
                    self._thaw(talk, time.monotonic() - asked_at)

    def _freeze(self, talk: Talk) -> None:
        self.attendance.freezes(talk)
        self._tell_changes()
        if self.attendance.is_serving(talk):
            name = self._talks[talk]
            log.warning(
                "%s has not answered for %g s: its siblings accept new connections in its place, the open ones wait; "
                "to have it replaced: kill -9 %s",
                *(name, FROZEN_S, name.rpartition(" ")[2].rstrip(")")),
            )

    def _thaw(self, talk: Talk, seconds: float) -> None:
        self.attendance.thaws(talk)
        self._tell_changes()
        if self.attendance.is_serving(talk):
            log.info("%s answers again, after %.1f s, and accepts its connections itself", self._talks[talk], seconds)

    def _tell_changes(self) -> None:
        """Tell all processes where nobody accepts, if that is news."""
        if self._told != (orphans := self.attendance.orphans):
            self._told = orphans
            for talk in self._talks:
                self._do(self._tell(talk))

    async def _tell(self, talk: Talk) -> None:
        await self._ask_once(talk, "orphans", {"numbers": list(self.attendance.orphans)})

    async def _ask_once(self, talk: Talk, what: str, arguments: dict[str, Any]) -> None:
        with suppress(OSError, TimeoutError):
            await talk.ask(what, **arguments)

    def _do(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Beside everything else."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
