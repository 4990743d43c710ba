"""What every unary RPC gets, server and client side by side: request id, mandatory deadline, error mapping.

The server shaves 20 ms off the caller's deadline, so that its answer still travels in time, and hands the rest on to
calls made inside the handler. Streams pass untouched: they live as long as their process, and nothing here may cost
anything per message.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final, NoReturn

import grpc

from meshkit import errors
from meshkit.errors import BadRequest, DeadlineShort, MeshError

SHAVE_S: Final = 0.020
REQUEST_ID_KEY: Final = "v4mesh-request-id"

_EXEMPT: Final = ("/grpc.health.v1.", "/grpc.reflection.")

request_id: ContextVar[str] = ContextVar("request_id", default="")
_deadline: ContextVar[float] = ContextVar("deadline", default=0.0)

log = logging.getLogger(__name__)

Handler = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Any]]


def remaining_s() -> float | None:
    """Seconds left of the RPC being served, None outside of one."""
    deadline = _deadline.get()
    return deadline - time.monotonic() if deadline else None


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: MeshError) -> NoReturn:
    """End the RPC with the error's status, message and code."""
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, errors.to_metadata(error))
    raise AssertionError("abort raises")


def to_mesh_error(error: grpc.aio.AioRpcError) -> MeshError:
    """The error that the peer raised, or the nearest one that its status allows."""
    metadata = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
    return errors.from_status(error.code().name, error.details() or error.code().name, metadata)


class DeadlineServer(grpc.aio.ServerInterceptor):
    """Wraps unary handlers; health and reflection answer without a deadline."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or handler.request_streaming or handler.response_streaming or method.startswith(_EXEMPT):
            return handler
        metadata = {str(key): value for key, value in handler_call_details.invocation_metadata or ()}
        name = str(metadata.get(REQUEST_ID_KEY) or secrets.token_hex(8))[:64]
        return grpc.unary_unary_rpc_method_handler(
            _guard(handler.unary_unary, method, name),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _guard(inner: Handler, method: str, name: str) -> Handler:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        remaining = context.time_remaining()
        if remaining is None:
            await abort_with(context, BadRequest(f"{method} needs a deadline: pass timeout="))
        left = remaining - SHAVE_S
        if left <= 0:
            await abort_with(context, DeadlineShort(f"{method}: {remaining * 1000:.0f} ms left, too little to answer"))
        request_id.set(name)
        _deadline.set(time.monotonic() + left)
        try:
            async with asyncio.timeout(left):
                return await inner(request, context)
        except MeshError as error:
            await abort_with(context, error)
        except TimeoutError:
            await abort_with(context, DeadlineShort(f"{method} was not done in {left * 1000:.0f} ms"))
        except grpc.aio.AbortError:
            raise
        except Exception:  # the outermost frame of a request: log it here, tell the peer nothing of our insides
            log.exception("%s failed", method)
            await abort_with(context, MeshError(f"internal error in {method}, request {name}"))

    return call


class DeadlineClient(grpc.aio.UnaryUnaryClientInterceptor):
    """Passes the request id on, gives every call a deadline, raises the peer's own error class."""

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        left = remaining_s()
        timeout = client_call_details.timeout
        if timeout is None and left is None:
            raise BadRequest("this call has no deadline: pass timeout=")
        if left is not None:
            timeout = left if timeout is None else min(timeout, left)
        metadata = grpc.aio.Metadata(*(client_call_details.metadata or ()))
        if request_id.get():
            metadata.add(REQUEST_ID_KEY, request_id.get())
        details = grpc.aio.ClientCallDetails(
            client_call_details.method,
            timeout,
            metadata,
            client_call_details.credentials,
            client_call_details.wait_for_ready,
        )
        try:
            return await (await continuation(details, request))
        except grpc.aio.AioRpcError as error:
            raise to_mesh_error(error) from error
