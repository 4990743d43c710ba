"""What every public RPC gets: who calls, the errors in gRPC's words, one log line and one span.

The same keys, labels, limits and error texts as on the HTTP side. Which RPC does what is the servicers'.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from gateway.access import KeyRing
from gateway.errors import ApiError
from gateway.exchange import Caller, conversation_id_of, label_of, parent_of
from gateway.service import Gateway
from gateway.spans import record_request
from meshkit.obs import Tracing, kv

Context = grpc.aio.ServicerContext[Any, Any]  # Any: each RPC has its own message types
T = TypeVar("T")

_STATUS: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_OK, _CLIENT_GONE, _INTERNAL = 200, 499, 500
_DETAILS_KEY: Final = "grpc-status-details-bin"

log = logging.getLogger("gateway.access")


class Entry:
    """Shared by the servicers of one gateway."""

    def __init__(self, gateway: Gateway, keys: KeyRing, tracing: Tracing) -> None:
        self.gateway = gateway
        self._keys = keys
        self._tracing = tracing

    async def answer(
        self,
        context: Context,
        method: str,
        work: Callable[[Caller], Awaitable[T]],
        *,
        operation: str = "",
        operator: bool = False,
    ) -> T:
        """Run one RPC. ApiError ends it with its status; anything unexpected is logged and INTERNAL.

        `operation` is the span's name, empty for what is no inference; `operator`: it concerns the whole mesh.
        """
        headers = _headers(context)
        caller = Caller(label=label_of(headers), parent=parent_of(headers), conversation=conversation_id_of(headers))
        caller.traceparent = self._tracing.begin(caller.parent)
        caller.deadline_s = context.time_remaining()
        status = _CLIENT_GONE
        try:
            caller.tenant = self._keys.tenant_of(headers)
            if operator:
                self._keys.check_operator(headers)
            result = await work(caller)
            status = _OK
        except ApiError as error:
            status = error.status
            caller.notes["error"] = error.code
            await _abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            status = _INTERNAL
            logging.getLogger("gateway").exception("request %s failed", caller.label)
            await _abort(context, ApiError(_INTERNAL, "internal error"))
        finally:
            self._book(caller, method, operation, status)
        return result

    def _book(self, caller: Caller, method: str, operation: str, status: int) -> None:
        seconds = time.monotonic() - caller.received_s
        tokens = f"{caller.notes.get('prompt_tokens', 0)}+{caller.notes.get('output_tokens', 0)}"
        log.info("grpc %s %d", method, status, extra=kv(request=caller.label, seconds=round(seconds, 3), tokens=tokens))
        if self._tracing.enabled and operation:
            record_request(self._tracing, caller, self.gateway.model.name, operation, status, seconds)


def retry_after_ms(error: ApiError) -> int:
    """When to come again; 0 if that is not said."""
    return int(error.headers.get("Retry-After", "0")) * 1000


def _headers(context: Context) -> dict[str, str]:
    """Metadata under the names that HTTP code looks for; binary values are nothing we read."""
    pairs = {str(key): value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    if "authorization" in pairs:
        pairs["Authorization"] = pairs["authorization"]
    return pairs


async def _abort(context: Context, error: ApiError) -> NoReturn:
    """End the RPC with status, text and google.rpc details."""
    code = _STATUS.get(error.status, grpc.StatusCode.INTERNAL)
    details: list[AnyMessage] = []
    if error.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.param, description=error.message)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if wait_ms := retry_after_ms(error):
        delay = Duration(seconds=wait_ms // 1000)
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    details.append(_packed(error_details_pb2.ErrorInfo(reason=error.code, domain="v4mesh")))
    status = status_pb2.Status(code=code.value[0], message=error.message, details=details)
    await context.abort(code, error.message, ((_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort raises")


def _packed(message: Any) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
