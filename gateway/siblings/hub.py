"""The parent's side: passes a question of one gateway on to all of them, and brings the answers together.

`metrics` merges their expositions; `abort` ends a request wherever it runs; `placed` tells all where prompts went. A
gateway that does not answer within a second is left out. `stored` and `forget` find who keeps a response.
"""

import asyncio
from pathlib import Path
from typing import Any

from gateway.siblings.merge import merge
from gateway.siblings.wire import LONGEST_LINE, Talk


class Hub:
    """Listens on a unix socket in a private folder."""

    def __init__(self) -> None:
        self._talks: set[Talk] = set()
        self._server: asyncio.Server | None = None

    async def start(self, path: Path) -> None:
        self._server = await asyncio.start_unix_server(self._meet, str(path), limit=LONGEST_LINE)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = Talk(reader, writer, self._answer)
        self._talks.add(talk)
        try:
            await talk.run()
        finally:
            self._talks.discard(talk)

    async def _answer(self, what: str, arguments: dict[str, Any]) -> Any:
        answers = await asyncio.gather(
            *(talk.ask(what, **arguments) for talk in list(self._talks)), return_exceptions=True
        )
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        if what in ("stored", "forget"):  # one of them has it
            return next((answer for answer in found if answer), None)
        if what == "metrics":
            return merge(text for text in found if isinstance(text, str)).decode()
        return len(found)
