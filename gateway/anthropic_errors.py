"""Errors in Anthropic's shape: a type, a message, and the request's id beside them.

There is no field for the parameter at fault; messages name it. Statuses are the same as in the other dialects.
"""

from typing import Any

from gateway.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError, label: str) -> dict[str, Any]:
    """The JSON of a response, or of the event that ends a stream."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": label}
