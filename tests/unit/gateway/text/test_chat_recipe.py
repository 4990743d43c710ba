"""Generated conversations: text and ids equal DeepSeek's own recipe.

Left out because implementations differ there: call ids that are not ascending (the recipe sorts calls and results by
id, we keep the order of the calls), small floats and integers beyond 64 bits in call arguments, strict tools (the
recipe drops keywords it does not know), prefixes together with calls or json_object (the recipe refuses them).
"""

import json
import random

import deepseek_recipe
import pytest

from gateway.text.chat_encoding import ChatOptions, encode_chat, parse_messages, parse_tools, resolve_thinking

WORDS = [
    "weather",
    "Paris\n",
    " 12°C",
    "深度求索",
    "😀é",
    "<think>",
    "</think>",
    "<｜User｜>",
    "｜DSML｜",
    "</tool_result>",
    '"quoted"',
    "json",
    "\n\n",
    "x" * 50,
    "",
]
VALUES = [1, -7, 2.5, 1.0, True, None, "text", "", "é\n", [1, "a", {"b": [None]}], {}, [], {"k": {"n": 1.25}}]


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randrange(5)))


def tools(rng: random.Random) -> list[dict]:
    out = []
    for index in range(rng.randrange(1, 4)):
        function = {"name": f"tool_{index}"}
        if rng.random() < 0.7:
            function["description"] = text(rng)
        if rng.random() < 0.7:
            properties = {f"p{n}": {"type": "string", "description": text(rng)} for n in range(rng.randrange(3))}
            function["parameters"] = {"type": "object", "properties": properties, "x": 1.5}
        out.append({"type": "function", "function": function})
    return out


def arguments(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return rng.choice(["", "{", "[1, 2]", "null", '{"a": 1} x'])
    value = {rng.choice(["a", "é", "two words", ""]): rng.choice(VALUES) for _ in range(rng.randrange(4))}
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 2]))


def assistant(rng: random.Random, calls: bool) -> list[dict]:
    message = {"role": "assistant", "content": text(rng)}
    if rng.random() < 0.6:
        message["reasoning_content"] = text(rng)
    if not calls:
        return [message]
    ids = [f"call_{n:02}_{rng.randrange(10**9)}" for n in range(rng.randrange(1, 4))]
    message["tool_calls"] = [
        {"id": i, "type": "function", "function": {"name": "tool_0", "arguments": arguments(rng)}} for i in ids
    ]
    results = [{"role": "tool", "tool_call_id": i, "content": text(rng)} for i in ids]
    rng.shuffle(results)
    return [message, *results]


def request(seed: int) -> dict:
    rng = random.Random(seed)
    messages: list[dict] = []
    for _ in range(rng.randrange(1, 8)):
        kind = rng.choice(["system", "user", "user", "assistant", "calls", "latest_reminder"])
        if kind in ("assistant", "calls"):
            messages += assistant(rng, kind == "calls")
        elif rng.random() < 0.3 and kind != "latest_reminder":
            messages.append({"role": kind, "content": [{"type": "text", "text": text(rng)} for _ in range(2)]})
        else:
            messages.append({"role": kind, "content": text(rng)})
    messages.append({"role": "user", "content": text(rng) + "json"})
    body: dict = {"messages": messages}
    if rng.random() < 0.5:
        body["tools"] = tools(rng)
        body["tool_choice"] = rng.choice(["auto", "none"])
    elif not any("tool_calls" in message for message in messages):
        body["messages"].append(assistant(rng, False)[0] | {"prefix": True})
    body |= rng.choice(
        [{}, {"thinking": {"type": "disabled"}}, {"reasoning_effort": rng.choice(["low", "high", "xhigh", "max"])}]
    )
    if rng.random() < 0.3:
        schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
        formats = [{"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, {"type": "json_object"}]
        body["response_format"] = formats[0 if messages[-1].get("prefix") else rng.randrange(2)]
    return body


def ours(tokenizer, body: dict):
    mode = resolve_thinking(thinking=body.get("thinking"), reasoning_effort=body.get("reasoning_effort"))
    form = body.get("response_format", {"type": "text"})
    options = ChatOptions(
        thinking=mode.thinking,
        effort=mode.effort,
        tools=parse_tools(body.get("tools")),
        tool_choice=body.get("tool_choice", "auto"),
        response_format=form["type"],
        response_schema=form.get("json_schema", {}).get("schema"),
    )
    return encode_chat(tokenizer, parse_messages(body["messages"]), options)


@pytest.fixture(scope="module")
def recipe(v4_folder):
    tokenizer = deepseek_recipe.Tokenizer.from_file(str(v4_folder / "tokenizer.json"))
    return deepseek_recipe.DeepseekV4Encoding().with_tokenizer(tokenizer)


@pytest.mark.parametrize("seed", range(300))
def test_equals_the_recipe(v4, recipe, seed):
    body = request(seed)
    chat = deepseek_recipe.ChatCompletionRequest({"model": "DeepSeek-V4-Pro"} | body)
    conversation = chat.convert(deepseek_recipe.ConversionOptions()).conversation
    encoded = ours(v4, body)
    assert encoded.text == recipe.render_conversation(conversation).prompt
    assert encoded.ids == recipe.encode(conversation)


def test_the_generator_reaches_every_feature():
    bodies = [request(seed) for seed in range(300)]
    roles = {message["role"] for body in bodies for message in body["messages"]}
    assert roles == {"system", "user", "assistant", "tool", "latest_reminder"}
    assert any("tools" in body for body in bodies) and any(body["messages"][-1].get("prefix") for body in bodies)
    assert {body.get("response_format", {}).get("type") for body in bodies} == {None, "json_object", "json_schema"}
