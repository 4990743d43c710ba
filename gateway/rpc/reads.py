"""Public protobuf requests as the bodies that REST requests decode to, so that one set of checks serves both.

Types and presence only; ranges, names of models and everything else are `gateway.validate`'s and the handlers'.
"""

import json
from typing import Any

from meshpb.v1 import generation_pb2 as pb

from gateway.errors import invalid
from gateway.limits import Limits, check_structure
from gateway.schema import ChatRequest, SamplingFields

_PLAIN = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_COUNTS = ("max_tokens", "min_tokens", "n", "seed", "skip_special_tokens")


def sampling_fields(message: pb.Sampling, limits: Limits) -> SamplingFields:
    """Of a raw request."""
    return SamplingFields(**_sampling(message, limits))


def chat_request(message: pb.ChatCompletionRequest, limits: Limits) -> ChatRequest:
    """Of a conversation."""
    choice = message.WhichOneof("tool_choice")
    return ChatRequest(
        **_sampling(message.sampling, limits),
        model=message.model or None,
        messages=[_message(it) for it in message.messages],
        tools=[_tool(index, it, limits) for index, it in enumerate(message.tools)] or None,
        tool_choice=message.tool_mode
        if choice == "tool_mode"
        else {"type": "function", "function": {"name": message.tool_function}}
        if choice
        else None,
        parallel_tool_calls=_given(message, "parallel_tool_calls"),
        chat_template_kwargs={"thinking": message.thinking} if message.HasField("thinking") else None,
        reasoning_effort=message.reasoning_effort or None,
        include_reasoning=_given(message, "include_reasoning"),
        continue_final_message=message.continue_final_message or None,
        logprobs=message.logprobs.sampled or None,
        top_logprobs=message.logprobs.top_k or None,
        priority=message.priority or None,
        cache_salt=message.cache_salt or None,
        user=message.user or None,
        rid=message.request_id or None,
    )


def wants_stream(message: pb.GenerateRequest | pb.ChatCompletionRequest) -> bool:
    return message.stream if message.HasField("stream") else True


def _sampling(message: pb.Sampling, limits: Limits) -> dict[str, Any]:
    fields: dict[str, Any] = {name: _given(message, name) for name in (*_PLAIN, *_COUNTS)}
    fields["stop"] = list(message.stop) or None
    for name in ("stop_token_ids", "stop_regex", "allowed_token_ids", "bad_words"):
        fields[name] = list(getattr(message, name)) or None
    fields["include_stop_str_in_output"] = message.include_stop or None
    fields["ignore_eos"] = message.ignore_eos or None
    fields["logit_bias"] = {str(token): bias for token, bias in message.logit_bias.items()} or None
    return fields | _constraint(message, limits)


def _constraint(message: pb.Sampling, limits: Limits) -> dict[str, Any]:
    kind = message.WhichOneof("constraint")
    match kind:
        case None:
            return {}
        case "json_object":
            return {"response_format": {"type": "json_object"}} if message.json_object else {}
        case "choice":
            return {"choice": list(message.choice.values)}
        case "json_schema" | "structural_tag":
            text = getattr(message, kind)
            check_structure(text.encode(), limits)
            return {kind: text}
        case _:
            return {kind: getattr(message, kind)}


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    """An entry of `messages`; empty fields are absent."""
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content:
        entry["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        entry["tool_calls"] = [
            {"id": it.id, "type": "function", "function": {"name": it.name, "arguments": it.arguments}}
            for it in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if value := getattr(message, name):
            entry[name] = value
    if message.prefix:
        entry["prefix"] = True
    return entry


def _tool(index: int, tool: pb.ChatTool, limits: Limits) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        where = f"tools[{index}].parameters"
        check_structure(tool.parameters.encode(), limits)
        try:
            function["parameters"] = json.loads(tool.parameters, parse_constant=_no_constant)
        except ValueError as error:
            raise invalid(where, f"{where} is not valid JSON: {error}") from None
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _given(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")
