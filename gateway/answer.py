"""How the answer of a generation is sent: one JSON body, or a stream of events.

The dialects supply a `Renderer`; order, errors before and inside a started stream, keep-alive and the end are the same
for all of them and live here.
"""

import logging
from typing import Any, Protocol

from aiohttp import web

from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.generation import Generation, Update
from gateway.service import Gateway
from gateway.sse import DONE, KEEP_ALIVE, EventStream, event
from gateway.token_path import Around, open_path

log = logging.getLogger("gateway.answer")


class Renderer(Protocol):
    """Events of one dialect. Each method returns whole events, possibly none."""

    def opening(self) -> bytes:
        """Sent once, before anything else."""

    def render(self, updates: list[Update]) -> bytes:
        """What is new."""

    def around(self, index: int) -> Around:
        """As in `token_path`."""
        return {}

    def closing(self) -> bytes:
        """Sent once every choice has ended; the last of the stream."""

    def keep_alive(self) -> bytes:
        """Sent while nothing is new."""

    def failure(self, error: ApiError) -> bytes:
        """The last of a started stream that ends with an error."""


class WholeRenderer(Renderer, Protocol):
    """A renderer that also makes the answer of requests that are not streamed."""

    def collect(self, updates: list[Update]) -> None:
        """Take in what is new."""

    def message(self) -> dict[str, Any]:
        """The whole answer, once every choice has ended."""


class OpenAiEvents:
    """What renderers of OpenAI's older routes and of /generate share: comments between events, [DONE] at the end."""

    def around(self, index: int) -> Around:
        return {}

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def failure(self, error: ApiError) -> bytes:
        return event(error.event()) + DONE


async def send_events(
    gateway: Gateway, exchange: Exchange, generation: Generation, renderer: Renderer
) -> web.StreamResponse:
    """Stream a generation that has been started. Errors before the first byte are raised, later ones are events."""
    stream = EventStream(exchange.request, gateway.guard, exchange.headers, generation.mailbox.__len__)
    try:
        async for updates in generation.updates():
            data = b"" if stream.started else renderer.opening()
            data += renderer.render(updates) if updates else renderer.keep_alive()
            if stream.started:
                if data:
                    await stream.write(data)
            elif data:
                await stream.start(data)
                open_path(generation, renderer, stream)
        if stream.started:
            await stream.write(renderer.closing())
        else:
            await stream.start(renderer.opening() + renderer.closing())
    except ApiError as error:
        if not stream.started:
            raise
        exchange.notes["error"] = error.code
        await stream.write(renderer.failure(error))
    except ConnectionError:
        raise
    except Exception:
        if not stream.started:
            raise
        log.exception("request %s failed inside its stream", exchange.label)
        exchange.notes["error"] = "server_error"
        await stream.write(renderer.failure(ApiError(500, "internal error")))
    finally:
        stream.close()
    await stream.end()
    return stream.response
