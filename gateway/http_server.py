"""aiohttp's server, speaking as the application does where the application is never asked.

Requests that are not HTTP, bodies that break while they arrive, `Expect` headers and targets outside the route table
are answered by aiohttp itself: here in our JSON, under our name, and with one debug line instead of a traceback each.
"""

import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from gateway.errors import ApiError
from gateway.exchange import json_bytes

SERVER_NAME = "v4mesh"

log = logging.getLogger("gateway.http")


class GatewayRunner(web.AppRunner):
    """Runs the application behind this module's server. Options are aiohttp's."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(
            _in_our_words(server.request_handler),
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what never reached the application (4xx) or failed around it (5xx). Closes the connection."""
        self.log_exception("bad HTTP: %s", type(exc).__name__, exc_info=exc if status >= 500 else None)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer is sent already")
        what = (message or "").strip().partition("\n")[0].rstrip(":") or "malformed"
        text = f"the request is not valid HTTP: {what[:200]}" if status < 500 else "internal error"
        response = _response(ApiError(status, text))
        response.force_close()
        return response

    def log_exception(self, *args: Any, exc_info: BaseException | None = None, **options: Any) -> None:
        """What clients do is no error of ours: one debug line. A broken body also ends up here once it is answered."""
        if exc_info is None or isinstance(exc_info, web.RequestPayloadError):
            log.debug(*args)
        else:
            log.error(*args, exc_info=exc_info)


Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def _in_our_words(handler: Handler) -> Handler:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:  # aiohttp's own: a target or an Expect that it does not know
            return _response(ApiError(error.status, error.reason))

    return answer


def _response(error: ApiError) -> web.Response:
    headers = {"Server": SERVER_NAME, "x-request-id": uuid.uuid4().hex, **error.headers}
    return web.Response(
        body=json_bytes(error.body()),
        status=error.status,
        content_type="application/json",
        charset="utf-8",
        headers=headers,
    )
