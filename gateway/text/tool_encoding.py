"""Tools in the prompt: schema lines, past calls as DSML, results.

Renders into a `Prompt`; user-given names, keys and values are ordinary text there. Parsing calls out of the model's
output is not done here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.text.chat_messages import ChatError, Message, ToolCall, ToolSpec
from gateway.text.prompt import Prompt


def schema_line(tool: ToolSpec, where: str) -> str:
    """One tool as JSON; a strict one with its objects closed first. `where` names it in errors."""
    parameters = strict_parameters(tool, where)
    return to_json({"name": tool.name, "description": tool.description or "", "parameters": parameters}, where)


def strict_parameters(tool: ToolSpec, where: str) -> Any:
    """A tool's parameters; of a strict one, with every object closed."""
    parameters: Any = {} if tool.parameters is None else tool.parameters
    return _closed(parameters, f"{where}.function.parameters") if tool.strict else parameters


def to_json(value: Any, where: str) -> str:
    """JSON with `", "` and `": "`, non-ASCII kept; a value too deep or not JSON is the client's error."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as exc:
        raise ChatError(f"{where} cannot be written as JSON: {exc}", where) from exc


def _closed(schema: Any, where: str, depth: int = 0) -> Any:
    """The schema with every object closed and every property required, as `strict` promises."""
    if depth > 64:
        raise ChatError(f"{where} is nested deeper than 64 levels", where)
    if isinstance(schema, list):
        return [_closed(item, where, depth + 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner = {key: _closed_member(key, value, where, depth + 1) for key, value in schema.items()}
    properties = inner.get("properties")
    if not isinstance(properties, Mapping) or inner.get("type", "object") != "object":
        return inner
    names = list(properties)
    if inner.get("additionalProperties"):
        raise ChatError(f"{where}: a strict tool's objects must not allow additionalProperties", where)
    if "required" in inner and sorted(map(str, inner["required"])) != sorted(names):
        raise ChatError(f"{where}: a strict tool's objects must require all their properties {names}", where)
    head = {"type": "object", "properties": properties, "additionalProperties": False, "required": names}
    return head | {key: value for key, value in inner.items() if key not in head}


def _closed_member(key: str, value: Any, where: str, depth: int) -> Any:
    """Maps of schemas are entered name by name; plain data (enum, const, default) is left alone."""
    if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
        return {name: _closed(item, where, depth) for name, item in value.items()}
    return value if key in ("enum", "const", "default", "examples", "required") else _closed(value, where, depth)


def add_calls(prompt: Prompt, calls: Sequence[ToolCall]) -> None:
    """A turn's calls as one DSML block."""
    prompt.markup("\n\n<｜DSML｜tool_calls>\n", "messages")
    for call in calls:
        prompt.markup('<｜DSML｜invoke name="', "messages")
        prompt.text(f'{call.name}">\n')
        for key, value in _arguments(call.arguments):
            prompt.markup('<｜DSML｜parameter name="', "messages")
            if isinstance(value, str):
                prompt.text(f'{key}" string="true">{value}')
            else:
                prompt.text(f'{key}" string="false">{json.dumps(value, ensure_ascii=False)}')
            prompt.markup("</｜DSML｜parameter>\n", "messages")
        prompt.markup("</｜DSML｜invoke>\n", "messages")
    prompt.markup("</｜DSML｜tool_calls>", "messages")


def _arguments(arguments: str | Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Key and value of each argument; what is not a JSON object is one parameter `arguments` with the raw text."""
    if not isinstance(arguments, str):
        try:
            arguments = json.dumps(arguments, ensure_ascii=False)
        except (ValueError, TypeError, RecursionError) as exc:
            raise ChatError(f"tool call arguments cannot be written as JSON: {exc}", "messages") from exc
    try:
        value = json.loads(arguments, parse_constant=_refuse, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()  # lone surrogates are no text
    except (ValueError, RecursionError):
        value = None
    return value.items() if isinstance(value, dict) else [("arguments", arguments)]


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits} is out of range")
    return value


def result_text(message: Message) -> str:
    """A tool's result as the part of a user turn; its content is not escaped."""
    return f"<tool_result>{message.content}</tool_result>"


def order_results(calls: Sequence[ToolCall], results: Sequence[Message], where: str) -> list[Message]:
    """Results in the order of their calls. Every call must have exactly one; `where` names the calling message."""
    by_id: dict[str | None, Message] = {}
    for result in results:
        if result.tool_call_id in by_id:
            raise ChatError(f"tool_call_id {result.tool_call_id!r} is answered twice after {where}", "messages")
        by_id[result.tool_call_id] = result
    ids = [call.id for call in calls]
    if len(set(ids)) < len(ids):
        raise ChatError(f"{where}.tool_calls has the same id twice", f"{where}.tool_calls")
    missing = [call_id for call_id in ids if call_id not in by_id]
    if missing:
        raise ChatError(
            f"{where} calls tools and must be followed by a tool message for each call; missing: {', '.join(missing)}",
            "messages",
        )
    stray = [str(call_id) for call_id in by_id if call_id not in ids]
    if stray:
        raise ChatError(f"tool_call_id {', '.join(stray)} answers no call of {where}", "messages")
    return [by_id[call_id] for call_id in ids]
