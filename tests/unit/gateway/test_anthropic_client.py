"""The official anthropic client, unchanged, against the gateway."""

import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.unit.gateway.dialects import WEATHER, call, calls

USER = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {"name": "get_weather", "description": "The weather of a city", "input_schema": WEATHER}
OPTIONS = {"model": "claude-any-model", "max_tokens": 200}
OFF = {"type": "disabled"}


@pytest.fixture
async def client(served):
    async with AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def says(served, text, **options):
    served.mesh.say = lambda start, choice: served.mesh.text(text, **options)


async def test_a_message(client, served):
    says(served, "Fine.", think="why")
    answer = await client.messages.create(messages=USER, thinking={"type": "enabled", "budget_tokens": 1024}, **OPTIONS)
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", "claude-any-model")
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert (answer.content[0].thinking, answer.content[1].text) == ("why", "Fine.")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == len(served.mesh.tokenizer.encode("why" + "Fine.")) + 2


async def test_a_stream(client, served):
    says(served, "Fine, and\nyou? 😀", think="why\n\nso")
    options = {**OPTIONS, "messages": USER, "thinking": {"type": "adaptive"}}
    whole = await client.messages.create(**options)
    async with client.messages.stream(**options) as stream:
        seen = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert {"thinking", "signature", "text", "message_stop"} <= set(seen)
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].thinking == whole.content[0].thinking == "why\n\nso"
    assert final.content[1].text == whole.content[1].text == "Fine, and\nyou? 😀"
    assert final.content[0].signature and final.usage == whole.usage
    assert (final.stop_reason, final.model) == (whole.stop_reason, whole.model)


async def test_a_stop_sequence_and_a_length(client, served):
    says(served, "one two three")
    answer = await client.messages.create(messages=USER, stop_sequences=[" three", "x"], thinking=OFF, **OPTIONS)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " three")
    assert answer.content[0].text == "one two"
    short = await client.messages.create(messages=USER, thinking=OFF, **{**OPTIONS, "max_tokens": 1})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 1)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_round_with_tools(client, served, streamed):
    says(served, "I look." + calls(call("Paris", 2), call("Rome")), think="two calls")
    options = {**OPTIONS, "tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    if streamed:
        async with client.messages.stream(messages=USER, **options) as stream:
            first = await stream.get_final_message()
    else:
        first = await client.messages.create(messages=USER, **options)
    assert (first.stop_reason, [b.type for b in first.content]) == (
        "tool_use",
        ["thinking", "text", "tool_use", "tool_use"],
    )
    paris, rome = first.content[2:]
    assert (paris.input, rome.input) == ({"city": "Paris", "days": 2}, {"city": "Rome"})
    says(served, "It rains.")
    results = [
        {"type": "tool_result", "tool_use_id": rome.id, "content": "sun"},
        {"type": "tool_result", "tool_use_id": paris.id, "content": [{"type": "text", "text": "rain"}]},
        {"type": "text", "text": "Be brief."},
    ]
    messages = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = await client.messages.create(messages=messages, **options)
    prompt = served.mesh.tokenizer.decode(served.mesh.starts[-1].prompt.tolist(), skip_special_tokens=False)
    assert "<think>two calls</think>I look." + calls(call("Paris", 2), call("Rome")) in prompt
    assert "<tool_result>rain</tool_result>\n\n<tool_result>sun</tool_result>\n\nBe brief." in prompt
    assert second.stop_reason == "end_turn"


async def test_tokens_are_counted_without_running(client, served):
    says(served, "ok")
    options = {"model": "v4-nano", "messages": USER, "tools": [TOOL], "system": "Be terse.", "thinking": OFF}
    counted = await client.messages.count_tokens(**options)
    assert not served.mesh.starts
    answer = await client.messages.create(max_tokens=5, **options)
    assert counted.input_tokens == answer.usage.input_tokens
    assert (await client.beta.messages.count_tokens(**options)).input_tokens == counted.input_tokens


async def test_models(client):
    listed = [model async for model in client.models.list()]
    assert [(model.id, model.type, model.display_name) for model in listed] == [("v4-nano", "model", "v4-nano")]
    assert (await client.models.retrieve("v4-nano")).created_at == listed[0].created_at


async def test_errors_are_the_clients_own_classes(client, served):
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(messages=USER, extra_body={"temperature": 3}, **OPTIONS)
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert "temperature" in refused.value.body["error"]["message"]
    assert refused.value.request_id == refused.value.body["request_id"]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(model="other", messages=USER, max_tokens=5)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    served.mesh.status = None
    with pytest.raises(anthropic.InternalServerError) as busy:
        await client.messages.create(messages=USER, **OPTIONS)
    assert busy.value.status_code == 503 and busy.value.body["error"]["type"] == "overloaded_error"


async def test_keys_by_header(served, serve_with, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice sk-test-0123456789abcdef\n")
    keys.chmod(0o600)
    async with serve_with(api_key_file=keys) as locked:
        good = AsyncAnthropic(base_url=locked.url, api_key="sk-test-0123456789abcdef", max_retries=0)
        bearer = AsyncAnthropic(base_url=locked.url, auth_token="sk-test-0123456789abcdef", max_retries=0)
        bad = AsyncAnthropic(base_url=locked.url, api_key="sk-wrong", max_retries=0)
        async with good, bearer, bad:
            for client in (good, bearer):
                assert (await client.messages.create(messages=USER, **OPTIONS)).content
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await bad.messages.create(messages=USER, **OPTIONS)
    assert refused.value.body["error"]["type"] == "authentication_error"
