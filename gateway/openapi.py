"""The OpenAPI document: paths from the table of routes, bodies from the very types that decode them.

Ranges and rules beyond types are told in words by the errors; every error has one shape. Built once per process.
"""

from functools import cache
from typing import Any, Final, Protocol

import msgspec

from meshkit.build import build_id

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
_HELLO: Final = [{"role": "user", "content": "Tell me a story about a fox and a lamp."}]
_TOOL: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

# Body type -> an example that works as it stands.
EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "ChatRequest": {"messages": _HELLO, "max_tokens": 64, "stream": True},
    "CompletionRequest": {"prompt": "Once there was", "max_tokens": 16},
    "GenerateRequest": {"text": "Once there was", "sampling_params": {"max_new_tokens": 16, "temperature": 0}},
    "MessagesRequest": {"messages": _HELLO, "max_tokens": 64},
    "ResponsesRequest": {
        "input": "What is the weather in Oslo?",
        "tools": [{"type": "function", "name": "weather", "parameters": _TOOL}],
    },
    "TokenizeRequest": {"messages": _HELLO},
    "ExplainRequest": {"messages": _HELLO},
    "DetokenizeRequest": {"tokens": [5, 6, 7]},
    "ReadingRequest": {"text": "<think>They greet me.</think>Hello!"},
    "AbortRequest": {"rid": "my-request"},
}
STREAMING: Final = ("ChatRequest", "CompletionRequest", "GenerateRequest", "MessagesRequest", "ResponsesRequest")


class Path(Protocol):
    """What the document needs to know of a route."""

    @property
    def paths(self) -> tuple[str, ...]: ...
    @property
    def methods(self) -> tuple[str, ...]: ...
    @property
    def handler(self) -> Any: ...
    @property
    def open(self) -> bool: ...
    @property
    def anthropic(self) -> bool: ...
    @property
    def body(self) -> type[msgspec.Struct] | None: ...


@cache
def document(routes: tuple[Path, ...]) -> bytes:
    """The document as JSON text."""
    bodies = list(dict.fromkeys(route.body for route in routes if route.body is not None))
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    content = {
        "openapi": "3.1.0",
        "info": {
            "title": "v4mesh",
            "version": build_id(),
            "description": "OpenAI's, Anthropic's and SGLang's routes for one DeepSeek-V4 model. Unknown fields are "
            "ignored, null is the same as absent. HEAD is answered wherever GET is.",
        },
        "paths": {path: _path(path, route) for route in routes for path in route.paths},
        "components": {
            "schemas": {**components, "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(content)


def _path(path: str, route: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {method.lower(): _operation(path, method, route) for method in route.methods}
    if "{id}" in path:
        entry["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return entry


def _operation(path: str, method: str, route: Path) -> dict[str, Any]:
    name = f"{method.lower()}_{path.strip('/').replace('/', '_').replace('{id}', 'id')}"
    text = (route.handler.__doc__ or "").strip().splitlines()
    kind = route.body.__name__ if route.body is not None and method in ("POST", "PUT") else ""
    error = "AnthropicError" if route.anthropic else "Error"
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": text[0] if text else path,
        "responses": {
            "200": {"description": "The answer.", "content": _answers(path, kind)},
            "default": {
                "description": "What was wrong, and with which field. Retry-After says when to come again, if at all.",
                "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{error}"}}},
            },
        },
    }
    if not route.open:
        operation["security"] = [{"bearer": []}, {}]
    if kind:
        media: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{kind}"}}
        if kind in EXAMPLES:
            media["examples"] = {"works": {"value": EXAMPLES[kind]}}
        operation["requestBody"] = {"required": True, "content": {JSON: media}}
    return operation


def _answers(path: str, kind: str) -> dict[str, Any]:
    if path in ("/metrics", "/flush_cache"):
        return {"text/plain": {"schema": {"type": "string"}}}
    answer = {"type": ["object", "array"]} if kind == "GenerateRequest" else {"type": "object"}
    content: dict[str, Any] = {JSON: {"schema": answer}}
    if kind in STREAMING:
        event = {"type": "object", "properties": {"event": _TEXT, "data": _TEXT}, "required": ["data"]}
        content[EVENTS] = {"schema": event | {"description": "With `stream`: one server-sent event of many."}}
    return content


_TEXT: Final = {"type": "string"}
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "place": {"type": "string", "description": "Where in a schema or pattern, with a grammar at fault."},
            },
        }
    },
}
_ANTHROPIC_ERROR: Final = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
        "request_id": _TEXT,
    },
}
