"""OpenAI's Responses request as a chat request.

Items that belong to one assistant turn (reasoning, text, calls) become one message. Responses in the background,
conversations and prompts kept by name are refused with 501. Web search is dropped as the hosted service drops it; other
tools than functions are refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.dialect import Translated, not_text, object_at, quoted, shared_fields, text_at
from gateway.errors import invalid, missing_part
from gateway.schema import ChatRequest, RequestFields
from gateway.text.chat_messages import Profile

LOGPROBS = "message.output_text.logprobs"
_NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    ".function.": ".",
}
_ROLES = ("user", "assistant", "system", "developer")


class ResponsesRequest(RequestFields, kw_only=True):
    """POST /v1/responses. Sampling beyond OpenAI's own fields is taken as in chat."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None


def chat_of(body: ResponsesRequest, profile: Profile, earlier: Sequence[Mapping[str, Any]] = ()) -> Translated:
    """The same request in chat's words. Raises 400 for what has none, 501 for what is not there.

    `earlier` are the items of the responses that this one goes on from, whose instructions no longer hold.
    """
    _refuse_missing(body)
    turns = _Turns(profile)
    if body.instructions is not None:
        turns.add({"role": "system", "content": body.instructions}, "instructions")
    for number, item in enumerate(earlier):
        turns.take(item, f"previous_response_id.items[{number}]")
    if isinstance(body.input, str):
        turns.add({"role": "user", "content": body.input}, "input")
    elif body.input is not None:
        for number, item in enumerate(body.input):
            turns.take(item, f"input[{number}]")
    turns.flush()
    if not (body.input or body.instructions is not None):
        raise invalid("input", "input is required: a text or at least one item")
    fields = shared_fields(body)
    fields["max_tokens"] = body.max_output_tokens if body.max_output_tokens is not None else body.max_tokens
    fields["response_format"] = _format((body.text or {}).get("format")) or body.response_format
    logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    kept = [(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ()) if not _searches(tool)]
    chat = ChatRequest(
        **fields,
        messages=turns.messages,
        tools=[_tool(tool, where) for tool, where in kept] or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=(body.reasoning or {}).get("effort"),
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs,
    )
    return Translated(chat, turns.origins, _NAMES)


def items_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The request's own items; a text is what a user says."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    return list(body.input or ())


def _refuse_missing(body: ResponsesRequest) -> None:
    for field in ("background", "conversation", "prompt"):
        if getattr(body, field) not in (None, False):
            raise missing_part(field, "work that outlives its request", "a place that keeps it")
    if body.truncation not in (None, "disabled", "auto"):
        raise invalid("truncation", f"truncation is {quoted(body.truncation)}; accepted: auto, disabled")


class _Turns:
    """Gathers items into chat messages; what the assistant said, thought and called in a row is one of them."""

    def __init__(self, profile: Profile) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []
        self._profile = profile
        self._turn: dict[str, Any] | None = None  # the assistant's, open
        self._thoughts: list[str] = []  # of that turn

    def add(self, message: dict[str, Any], where: str) -> None:
        self.flush()
        self.messages.append(message)
        self.origins.append(where)

    def flush(self) -> None:
        """The assistant's turn, if one is open, is over."""
        if self._turn is not None and self._thoughts:
            self._turn["reasoning_content"] = "\n".join(self._thoughts)
        self._turn, self._thoughts = None, []

    def take(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type")
        if kind is None or kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            call_id = text_at(item.get("call_id"), f"{where}.call_id")
            content = self._parts(item.get("output"), f"{where}.output")
            self.add({"role": "tool", "tool_call_id": call_id, "content": content}, where)
        elif kind == "item_reference":
            raise missing_part(where, "an item named by its id", "a store of items")
        elif kind != "web_search_call":
            raise invalid(f"{where}.type", f"{where}.type is {quoted(kind)}, which this server does not know")

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise invalid(f"{where}.role", f"{where}.role is {quoted(role)}; known roles: {', '.join(_ROLES)}")
        content = self._parts(item.get("content"), f"{where}.content")
        if role == "developer" and self._profile == "deepseek":
            role = "user"  # as the hosted service reads it
        if role != "assistant":
            self.add({"role": role, "content": content}, where)
            return
        turn = self._assistant(where)
        turn["content"] += [{"type": "text", "text": content}] if isinstance(content, str) else content

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        """Its text; a summary or what is encrypted says nothing to the model."""
        self._assistant(where)
        content = item.get("content")
        if not isinstance(content, list | None):
            raise invalid(f"{where}.content", f"{where}.content must be a list of parts")
        for number, part in enumerate(content or ()):
            place = f"{where}.content[{number}]"
            self._thoughts.append(text_at(object_at(part, place).get("text"), f"{place}.text"))

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        arguments = item.get("arguments")
        function = {
            "name": text_at(item.get("name"), f"{where}.name"),
            "arguments": "" if arguments is None else text_at(arguments, f"{where}.arguments"),
        }
        call_id = text_at(item.get("call_id"), f"{where}.call_id")
        calls = self._assistant(where).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _assistant(self, where: str) -> dict[str, Any]:
        if self._turn is None:
            turn: dict[str, Any] = {"role": "assistant", "content": []}
            if self._profile == "deepseek":  # which wants it passed back
                turn["reasoning_content"] = ""
            self.add(turn, where)
            self._turn = turn
        return self._turn

    def _parts(self, content: object, where: str) -> str | list[dict[str, str]]:
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise invalid(where, f"{where} must be a string or a list of text parts")
        places = [(object_at(part, f"{where}[{number}]"), f"{where}[{number}]") for number, part in enumerate(content)]
        return [{"type": "text", "text": self._part(part, place)} for part, place in places]

    def _part(self, part: Mapping[str, Any], where: str) -> str:
        kind = part.get("type")
        if kind == "refusal":
            return text_at(part.get("refusal"), f"{where}.refusal")
        if kind not in ("input_text", "output_text", "text"):
            return not_text(kind, where, self._profile)
        return text_at(part.get("text"), f"{where}.text")


def _searches(tool: Mapping[str, Any]) -> bool:
    return str(tool.get("type")).startswith("web_search")


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise invalid(f"{where}.type", f"{where}.type is {quoted(tool.get('type'))}; accepted: function")
    if isinstance(tool.get("function"), dict):  # chat's form
        return dict(tool)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool.get(name) for name in names}}


def _choice(choice: object) -> object:
    """Chat's tool_choice."""
    if not isinstance(choice, dict):
        return choice
    if _searches(choice):
        return None
    if choice.get("type") == "allowed_tools" and "allowed_tools" not in choice:
        allowed = [
            _choice(tool) for tool in choice.get("tools") or () if isinstance(tool, dict) and not _searches(tool)
        ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode") or "auto", "tools": allowed}}
    if choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _format(value: object) -> dict[str, Any] | None:
    """Chat's response_format."""
    if value is None:
        return None
    wanted = object_at(value, "text.format")
    if wanted.get("type") is None:
        return None
    if wanted.get("type") != "json_schema":
        return dict(wanted)
    return {"type": "json_schema", "json_schema": {name: wanted.get(name) for name in ("name", "schema", "strict")}}


def echo_of(body: ResponsesRequest) -> dict[str, Any]:
    """The settings that a response object repeats."""
    tools: Sequence[Any] = body.tools or ()
    reasoning, text = body.reasoning or {}, body.text or {}
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": bool(body.store),
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"strict": None, **tool} for tool in tools if not _searches(tool)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
