"""The conversation a request carries: messages, tool specs and the mode it asks for, checked and in one shape.

Turns the JSON of `messages`, `tools` and the thinking fields into frozen values and refuses what no prompt can be made
of. Errors are `ChatError` with the field at fault. How a conversation becomes a prompt is `chat_encoding`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Profile = Literal["open", "deepseek"]
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
MAX_TOOLS: Final = 128
UNSUPPORTED_IMAGE: Final = "[Unsupported Image]"
"""What the hosted service writes for an image that a text model was sent."""
_TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")


class ChatError(ValueError):
    """A conversation that cannot be encoded; `param` is the request field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the assistant made earlier; `arguments` is the JSON text, or the object itself."""

    id: str
    name: str
    arguments: str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function the model may call; `parameters` is its JSON schema."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `role` is one of `ROLES` but `developer`, which is read as `system`."""

    role: str
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class ThinkingMode:
    """Whether the model thinks first, and how hard (one of `EFFORTS` but `none`)."""

    thinking: bool
    effort: str


def parse_messages(raw: object, profile: Profile = "open") -> tuple[Message, ...]:
    """Messages of a request body's `messages`."""
    if not isinstance(raw, Sequence) or isinstance(raw, (str, bytes)) or not raw:
        raise ChatError("messages must be a list of at least one message", "messages")
    messages = tuple(_message(item, f"messages[{index}]", profile) for index, item in enumerate(raw))
    for index, message in enumerate(messages):
        if message.prefix and (message.role != "assistant" or index != len(messages) - 1):
            raise ChatError(
                "prefix is only for the last message, and that must be the assistant's", f"messages[{index}].prefix"
            )
    return messages


def _message(item: object, where: str, profile: Profile) -> Message:
    if not isinstance(item, Mapping):
        raise ChatError(f"{where} must be an object", where)
    role = item.get("role")
    if role not in ROLES or (role == "developer" and profile == "deepseek"):
        known = ", ".join(name for name in ROLES if name != "developer" or profile == "open")
        raise ChatError(f"{where}.role is {role!r}; known roles: {known}", f"{where}.role")
    if role == "developer":
        role = "system"
    if role == "assistant":
        return _assistant(item, where, profile)
    content = _content(item.get("content"), f"{where}.content", profile)
    if content is None:
        raise ChatError(f"{where}.content must be a string or a list of text parts", f"{where}.content")
    call_id = item.get("tool_call_id") if role == "tool" else None
    if role == "tool" and (not isinstance(call_id, str) or not call_id):
        raise ChatError(f"{where}.tool_call_id must name the call it answers", f"{where}.tool_call_id")
    return Message(role, content, tool_call_id=call_id, prefix=_flag(item, "prefix", where))


def _assistant(item: Mapping[str, Any], where: str, profile: Profile) -> Message:
    content = _content(item.get("content"), f"{where}.content", profile)
    reasoning = item.get("reasoning_content")
    if reasoning is None:
        reasoning = item.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, str):
        raise ChatError(f"{where}.reasoning_content must be a string", f"{where}.reasoning_content")
    calls = item.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ChatError(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
    if content is None and not calls and reasoning is None:
        raise ChatError(f"{where} must have content, reasoning_content or tool_calls", f"{where}.content")
    parsed = tuple(_tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls))
    return Message("assistant", content or "", reasoning, parsed, prefix=_flag(item, "prefix", where))


def _content(value: object, where: str, profile: Profile) -> str | None:
    """A string, or text parts joined by a blank line; None when absent."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise ChatError(f"{where} must be a string or a list of text parts", where)
    return "\n\n".join(_part(part, f"{where}[{index}]", profile) for index, part in enumerate(value))


def _part(part: object, where: str, profile: Profile) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "text":
        raise ChatError(f"{where}.text must be a string", f"{where}.text")
    if kind == "image_url" and profile == "deepseek":
        return UNSUPPORTED_IMAGE
    raise ChatError(f"{where} has type {kind!r}; this model reads text only", where)


def _flag(item: Mapping[str, Any], name: str, where: str) -> bool:
    value = item.get(name)
    if value is not None and not isinstance(value, bool):
        raise ChatError(f"{where}.{name} must be true or false", f"{where}.{name}")
    return bool(value)


def _tool_call(item: object, where: str) -> ToolCall:
    function = item.get("function") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping) or not isinstance(function, Mapping):
        raise ChatError(f"{where} must be an object with a function", where)
    call_id, name, arguments = item.get("id"), function.get("name"), function.get("arguments")
    if arguments is None:
        arguments = ""
    if not isinstance(call_id, str) or not call_id:
        raise ChatError(f"{where}.id must be a non-empty string", f"{where}.id")
    if not isinstance(name, str) or not name:
        raise ChatError(f"{where}.function.name must be a non-empty string", f"{where}.function.name")
    if not isinstance(arguments, (str, Mapping)):
        raise ChatError(f"{where}.function.arguments must be JSON text or an object", f"{where}.function.arguments")
    return ToolCall(call_id, name, arguments)


def parse_tools(raw: object) -> tuple[ToolSpec, ...]:
    """Tool specs of a request body's `tools`; None gives none."""
    if raw is None:
        return ()
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise ChatError("tools must be a list", "tools")
    if len(raw) > MAX_TOOLS:
        raise ChatError(f"tools has {len(raw)} entries; at most {MAX_TOOLS} are allowed", "tools")
    tools = tuple(_tool(item, f"tools[{index}]") for index, item in enumerate(raw))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ChatError(f"tools[{index}].function.name {name!r} is used twice", f"tools[{index}].function.name")
    return tools


def _tool(item: object, where: str) -> ToolSpec:
    function = item.get("function") if isinstance(item, Mapping) else None
    kind = item.get("type") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping) or kind not in (None, "function") or not isinstance(function, Mapping):
        raise ChatError(f"{where} must be {{type: 'function', function: {{...}}}}", where)
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise ChatError(
            f"{where}.function.name is {name!r}; it must be 1-128 of a-z A-Z 0-9 _ -", f"{where}.function.name"
        )
    if description is not None and not isinstance(description, str):
        raise ChatError(f"{where}.function.description must be a string", f"{where}.function.description")
    if parameters is not None and (not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object"):
        raise ChatError(f"{where}.function.parameters must be an object schema", f"{where}.function.parameters")
    return ToolSpec(name, description, parameters, _flag(function, "strict", f"{where}.function"))


def resolve_thinking(
    *,
    thinking: object = None,
    reasoning_effort: object = None,
    reasoning: object = None,
    template_kwargs: object = None,
    default_thinking: bool = True,
    default_effort: str = "high",
) -> ThinkingMode:
    """The mode a request asks for: `thinking`, then the effort, then the template arguments, then the default.

    `reasoning` ({effort, enabled}) is another spelling of the effort and, after it, of a switch. An explicit
    `thinking` wins over effort "none", which then means the default effort.
    """
    nested = reasoning if isinstance(reasoning, Mapping) else {}
    field = "reasoning_effort" if reasoning_effort is not None else "reasoning.effort"
    effort = _effort(reasoning_effort if reasoning_effort is not None else nested.get("effort"), field)
    switch = _thinking_type(thinking)
    if switch is None and effort is not None:
        switch = effort != "none"
    if switch is None:
        switch = _switch(nested, ("enabled",), "reasoning")
    if switch is None and isinstance(template_kwargs, Mapping):
        switch = _switch(template_kwargs, ("thinking", "enable_thinking"), "chat_template_kwargs")
    chosen = default_effort if effort in (None, "none") else effort
    assert chosen is not None
    return ThinkingMode(default_thinking if switch is None else switch, chosen)


def keeps_reasoning(template_kwargs: object) -> bool:
    """Whether `drop_thinking` is false: earlier reasoning stays in the prompt without tools too."""
    if not isinstance(template_kwargs, Mapping):
        return False
    return _switch(template_kwargs, ("drop_thinking",), "chat_template_kwargs") is False


def _effort(value: object, field: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in EFFORTS:
        raise ChatError(f"{field} is {value!r}; accepted: {', '.join(EFFORTS)}", field)
    return value


def _thinking_type(value: object) -> bool | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else value
    if kind is None:
        return None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise ChatError(f"thinking.type is {kind!r}; accepted: enabled, disabled, adaptive", "thinking")
    return bool(kind != "disabled")


def _switch(values: Mapping[str, Any], names: Sequence[str], where: str) -> bool | None:
    """Off if any of the named switches is false, on if one is true, None if none is given."""
    given = [values[name] for name in names if values.get(name) is not None]
    for value in given:
        if not isinstance(value, bool):
            raise ChatError(f"{where}: {' and '.join(names)} must be true or false, not {value!r}", where)
    return all(value is True for value in given) if given else None
