"""One HTTP request as handlers see it: its body, its labels, who asks, and the headers its answer will carry.

Reads bodies within the limits and makes JSON and error responses. Routing, keys and the access log are the
application's; what a body means is the handlers'.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from aiohttp import web

from gateway.errors import ApiError, invalid
from gateway.limits import Admission, Limits
from gateway.schema import BodyDecoder
from meshkit.obs import Attribute
from meshkit.traceparent import context_of

Body = TypeVar("Body", bound=msgspec.Struct)

json_bytes = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Caller:
    """Who asks and what is noted about it, whatever the transport. Lives as long as its request."""

    label: str  # the client's x-request-id or ours; for logs only
    tenant: str = ""
    parent: str = ""  # W3C traceparent and tracestate as they came, empty if none did
    conversation: str = ""  # which conversation it belongs to, as the caller says; for the span only
    traceparent: str = ""  # that of this request's own span: what the mesh below hangs its spans under
    received_s: float = field(default_factory=time.monotonic)
    deadline_s: float | None = None  # seconds from then on that the caller allows, where the transport says so
    headers: dict[str, str] = field(default_factory=dict)  # of the answer
    notes: dict[str, Any] = field(default_factory=dict)  # sizes for the access log and the span, never text
    stages: dict[str, float] = field(default_factory=dict)  # monotonic times: read, encoded, first_token
    span: dict[str, Attribute] = field(default_factory=dict)  # more attributes of a sampled request's span


@dataclass(slots=True, kw_only=True)
class Exchange(Caller):
    """One HTTP request."""

    request: web.Request
    operators: bool = False  # it came in at their address
    error_shape: Callable[[ApiError, str], dict[str, Any]] = lambda error, _: error.body()  # as its dialect has it


_LABEL = re.compile(r"[\x20-\x7e]{1,128}")
_BAGGAGE = re.compile(
    r"(?:^|,)\s*(?:gen_ai\.conversation\.id|session\.id)\s*=\s*([\x21\x23-\x2b\x2d-\x3a\x3c-\x7e]{1,128})"
)


def label_of(headers: Mapping[str, str]) -> str:
    """The client's x-request-id if it is sound, else one of ours. For logs only."""
    given = headers.get("x-request-id", "")
    return given if _LABEL.fullmatch(given) else uuid.uuid4().hex


def parent_of(headers: Mapping[str, str]) -> str:
    """The caller's traceparent if it is sound, and its tracestate."""
    return context_of(headers.get("traceparent", ""), headers.get("tracestate", ""))


def conversation_id_of(headers: Mapping[str, str]) -> str:
    """The conversation that the caller's W3C baggage names, if it does. The rest of it says nothing to this mesh."""
    named = _BAGGAGE.search(headers.get("baggage", "")[:8_192])
    return unquote(named[1]) if named else ""


async def read_body(
    exchange: Exchange, kind: type[Body], decoder: BodyDecoder, admission: Admission, limits: Limits
) -> Body:
    """The decoded body. Refuses other content types, sizes and shapes than documented.

    What it takes in memory counts, however little the headers tell: chunks have no length, compressed text a small one.
    """
    request = exchange.request
    if "Content-Type" in request.headers and request.content_type != "application/json":
        raise invalid(None, f"Content-Type is {request.content_type!r}; send application/json")
    if request.charset and request.charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        raise invalid(None, f"the charset is {request.charset!r}; send UTF-8")
    taken = request.content_length or 0
    if taken > limits.body:
        raise _too_large(limits)
    admission.take_body(taken)
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.content.iter_any():
                data += part
                if len(data) > limits.body:
                    raise _too_large(limits)
                if len(data) > taken:
                    admission.take_body(len(data) - taken)
                    taken = len(data)
        return decoder.decode(bytes(data) or b"{}", kind)
    except web.RequestPayloadError as error:
        text = f"the body is not what Content-Encoding and Transfer-Encoding say: {str(error).splitlines()[-1].strip()}"
        raise ApiError(400, text, headers={"Connection": "close"}) from None  # where the next request begins is unknown
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.body_seconds:g} s") from None
    finally:
        admission.free_body(taken)


def json_response(exchange: Exchange, value: object, status: int = 200) -> web.Response:
    return web.Response(
        body=json_bytes(value),
        status=status,
        content_type="application/json",
        charset="utf-8",
        headers=exchange.headers,
    )


def error_response(exchange: Exchange, error: ApiError) -> web.Response:
    exchange.headers |= error.headers
    exchange.notes["error"] = error.code
    return json_response(exchange, exchange.error_shape(error, exchange.label), error.status)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body} bytes", code="request_too_large")
