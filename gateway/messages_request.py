"""Anthropic's Messages request as a chat request.

Thinking blocks become reasoning, tool_use and tool_result blocks calls and tool messages; signatures, cache marks and
budgets mean nothing here. Tools that a server would have to run, and parts that are not text, are refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.dialect import Translated, not_text, object_at, quoted, shared_fields, text_at
from gateway.errors import invalid
from gateway.schema import ChatRequest, RequestFields
from gateway.text.chat_messages import Profile

_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "user_id": "metadata.user_id",
    ".function.parameters": ".input_schema",
    ".function.": ".",
}


class MessagesRequest(RequestFields, kw_only=True):
    """POST /v1/messages. Sampling beyond Anthropic's own fields is taken as in chat."""

    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


def chat_of(body: MessagesRequest, profile: Profile) -> Translated:
    """The same request in chat's words. Raises 400 for what has none."""
    messages: list[dict[str, Any]] = []
    origins: list[str] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _texts(body.system, "system", profile)})
        origins.append("system")
    for number, message in enumerate(body.messages or ()):
        where = f"messages[{number}]"
        made = _turn(message, where, profile)
        messages += made
        origins += [where] * len(made)
    fields = shared_fields(body)
    config = body.output_config or {}
    fields["model"] = None if (body.model or "").startswith("claude-") else body.model
    fields["stop"] = body.stop_sequences if body.stop_sequences is not None else body.stop
    fields["response_format"] = _format(config.get("format") or body.output_format) or body.response_format
    fields["user_id"] = _user(body)
    choice, parallel = _choice(body.tool_choice)
    chat = ChatRequest(
        **fields,
        messages=messages if body.messages is not None else None,
        tools=[_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())] or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        thinking=body.thinking if (body.thinking or {}).get("type") is not None else None,
        reasoning_effort=config.get("effort"),
    )
    return Translated(chat, origins, _NAMES)


def _turn(message: Mapping[str, Any], where: str, profile: Profile) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role", f"{where}.role is {quoted(role)}; known roles: user, assistant")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content:
        raise invalid(f"{where}.content", f"{where}.content must be a string or a list of at least one block")
    blocks = [(object_at(block, f"{where}.content[{i}]"), f"{where}.content[{i}]") for i, block in enumerate(content)]
    if role == "assistant":
        return [_assistant(blocks, profile)]
    if role == "system":  # in the middle of a conversation: told as the hosted service tells it
        text = "\n\n".join(_text(block, place, profile) for block, place in blocks)
        return [{"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"}]
    return _user_side(blocks, profile)


def _user_side(blocks: Sequence[tuple[Mapping[str, Any], str]], profile: Profile) -> list[dict[str, Any]]:
    """Results of tools first, as chat wants them, then the texts."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, str]] = []
    for block, where in blocks:
        if block.get("type") != "tool_result":
            parts.append({"type": "text", "text": _text(block, where, profile)})
            continue
        call_id = text_at(block.get("tool_use_id"), f"{where}.tool_use_id")
        content = _texts(block.get("content"), f"{where}.content", profile)
        results.append({"role": "tool", "tool_call_id": call_id, "content": content})
    return [*results, {"role": "user", "content": parts}] if parts else results


def _assistant(blocks: Sequence[tuple[Mapping[str, Any], str]], profile: Profile) -> dict[str, Any]:
    parts: list[dict[str, str]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, where in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(text_at(block.get("thinking"), f"{where}.thinking"))
        elif kind == "tool_use":
            calls.append(_call(block, where))
        elif kind != "redacted_thinking":
            parts.append({"type": "text", "text": _text(block, where, profile)})
    message: dict[str, Any] = {"role": "assistant", "content": parts}
    if thoughts or profile == "deepseek":  # which wants it passed back
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    arguments = object_at({} if given is None else given, f"{where}.input")
    name, call_id = text_at(block.get("name"), f"{where}.name"), text_at(block.get("id"), f"{where}.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _texts(content: object, where: str, profile: Profile) -> list[dict[str, str]] | str:
    """A string, or text blocks; nothing at all is an empty text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(where, f"{where} must be a string or a list of text blocks")
    places = [(object_at(block, f"{where}[{i}]"), f"{where}[{i}]") for i, block in enumerate(content)]
    return [{"type": "text", "text": _text(block, place, profile)} for block, place in places]


def _text(block: Mapping[str, Any], where: str, profile: Profile) -> str:
    kind = block.get("type")
    if kind != "text":
        return not_text(kind, where, profile)
    return text_at(block.get("text"), f"{where}.text")


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise invalid(
            f"{where}.type", f"{where}.type is {quoted(kind)}: tools that a server runs are not there; send custom"
        )
    function = {name: tool.get(name) for name in ("name", "description", "strict")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _choice(choice: Mapping[str, Any] | None) -> tuple[object, bool | None]:
    """Chat's tool_choice and parallel_tool_calls."""
    if choice is None or choice.get("type") is None:
        return None, None
    kind = choice["type"]
    parallel = False if choice.get("disable_parallel_tool_use") is True else None
    if kind == "tool":
        return {"type": "function", "function": {"name": text_at(choice.get("name"), "tool_choice.name")}}, parallel
    if kind not in ("auto", "any", "none"):
        raise invalid("tool_choice", f"tool_choice.type is {quoted(kind)}; accepted: auto, any, tool, none")
    return "required" if kind == "any" else kind, parallel


def _format(value: object) -> dict[str, Any] | None:
    """Chat's response_format of an output format."""
    if value is None:
        return None
    wanted = object_at(value, "output_config.format")
    if wanted.get("type") != "json_schema":
        text = f"output_config.format.type is {quoted(wanted.get('type'))}; accepted: json_schema"
        raise invalid("output_config.format", text)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.get("schema")}}


def _user(body: MessagesRequest) -> str | None:
    given = (body.metadata or {}).get("user_id")
    return body.user_id if given is None else text_at(given, "metadata.user_id")
