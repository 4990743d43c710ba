"""The span of one finished request, whichever transport it came by, in OpenTelemetry's GenAI words.

Recorded after the fact with given times; sizes and names only, never prompts or answers.
"""

import time

from gateway.exchange import Caller
from meshkit.obs import Tracing


def record_request(tracing: Tracing, caller: Caller, model: str, operation: str, status: int, seconds: float) -> None:
    """`seconds` is how long the request took until now; `operation` as in gen_ai.operation.name."""
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "deepseek",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": caller.notes.get("prompt_tokens", 0),
        "gen_ai.usage.output_tokens": caller.notes.get("output_tokens", 0),
        "http.response.status_code": status,
    }
    if "error" in caller.notes:
        attributes["error.type"] = str(caller.notes["error"])
    end = time.monotonic_ns()
    tracing.record(f"{operation} {model}", caller.traceparent, end - int(seconds * 1e9), end, attributes)
