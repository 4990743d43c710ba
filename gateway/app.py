"""The aiohttp application: one entry for all requests, around it labels, keys, errors, metrics, access log and span.

`build_app` is everything but the listening socket and the way tokens come: tests give it a mesh of their own.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from aiohttp import web

from gateway import routes
from gateway.access import KeyRing
from gateway.anthropic_errors import anthropic_error
from gateway.config import GatewayConfig
from gateway.cors import Cors
from gateway.errors import ApiError
from gateway.exchange import Exchange, conversation_id_of, error_response, label_of, parent_of
from gateway.http_server import SERVER_NAME
from gateway.mesh import Mesh
from gateway.service import Gateway
from gateway.spans import note_server, record_request
from gateway.text.tokenizer import Tokenizer
from meshkit.obs import Tracing, kv

GATEWAY = web.AppKey("gateway", Gateway)
_ENTRY: web.AppKey["_Entry"] = web.AppKey("entry")
CLIENT_GONE = 499

log = logging.getLogger("gateway.access")


def build_app(
    mesh: Mesh, tokenizer: Tokenizer | None, config: GatewayConfig, tracing: Tracing | None = None
) -> web.Application:
    """An application that serves `config.model` through `mesh`. Raises ModelDirError when the folder lacks config.json.

    A `GatewayRunner` that cancels handlers of vanished clients (`handler_cancellation=True`) must run it.
    """
    app = web.Application(client_max_size=config.limits.body)
    gateway = Gateway(mesh, tokenizer, config)
    app[GATEWAY] = gateway
    entry = _Entry(
        gateway,
        KeyRing.read(config.api_key_file, config.admin_api_key_file),
        Cors(config.cors_origins),
        tracing or Tracing(),
    )
    app[_ENTRY] = entry
    app.router.add_route("*", "/{path:.*}", entry.answer)
    app.cleanup_ctx.append(_background)
    return app


def build_admin_app(app: web.Application) -> web.Application:
    """The same gateway for operators: probes, metrics and what concerns the whole mesh, and nothing else."""
    admin = web.Application(client_max_size=app[GATEWAY].limits.body)
    admin.router.add_route("*", "/{path:.*}", app[_ENTRY].for_operators().answer)
    return admin


async def _background(app: web.Application) -> AsyncIterator[None]:
    gateway = app[GATEWAY]
    sweep = asyncio.create_task(gateway.guard.run())
    yield
    sweep.cancel()
    with suppress(asyncio.CancelledError):
        await sweep
    gateway.encoder.close()


class _Entry:
    """Answers every request."""

    def __init__(
        self, gateway: Gateway, keys: KeyRing, cors: Cors, tracing: Tracing, *, operators: bool = False
    ) -> None:
        self._gateway = gateway
        self._operators = operators
        self._keys = keys
        self._cors = cors
        self._tracing = tracing

    def for_operators(self) -> "_Entry":
        return _Entry(self._gateway, self._keys, self._cors, self._tracing, operators=True)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Dispatch one request; whatever happens, it is counted and logged once."""
        metrics = self._gateway.metrics
        exchange = Exchange(label=label_of(request.headers), request=request, parent=parent_of(request.headers))
        exchange.traceparent = self._tracing.begin(exchange.parent)
        exchange.conversation = conversation_id_of(request.headers)
        exchange.headers |= {"x-request-id": exchange.label, "Server": SERVER_NAME}
        exchange.headers |= self._cors.headers(request.headers)
        if self._gateway.admission.draining:
            exchange.headers["Connection"] = "close"  # the next request goes to whoever listens now
        metrics.http_active += 1
        status = CLIENT_GONE
        match: routes.Match | None = None
        response: web.StreamResponse | None
        try:
            try:
                if len(request.headers) > self._gateway.limits.header_fields:
                    raise ApiError(431, f"more than {self._gateway.limits.header_fields} header fields")
                if "anthropic-version" in request.headers:
                    _speak_anthropic(exchange)
                match = routes.find(request.path)
                if self._operators:
                    exchange.operators = True
                    _check_operators(match)
                if match.route.anthropic:
                    _speak_anthropic(exchange)
                response = self._preflight(match, exchange)
                if response is None:
                    routes.check_method(match, request.method)
                    response = await self._handle(match, exchange)
            except ApiError as error:
                response = error_response(exchange, error)
            except (asyncio.CancelledError, ConnectionError):
                raise
            except Exception:
                logging.getLogger("gateway").exception("request %s failed", exchange.label)
                response = error_response(exchange, ApiError(500, "internal error"))
            status = response.status
            return response
        finally:
            metrics.http_active -= 1
            self._book(exchange, match, status)

    def _preflight(self, match: routes.Match, exchange: Exchange) -> web.StreamResponse | None:
        """The answer to a browser that asks whether a page may send a request; None for everything else."""
        if exchange.request.method != "OPTIONS":
            return None
        told = self._cors.preflight(exchange.request.headers, match.route.methods)
        return web.Response(status=204, headers={**exchange.headers, **told}) if told else None

    async def _handle(self, match: routes.Match, exchange: Exchange) -> web.StreamResponse:
        if not match.route.open:
            exchange.tenant = self._keys.tenant_of(exchange.request.headers)
        if match.route.operator:
            self._keys.check_operator(exchange.request.headers)
        if match.name:
            exchange.notes["name"] = match.name
        return await match.route.handler(self._gateway, exchange)

    def _book(self, exchange: Exchange, match: routes.Match | None, status: int) -> None:
        """Metrics, access log and span of a finished exchange."""
        seconds = time.monotonic() - exchange.received_s
        route = match.route.paths[0] if match is not None else "other"
        metrics = self._gateway.metrics
        metrics.http_requests[route] += 1
        metrics.http_responses[status] += 1
        if match is None:
            metrics.unknown_routes += 1
        quiet = match is not None and match.route.open
        log.log(
            logging.DEBUG if quiet else logging.INFO,
            "%s %s %d",
            exchange.request.method,
            route,
            status,
            extra=kv(request=exchange.label, seconds=round(seconds, 3), tokens=_tokens(exchange)),
        )
        if self._tracing.enabled and match is not None and match.route.operation:
            name = self._gateway.model.name
            note_server(exchange, exchange.request.transport)
            record_request(self._tracing, exchange, name, match.route.operation, status, seconds)


def _check_operators(match: routes.Match) -> None:
    """404 for what is not for operators, so that their address needs no tenant's key."""
    if not (match.route.open or match.route.operator):
        raise ApiError(
            404, f"{match.route.paths[0]} is not answered at this address, which is for operators", code="not_found"
        )


def _speak_anthropic(exchange: Exchange) -> None:
    exchange.error_shape = anthropic_error
    exchange.headers["request-id"] = exchange.label


def _tokens(exchange: Exchange) -> str:
    return f"{exchange.notes.get('prompt_tokens', 0)}+{exchange.notes.get('output_tokens', 0)}"
