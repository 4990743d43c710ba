"""POST /v1/responses: the official client, events and their numbers, what is translated, refused and ignored."""

import json
import time

import openai
import pytest
from openai import AsyncOpenAI

from gateway.responses_request import ResponsesRequest, chat_of
from meshkit.types import FinishReason
from tests.unit.gateway.dialects import WEATHER, call, calls, folded_response, named_events

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "description": "The weather of a city", "parameters": WEATHER}
BODY = {"model": "v4-nano", "input": "Hi"}
LOW = {"effort": "low"}


@pytest.fixture
async def client(served):
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def says(served, text, **options):
    served.mesh.say = lambda start, choice: served.mesh.text(text, **options)


def prompt_of(served) -> str:
    return served.mesh.tokenizer.decode(served.mesh.starts[-1].prompt.tolist(), skip_special_tokens=False)


async def test_the_client_reads_a_response(client, served):
    says(served, "Fine.", think="why so")
    answer = await client.responses.create(model="v4-nano", input="Hi", instructions="Be terse.", reasoning=LOW)
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", "Fine.")
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "why so"
    assert (answer.instructions, answer.reasoning.effort, answer.store) == ("Be terse.", "low", False)
    usage = answer.usage
    assert usage.output_tokens_details.reasoning_tokens == len(served.mesh.tokenizer.encode("why so"))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens == len(served.mesh.starts[-1].prompt)


async def test_the_client_streams_a_response(client, served):
    says(served, "Fine, and\nyou? 😀", think="why\n\nso")
    async with client.responses.stream(model="v4-nano", input="Hi", reasoning=LOW) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert (thought, text) == ("why\n\nso", "Fine, and\nyou? 😀")
    assert (final.output_text, final.output[0].content[0].text) == (text, thought)
    assert final.usage.output_tokens > 0 and final.status == "completed"


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_client_runs_a_round_with_tools(client, served, streamed):
    says(served, "I look." + calls(call("Paris", 2), call("Rome")), think="two calls")
    options = {"model": "v4-nano", "tools": [TOOL], "reasoning": LOW}
    if streamed:
        async with client.responses.stream(input="Weather?", **options) as stream:
            first = await stream.get_final_response()
    else:
        first = await client.responses.create(input="Weather?", **options)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    paris, rome = first.output[2:]
    assert [json.loads(made.arguments) for made in (paris, rome)] == [{"city": "Paris", "days": 2}, {"city": "Rome"}]
    says(served, "It rains.")
    items = [
        {"role": "user", "content": "Weather?"},
        *(item.to_dict() for item in first.output),
        {"type": "function_call_output", "call_id": rome.call_id, "output": "sun"},
        {"type": "function_call_output", "call_id": paris.call_id, "output": [{"type": "input_text", "text": "rain"}]},
    ]
    second = await client.responses.create(input=items, **options)
    prompt = prompt_of(served)
    assert "<think>two calls</think>I look." + calls(call("Paris", 2), call("Rome")) in prompt
    assert "<tool_result>rain</tool_result>\n\n<tool_result>sun</tool_result>" in prompt
    assert second.status == "completed"


async def test_the_clients_errors_and_unknown_responses(client):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="v4-nano", input="Hi", temperature=5)
    assert refused.value.param == "temperature"
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as unknown:
            await ask("resp_123")
        assert unknown.value.code == "not_found"
    with pytest.raises(openai.NotFoundError):
        _ = [item async for item in client.responses.input_items.list("resp_123")]


async def test_tokens_are_counted_without_running(client, served):
    counted = await client.responses.input_tokens.count(model="v4-nano", input="Hi", tools=[TOOL])
    assert not served.mesh.starts
    answer = await client.responses.create(model="v4-nano", input="Hi", tools=[TOOL])
    assert counted.input_tokens == answer.usage.input_tokens


async def test_events_in_order(served):
    says(served, "ok" + calls(call()), think="so")
    events = await named_events(served, PATH, {**BODY, "tools": [TOOL], "reasoning": LOW})
    kinds = [event["type"].removeprefix("response.") for event in events]
    shape = [kind for kind, before in zip(kinds, [None, *kinds]) if kind != before]
    assert shape == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert folded_response(events) == events[-1]["response"]["output"]


@pytest.mark.parametrize("limit, kinds", [(1, ["reasoning"]), (4, ["reasoning", "message"])])
async def test_a_response_cut_at_its_limit(served, limit, kinds):
    says(served, "one two three four five", think="so")
    body = {**BODY, "reasoning": LOW, "max_output_tokens": limit}
    _, answer, _ = await served.post(PATH, body)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["type"] for item in answer["output"]] == kinds
    assert [item["status"] for item in answer["output"]] == ["completed"] * (len(kinds) - 1) + ["incomplete"]
    events = await named_events(served, PATH, body)
    assert events[-1]["type"] == "response.incomplete"
    assert [(item["type"], item["status"]) for item in folded_response(events)] == [
        (item["type"], item["status"]) for item in answer["output"]
    ]


async def test_a_failure_inside_the_stream(served):
    says(served, "some text", finish=FinishReason.ERROR, error=("worker_lost", "gone"))
    last = (await named_events(served, PATH, BODY))[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["message"] and last["sequence_number"] > 2


async def test_an_abort_fails_the_response(served):
    says(served, "some text", finish=FinishReason.ABORT)
    _, answer, _ = await served.post(PATH, BODY)
    assert (answer["status"], answer["error"]["code"]) == ("failed", "server_error")
    assert answer["output"][0]["content"][0]["text"] == "some text"
    assert (await named_events(served, PATH, BODY))[-1]["type"] == "response.failed"


async def test_log_probabilities(served):
    says(served, "ok then", think="so")
    body = {**BODY, "reasoning": LOW, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    _, answer, _ = await served.post(PATH, body)
    listed = answer["output"][1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in listed) == "ok then"
    assert all(len(entry["top_logprobs"]) == 2 for entry in listed)
    events = await named_events(served, PATH, body)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta["logprobs"]] == listed
    plain = (await served.post(PATH, {**BODY, "reasoning": LOW}))[1]["output"][1]["content"][0]
    assert plain["logprobs"] == []


async def test_the_prompt(served):
    items = [
        {"role": "developer", "content": "S2"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "no"}], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "web_search_call", "id": "ws"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "d"}]},
        {"role": "user", "content": "e"},
    ]
    body = {"input": items, "instructions": "S1", "reasoning": {"effort": "none"}}
    assert (await served.post(PATH, body))[0] == 200
    assert prompt_of(served) == (
        "<｜begin▁of▁sentence｜>S1\n\nS2<｜User｜>a\n\nb<｜Assistant｜></think>c\n\nd<｜end▁of▁sentence｜>"
        "<｜User｜>e<｜Assistant｜></think>"
    )


def test_many_items_of_one_turn_take_no_longer_than_their_length():
    part = {"type": "reasoning_text", "text": "t" * 400}
    items = [{"type": "reasoning", "content": [part]}] * 30_000 + [{"role": "assistant", "content": "a"}] * 10_000
    began = time.process_time()
    (message,) = chat_of(ResponsesRequest(input=items), "open").body.messages
    assert time.process_time() - began < 2
    assert len(message["reasoning_content"]) == 30_000 * 401 - 1 and len(message["content"]) == 10_000


async def test_web_search_is_dropped(served):
    tools = [{"type": "web_search_preview"}, TOOL]
    body = {**BODY, "tools": tools, "tool_choice": {"type": "web_search_preview"}}
    status, answer, _ = await served.post(PATH, body)
    assert status == 200 and [tool["type"] for tool in answer["tools"]] == ["function"]
    with_search = len(served.mesh.starts[-1].prompt)
    await served.post(PATH, {**BODY, "tools": [TOOL]})
    assert len(served.mesh.starts[-1].prompt) == with_search


async def test_null_and_unknown_fields_are_ignored(served):
    body = {
        **BODY, "instructions": None, "tools": [], "tool_choice": None, "reasoning": {"effort": None, "summary": "x"},
        "text": {"format": None, "verbosity": "low"}, "store": False, "background": None, "metadata": None, "n": 3,
        "previous_response_id": None, "truncation": "disabled", "service_tier": "auto", "prompt_cache_key": "k",
        "safety_identifier": "s", "stream_options": {"include_obfuscation": False}, "max_tool_calls": 3, "new": {},
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi", "new": None}], "id": None}],
    }  # fmt: skip
    status, answer, _ = await served.post(PATH, body)
    assert status == 200 and answer["metadata"] == {} and served.mesh.starts[-1].n == 1
    rich = served.mesh.starts[-1].prompt.tolist()
    await served.post(PATH, BODY)
    assert rich == served.mesh.starts[-1].prompt.tolist()


async def test_labels_of_a_response(served):
    body = {**BODY, "metadata": {"a": "b"}, "user": "u", "temperature": 0.5, "max_output_tokens": 9_000}
    _, answer, headers = await served.post("/responses", body)
    assert (answer["metadata"], answer["user"], answer["temperature"]) == ({"a": "b"}, "u", 0.5)
    assert answer["id"].startswith("resp_") and "x-v4mesh-clamped" in headers


@pytest.mark.parametrize(
    "body, status, param",
    [
        ({"background": True}, 501, "background"),
        ({"previous_response_id": "resp_1"}, 404, "previous_response_id"),
        ({"conversation": {"id": "c"}}, 501, "conversation"),
        ({"prompt": {"id": "p"}}, 501, "prompt"),
        ({"truncation": "some"}, 400, "truncation"),
        ({"input": None}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 501, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, 400, "input[0].type"),
        ({"input": [{"role": "critic", "content": "x"}]}, 400, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": 3}]}, 400, "input[0].content"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, 400, "input[0].content"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, 400, "input[0].call_id"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": 1}]}, 400, "input[0].arguments"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"reasoning": {"effort": "huge"}}, 400, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, 400, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format"),
        ({"tools": [{"type": "custom", "name": "x"}]}, 400, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, 400, "tools[0].name"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [TOOL]}, 400, "tool_choice"),
        ({"top_logprobs": 21}, 400, "top_logprobs"),
        ({"user": "x" * 600}, 400, "user"),
    ],
)  # fmt: skip
async def test_bad_input_is_named(served, body, status, param):
    given, answer, _ = await served.post(PATH, {**BODY, **body})
    assert (given, answer["error"]["param"]) == (status, param), answer
    assert param in answer["error"]["message"] and not served.mesh.starts


async def test_a_missing_output_names_the_item(served):
    made = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    items = [{"role": "user", "content": "x"}, made, {"role": "user", "content": "y"}]
    status, answer, _ = await served.post(PATH, {"input": items, "instructions": "s"})
    assert status == 400 and "c1" in answer["error"]["message"] and "input[1] calls tools" in answer["error"]["message"]
    assert answer["error"]["param"] == "input"
