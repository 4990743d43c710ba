"""Errors that a client gets to read, and their JSON.

One exception type carries status, text, the field at fault and when to come again. Messages are written here or by
validation; text of unexpected exceptions never reaches a client (they become a bare 500).
"""

from collections.abc import Mapping
from typing import Any

from meshkit.errors import BY_CODE, Fenced, MeshError, NeverFits, Poisoned, QueueFull, Refused, from_verdict
from meshkit.frames import SubmitReply, Verdict

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented",
    503: "overloaded_error",
    504: "timeout_error",
}


MESSAGE_CHARS = 4_096
"""Errors may quote what a client sent, but not all of it."""


class ApiError(Exception):
    """An answer other than success. `headers` are sent with it; `retry_after_s` becomes Retry-After.

    `place` says where in the value of `param` the fault is: a JSON pointer or a position.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
        place: str = "",
    ) -> None:
        super().__init__(message)
        self.place = place
        self.status = status
        self.message = message[:MESSAGE_CHARS]
        self.param = param
        self.kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.code = code or self.kind
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)

    def body(self) -> dict[str, Any]:
        """The JSON object of a response that is nothing but this error."""
        return {"error": self._fields(self.code)}

    def event(self) -> dict[str, Any]:
        """The JSON object inside a stream that has started: there the status travels as `code`."""
        return {"error": self._fields(self.status)}

    def _fields(self, code: str | int) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": code}
        return {**fields, "place": self.place} if self.place else fields


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def out_of_range(param: str, value: object, allowed: str) -> ApiError:
    """A value of the right type outside what the field allows; names field, value and range."""
    return invalid(param, f"{param} = {_shown(value)} is out of range: allowed is {allowed}")


def missing_part(param: str, what: str, part: str) -> ApiError:
    """A documented feature whose part of the mesh is not there yet."""
    return ApiError(501, f"{param}: {what} needs {part}, which this version does not have", param=param)


def context_exceeded(prompt_tokens: int, max_context: int, param: str, *, counted: bool = True) -> ApiError:
    """`counted` is False where encoding ended at the limit, so that the number is a lower bound."""
    number = prompt_tokens if counted else f"at least {prompt_tokens}"
    return invalid(
        param,
        f"the prompt has {number} tokens; the context of {max_context} leaves no room for an answer. "
        f"Shorten the prompt to at most {max_context - 1} tokens",
        code="context_length_exceeded",
    )


def unavailable(message: str, retry_after_s: int = 1) -> ApiError:
    return ApiError(503, message, retry_after_s=retry_after_s)


def refused(verdict: Verdict, message: str, retry_after_ms: int) -> ApiError:
    """What a client is told when the scheduler refuses its request before any token."""
    error = from_verdict(SubmitReply(verdict, message, retry_after_ms))
    assert error is not None, "an accepted request is not refused"
    if isinstance(error, Fenced):  # a race inside the mesh, nothing the client did
        error = Refused("the request could not be scheduled", retry_after_ms=retry_after_ms)
    return _from_mesh(error)


_ENDED = {"journal_full": QueueFull, "request_poisoned": Poisoned}
_FAULTS = ("sampling_fault", "grammar_failed")  # of one row, in the worker


def ended(code: str, message: str) -> ApiError:
    """A choice that ended with an error after it was accepted."""
    if code in _FAULTS:
        return ApiError(500, message or "generation failed", code=code)
    kind = _ENDED.get(code) or BY_CODE.get(code.upper(), MeshError)
    return _from_mesh(kind(message or "generation failed"))


def _from_mesh(error: MeshError) -> ApiError:
    status = error.http_status if error.http_status in _TYPES else 500
    retry = max(1, -(-error.retry_after_ms // 1000)) if status in (429, 503) else None
    code = "context_length_exceeded" if isinstance(error, NeverFits) else None if status == 400 else error.code.lower()
    return ApiError(status, error.message, code=code, retry_after_s=retry)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
