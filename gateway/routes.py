"""The table of routes, and the look-up that forgives what clients get wrong in paths.

Repeated slashes collapse and one at the end is ignored; HEAD is answered wherever GET is. Model names may hold
slashes. Each route says whether it needs a key: probes do not.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from gateway.cache import explain, flush_cache
from gateway.chat import chat_completions
from gateway.completions import completions
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.generate import generate
from gateway.messages import count_tokens, messages
from gateway.messages_request import MessagesRequest
from gateway.openapi import document
from gateway.operations import (
    abort_request,
    health,
    health_generate,
    list_models,
    metrics,
    model_info,
    one_model,
    ready,
    server_info,
    version,
)
from gateway.reading import parse_function_call, separate_reasoning
from gateway.responses import cancel_response, count_input_tokens, input_items, one_response, responses
from gateway.responses_request import ResponsesRequest
from gateway.schema import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ExplainRequest,
    GenerateRequest,
    ReadingRequest,
    TokenizeRequest,
)
from gateway.service import Gateway
from gateway.tokenize import detokenize, tokenize

Handler = Callable[[Gateway, Exchange], Awaitable[web.StreamResponse]]

_SLASHES = re.compile(r"/{2,}")


@dataclass(frozen=True, slots=True)
class Route:
    """One or more paths of the same meaning. `operation` is the span's name, empty for what is no inference."""

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    handler: Handler
    operation: str = ""
    open: bool = False  # needs no key
    operator: bool = False  # concerns the whole mesh: needs an operator's key, where there are such
    anthropic: bool = False  # errors in Anthropic's shape
    body: type[msgspec.Struct] | None = None  # what POST and PUT bodies decode to


async def openapi(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """This document."""
    body = document((*ROUTES, _MODEL, _RESPONSE, _CANCEL, _ITEMS))
    return web.Response(body=body, content_type="application/json", charset="utf-8", headers=exchange.headers)


ROUTES = (
    Route(
        ("/v1/chat/completions", "/chat/completions", "/beta/chat/completions"),
        ("POST",),
        chat_completions,
        "chat",
        body=ChatRequest,
    ),
    Route(
        ("/v1/completions", "/completions", "/beta/completions"),
        ("POST",),
        completions,
        "text_completion",
        body=CompletionRequest,
    ),
    Route(
        ("/v1/messages", "/anthropic/v1/messages"), ("POST",), messages, "chat", anthropic=True, body=MessagesRequest
    ),
    Route(
        ("/v1/messages/count_tokens", "/anthropic/v1/messages/count_tokens"),
        ("POST",),
        count_tokens,
        anthropic=True,
        body=MessagesRequest,
    ),
    Route(("/v1/responses", "/responses"), ("POST",), responses, "chat", body=ResponsesRequest),
    Route(
        ("/v1/responses/input_tokens", "/responses/input_tokens"), ("POST",), count_input_tokens, body=ResponsesRequest
    ),
    Route(("/generate",), ("POST", "PUT"), generate, "text_completion", body=GenerateRequest),
    Route(("/tokenize", "/v1/tokenize"), ("POST",), tokenize, body=TokenizeRequest),
    Route(("/detokenize", "/v1/detokenize"), ("POST",), detokenize, body=DetokenizeRequest),
    Route(("/separate_reasoning", "/v1/separate_reasoning"), ("POST",), separate_reasoning, body=ReadingRequest),
    Route(("/parse_function_call", "/v1/parse_function_call"), ("POST",), parse_function_call, body=ReadingRequest),
    Route(("/v1/models", "/models", "/anthropic/v1/models"), ("GET",), list_models),
    Route(("/health", "/"), ("GET",), health, open=True),  # clients ask the root whether a server is there
    Route(("/ping",), ("GET", "POST"), health, open=True),
    Route(("/health_generate",), ("GET",), health_generate, open=True),
    Route(("/ready",), ("GET",), ready, open=True),
    Route(("/version",), ("GET",), version, open=True),
    Route(("/metrics",), ("GET",), metrics, open=True),
    Route(("/server_info", "/get_server_info"), ("GET",), server_info, operator=True),
    Route(("/model_info", "/get_model_info"), ("GET",), model_info),
    Route(("/abort_request",), ("POST",), abort_request, body=AbortRequest),
    Route(("/flush_cache",), ("GET", "POST"), flush_cache, operator=True),
    Route(("/openapi.json",), ("GET",), openapi, open=True),
    Route(("/explain",), ("POST",), explain, body=ExplainRequest, operator=True),
)
_MODEL = Route(("/v1/models/{id}",), ("GET",), one_model)
_RESPONSE = Route(("/v1/responses/{id}",), ("GET", "DELETE"), one_response)
_CANCEL = Route(("/v1/responses/{id}/cancel",), ("POST",), cancel_response)
_ITEMS = Route(("/v1/responses/{id}/input_items",), ("GET",), input_items)
_OF_RESPONSE = {"cancel": _CANCEL, "input_items": _ITEMS}
_PREFIXES = (
    ("/v1/models/", _MODEL),
    ("/models/", _MODEL),
    ("/anthropic/v1/models/", _MODEL),
    ("/v1/responses/", _RESPONSE),
    ("/responses/", _RESPONSE),
)
_BY_PATH = {path: route for route in ROUTES for path in route.paths}


@dataclass(frozen=True, slots=True)
class Match:
    """A route found, and the name in the path if it has one: a model's or a response's."""

    route: Route
    name: str = ""


def find(path: str) -> Match:
    """The route of a path. Raises 404 if there is none."""
    path = _SLASHES.sub("/", path)
    if len(path) > 1:
        path = path.removesuffix("/")
    match = _match(path)
    if match is None:
        raise ApiError(404, f"there is no route {path[:200]}", code="not_found")
    return match


def check_method(match: Match, method: str) -> None:
    """405 for a known path with another method."""
    if ("GET" if method == "HEAD" else method) not in match.route.methods:
        allowed = ", ".join(match.route.methods)
        path = match.route.paths[0]
        raise ApiError(
            405,
            f"{path} does not answer {method}; allowed: {allowed}",
            code="method_not_allowed",
            headers={"Allow": allowed},
        )


def _match(path: str) -> Match | None:
    route = _BY_PATH.get(path)
    if route is not None:
        return Match(route)
    for prefix, route in _PREFIXES:
        if path.startswith(prefix):
            name = path.removeprefix(prefix)
            if route is _RESPONSE:
                name, _, action = name.partition("/")
                return Match(_OF_RESPONSE.get(action, _RESPONSE), name) if action in ("", *_OF_RESPONSE) else None
            return Match(route, name)
    return None
