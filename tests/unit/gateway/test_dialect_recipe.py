"""Requests of both dialects give the prompt that DeepSeek's own converters give."""

import deepseek_recipe as recipe
import pytest

from gateway import messages_request, responses_request
from gateway.schema import ChatRequest
from gateway.text.chat_encoding import ChatOptions, encode_chat, parse_messages, parse_tools, resolve_thinking
from tests.unit.gateway.dialects import WEATHER

OPTIONS = recipe.ConversionOptions().with_model_alias("m", recipe.ModelVersion.DeepseekV4Pro)
TOOL = {"name": "f", "description": "d", "input_schema": WEATHER}
FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": WEATHER}
USER = {"role": "user", "content": "q"}


def text(value: str, kind: str = "text") -> dict:
    return {"type": kind, "text": value}


def thought(value: str) -> dict:
    return {"type": "thinking", "thinking": value, "signature": "s"}


def use(name: str, **given) -> dict:
    return {"type": "tool_use", "id": name, "name": "f", "input": given}


def result(name: str, *parts: str) -> dict:
    return {"type": "tool_result", "tool_use_id": name, "content": [text(part) for part in parts]}


MESSAGES = {
    "blocks": {"system": [text("A"), text("B")], "messages": [{"role": "user", "content": [text("x"), text("y")]}]},
    "a tool loop": {
        "tools": [TOOL],
        "messages": [
            USER,
            {"role": "assistant", "content": [thought("T"), text("c"), thought("T2"), text("c2"), use("a", city="é")]},
            {"role": "user", "content": [result("a", "r1", "r2"), text("after"), text("that")]},
        ],
    },
    "two calls": {
        "tools": [TOOL],
        "messages": [
            USER,
            {"role": "assistant", "content": [use("a", city="P", days=2), use("b", city="R")]},
            {"role": "user", "content": [result("b", "rb"), result("a", "ra")]},
        ],
    },
    "no result text": {
        "tools": [TOOL],
        "messages": [USER, {"role": "assistant", "content": [use("a")]}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "is_error": True}]}],
    },
    "ends with the assistant": {"messages": [USER, {"role": "assistant", "content": "pre"}]},
    "two in a row": {"messages": [USER, *({"role": "assistant", "content": text} for text in "ab"), USER]},
    "a system message inside": {"messages": [USER, {"role": "system", "content": "S"}]},
    "thinking off": {"thinking": {"type": "disabled"}, "tools": [TOOL], "messages": [USER]},
    "most effort": {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}, "messages": [USER]},
    "no tools": {"tools": [TOOL], "tool_choice": {"type": "none"}, "messages": [USER]},
}  # fmt: skip


def reasoning(*texts: str) -> dict:
    return {"type": "reasoning", "summary": [], "content": [text(value, "reasoning_text") for value in texts]}


def made(name: str, arguments: str = '{"a": 1}') -> dict:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": arguments}


def output(name: str, value) -> dict:
    return {"type": "function_call_output", "call_id": name, "output": value}


RESPONSES = {
    "a text": {"input": "hi", "instructions": "I", "reasoning": {"effort": "low", "summary": "auto"}},
    "a tool loop": {
        "instructions": "I",
        "tools": [FUNCTION],
        "input": [
            {"role": "developer", "content": "D"},
            {"role": "user", "content": [text("a", "input_text"), text("b", "input_text")]},
            reasoning("R1", "R2"),
            made("c1"),
            made("c2", "broken"),
            output("c2", "o2"),
            output("c1", [text("o1", "input_text"), text("o1b", "input_text")]),
            {"type": "message", "role": "assistant", "content": [text("x", "output_text"), text("y", "output_text")]},
            USER,
        ],
    },
    "several items of one turn": {
        "tools": [FUNCTION],
        "input": [
            USER,
            reasoning("R1"),
            reasoning("R2"),
            {"role": "assistant", "content": "t1"},
            {"role": "assistant", "content": "t2"},
            USER,
        ],
    },
    "a summary alone": {
        "tools": [FUNCTION],
        "input": [
            USER,
            {"type": "reasoning", "summary": [text("S", "summary_text")]},
            {"role": "assistant", "content": "t"},
            USER,
        ],
    },
    "thinking off": {"input": [USER], "tools": [FUNCTION], "reasoning": {"effort": "none"}},
    "searches": {"input": "x", "tools": [{"type": "web_search"}, FUNCTION]},
    "instructions alone": {"instructions": "x", "input": [{"role": "user", "content": ""}]},
}


def ours(tokenizer, body: ChatRequest) -> str:
    tools = parse_tools(body.tools)
    mode = resolve_thinking(thinking=body.thinking, reasoning_effort=body.reasoning_effort)
    choice = body.tool_choice or "auto"
    options = ChatOptions(thinking=mode.thinking, effort=mode.effort, tools=tools, tool_choice=choice)
    return encode_chat(tokenizer, parse_messages(body.messages), options).text


def theirs(request) -> str:
    conversation = request.convert(OPTIONS).conversation
    return recipe.DeepseekV4Encoding().render_conversation(conversation).prompt


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(tokenizer, name):
    body = {"max_tokens": 10, **MESSAGES[name]}
    made_ours = messages_request.chat_of(messages_request.MessagesRequest(**body), "deepseek").body
    assert ours(tokenizer, made_ours) == theirs(recipe.MessagesRequest({"model": "m", **body}))


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(tokenizer, name):
    body = RESPONSES[name]
    made_ours = responses_request.chat_of(responses_request.ResponsesRequest(**body), "deepseek").body
    assert ours(tokenizer, made_ours) == theirs(recipe.ResponsesRequest({"model": "m", **body}))
