"""Requests of chat, Messages and Responses, broken at any depth: an answer or a refusal, never a 500."""

import copy
import json
import random

import pytest

from tests.unit.gateway.dialects import WEATHER

VALUES = [
    None, True, 0, -1, 3, 2**63, 10**30, 0.5, "", "a", "auto", "text", "x" * 600, "\x00", "<｜DSML｜", [], [[]], [None],
    ["a"], {}, {"a": 1}, {"type": None}, {"type": "text"}, {"type": "text", "text": "t"}, {"type": "tool_use"},
    {"type": "function_call"}, [{"type": "text", "text": None}], {"type": "json_schema", "schema": 5},
]  # fmt: skip
MESSAGES = {
    "model": "v4-nano",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "f", "description": "d", "input_schema": WEATHER, "type": "custom", "strict": False}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 3},
    "output_config": {"effort": "low", "format": None},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["x"],
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "c"}, {"type": "tool_use", "id": "a", "name": "f", "input": {"city": "P"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "r"}], "is_error": False},
            {"type": "text", "text": "b"}]},
    ],
}  # fmt: skip
RESPONSES = {
    "model": "v4-nano",
    "max_output_tokens": 5,
    "instructions": "I",
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "tools": [{"type": "function", "name": "f", "parameters": WEATHER, "strict": None}, {"type": "web_search"}],
    "tool_choice": "auto",
    "metadata": {"a": "b"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "input": [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"role": "user", "content": "e"},
    ],
}
CHAT = {
    "model": "v4-nano",
    "max_completion_tokens": 5,
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": WEATHER}}],
    "tool_choice": "auto",
    "thinking": {"type": "enabled"},
    "chat_template_kwargs": {"enable_thinking": True},
    "response_format": {"type": "text"},
    "logit_bias": {"7": 1},
    "logprobs": True,
    "top_logprobs": 1,
    "stop": ["x"],
    "seed": 3,
    "messages": [
        {"role": "system", "content": "S", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
        {
            "role": "assistant",
            "content": "b",
            "reasoning_content": "r",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "o"},
    ],
}
ROUTES = {
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
    "/v1/chat/completions": CHAT,
}
DATA = {"input_schema", "parameters"}
"""What is not ours to read: a null there says something."""


def places(value, path=()):
    """Paths of everything inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def broken(body, rng):
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2, 4])):
        path = rng.choice(list(places(body)))
        holder = body
        for key in path[:-1]:
            holder = holder[key]
        what = rng.randrange(4)
        if what == 0:
            del holder[path[-1]]
        elif what == 1 and isinstance(holder, list):
            holder.insert(path[-1], copy.deepcopy(holder[path[-1]]))
        elif what == 2 and isinstance(holder, dict):
            holder["unknown"] = rng.choice(VALUES)
        else:
            holder[path[-1]] = rng.choice(VALUES)
    return body


@pytest.mark.parametrize("path", ROUTES)
async def test_no_body_is_a_500(served, path):
    assert (await served.post(path, ROUTES[path]))[0] == 200
    rng = random.Random(path)
    seen = set()
    for _ in range(500):
        body = broken(ROUTES[path], rng)
        async with served.session.post(served.url + path, json=body) as response:
            text = await response.text()
        seen.add(response.status)
        assert response.status in (200, 400, 404, 501), (body, text)
        if response.status != 200:
            assert json.loads(text)["error"]["message"]
    assert {200, 400} <= seen


@pytest.mark.parametrize("path", ROUTES)
async def test_an_optional_field_that_is_null_is_absent(served, path):
    """Every place whose key can go can be null as well, with the same prompt and answer."""
    checked = 0
    for place in places(ROUTES[path]):
        without, nulled = copy.deepcopy(ROUTES[path]), copy.deepcopy(ROUTES[path])
        if not isinstance(place[-1], str) or DATA & {*place[:-1]} or place[-2:-1] == ("input",):
            continue
        for body, change in ((without, "delete"), (nulled, "null")):
            holder = body
            for key in place[:-1]:
                holder = holder[key]
            if change == "delete":
                del holder[place[-1]]
            else:
                holder[place[-1]] = None
        first, answer, _ = await served.post(path, without)
        if first != 200:
            continue
        prompt = served.mesh.starts[-1].prompt.tolist() if served.mesh.starts else answer
        second, said, _ = await served.post(path, nulled)
        assert second == 200, (place, said)
        assert prompt == (served.mesh.starts[-1].prompt.tolist() if served.mesh.starts else said), place
        checked += 1
    assert checked > 15
