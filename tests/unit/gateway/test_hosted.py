"""The `deepseek` profile: what the hosted service refuses, ignores and adds."""

import json

import pytest

from tests.unit.gateway.dialects import WEATHER, named_events

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
BODY = {"model": "v4-nano", "messages": USER}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": WEATHER}}]
ON, OFF = {"type": "enabled"}, {"type": "disabled"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "a"}]}


@pytest.fixture
async def hosted(serve_with):
    async with serve_with(api_profile="deepseek") as running:
        yield running


@pytest.mark.parametrize(
    "body, param",
    [
        ({"model": "other"}, "model"),
        ({"n": 2}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required", "thinking": ON}, "tool_choice"),
        (
            {"messages": [*USER, {"role": "assistant", "content": "a"}, *USER], "tools": TOOLS, "thinking": ON},
            "messages[1].reasoning_content",
        ),
    ],
)
async def test_refused(hosted, served, body, param):
    status, answer, _ = await hosted.post(PATH, {**BODY, **body})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert not hosted.mesh.starts


async def test_ignored(hosted):
    odd = {
        "top_k": 5, "min_p": 0.5, "repetition_penalty": 1.5, "max_completion_tokens": 3, "stop_token_ids": [9],
        "logit_bias": {"7": 3}, "ignore_eos": True, "regex": "[", "guided_json": {}, "priority": 4, "rid": "x",
        "cache_salt": "s", "chat_template_kwargs": {"thinking": True}, "input_ids": [4, 5], "n": 1,
    }  # fmt: skip
    assert (await hosted.post(PATH, {**BODY, "temperature": 0.5, "thinking": OFF}))[0] == 200
    status, answer, _ = await hosted.post(PATH, {**BODY, **odd, "temperature": 0.5, "thinking": OFF})
    assert status == 200, answer
    plain, rich = hosted.mesh.starts
    assert rich.params == plain.params and rich.prompt.tolist() == plain.prompt.tolist()
    assert (rich.namespace, rich.priority, rich.params.temperature) == (plain.namespace, 0, 0.5)


async def test_thinking_samples_its_own_way(hosted, served):
    asked = {"temperature": 0.25, "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": 1, "thinking": ON}
    for tools, top_p in (([], 1.0), (TOOLS, 0.95)):
        await hosted.post(PATH, {**BODY, **asked, "tools": tools})
        params = hosted.mesh.starts[-1].params
        assert (params.temperature, params.top_p) == (1.0, top_p)
        assert params.presence_penalty == params.frequency_penalty == 0
    await served.post(PATH, {**BODY, **asked})
    assert (served.mesh.starts[-1].params.temperature, served.mesh.starts[-1].params.top_p) == (0.25, 0.5)


async def test_usage_rides_on_the_chunk_that_ends(hosted, served):
    whole = (await hosted.post(PATH, BODY))[1]["usage"]
    parts = [json.loads(event) for event in (await hosted.events(PATH, {**BODY, "stream": True}))[:-1]]
    assert [part.get("usage") for part in parts] == [None] * (len(parts) - 1) + [whole]
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    parts = [json.loads(event) for event in (await served.events(PATH, {**BODY, "stream": True}))[:-1]]
    assert not any("usage" in part for part in parts)
    asked = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    parts = [json.loads(event) for event in (await hosted.events(PATH, asked))[:-1]]
    assert [part["usage"] for part in parts[-2:]] == [whole, whole] and parts[-1]["choices"] == []


async def test_usage_of_completions_likewise(hosted, served):
    body = {"model": "v4-nano", "prompt": "a", "max_tokens": 20}
    whole = (await hosted.post("/v1/completions", body))[1]["usage"]
    parts = [json.loads(event) for event in (await hosted.events("/v1/completions", {**body, "stream": True}))[:-1]]
    assert [part.get("usage") for part in parts] == [None] * (len(parts) - 1) + [whole]
    parts = [json.loads(event) for event in (await served.events("/v1/completions", {**body, "stream": True}))[:-1]]
    assert not any("usage" in part for part in parts)


async def test_completions(hosted):
    body = {"model": "v4-nano", "prompt": "a", "suffix": "b", "max_tokens": 5_000, "top_k": 3, "echo": False}
    assert (await hosted.post("/beta/completions", body))[0] == 200
    assert hosted.mesh.starts[-1].params.top_k == 0
    assert hosted.mesh.starts[-1].params.max_tokens <= 4_096
    status, answer, _ = await hosted.post("/beta/completions", {**body, "n": 2})
    assert (status, answer["error"]["param"]) == (400, "n")


async def test_images_are_told_as_such(hosted, served):
    assert (await hosted.post(PATH, {**BODY, "messages": [IMAGE], "thinking": OFF}))[0] == 200
    prompt = hosted.mesh.tokenizer.decode(hosted.mesh.starts[-1].prompt.tolist(), skip_special_tokens=False)
    assert "<｜User｜>[Unsupported Image]\n\na<｜Assistant｜>" in prompt
    status, answer, _ = await served.post(PATH, {**BODY, "messages": [IMAGE]})
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[0]")


async def test_the_other_dialects_fill_in_missing_reasoning(hosted):
    turns = [*USER, {"role": "assistant", "content": "a"}, *USER]
    tool = {"name": "f", "input_schema": WEATHER}
    body = {"max_tokens": 9, "messages": turns, "tools": [tool], "thinking": {"type": "enabled"}}
    assert (await named_events(hosted, "/v1/messages", body))[-1]["type"] == "message_stop"
    function = {"type": "function", "name": "f", "parameters": WEATHER}
    body = {"input": turns, "tools": [function], "reasoning": {"effort": "high"}}
    assert (await hosted.post("/v1/responses", body))[0] == 200
    prompt = hosted.mesh.tokenizer.decode(hosted.mesh.starts[-1].prompt.tolist(), skip_special_tokens=False)
    assert "<think></think>a" in prompt
