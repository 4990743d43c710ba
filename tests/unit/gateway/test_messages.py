"""POST /v1/messages beyond what the official client shows: events, usage, errors, what is refused and ignored."""

import asyncio
import json

import pytest

from gateway import generation
from meshkit.testing import until
from meshkit.types import FinishReason
from tests.unit.gateway.dialects import WEATHER, call, calls, folded_message, named_events

PATH = "/v1/messages"
USER = [{"role": "user", "content": "Hi"}]
BODY = {"model": "v4-nano", "max_tokens": 100, "messages": USER}
TOOL = {"name": "get_weather", "input_schema": WEATHER}


def says(served, text, **options):
    served.mesh.say = lambda start, choice: served.mesh.text(text, **options)


def prompt_of(served) -> str:
    return served.mesh.tokenizer.decode(served.mesh.starts[-1].prompt.tolist(), skip_special_tokens=False)


async def refused(served, body) -> str:
    status, answer, headers = await served.post(PATH, {**BODY, **body})
    assert status == 400 and answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert answer["request_id"] == headers["request-id"] == headers["x-request-id"]
    return answer["error"]["message"]


async def test_events_in_order(served):
    says(served, "ok" + calls(call()), think="so")
    thinking = {"type": "enabled", "budget_tokens": 9}
    events = await named_events(served, PATH, {**BODY, "tools": [TOOL], "thinking": thinking})
    kinds = [event["type"] for event in events]
    shape = [kind for kind, before in zip(kinds, [None, *kinds]) if kind != before]
    part = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert shape == [
        "message_start",
        part[0],
        "ping",
        *part[1:],
        *part,
        *part,
        "message_delta",
        "message_stop",
    ]
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert deltas[deltas.index("text_delta") - 1] == "signature_delta" and deltas[-1] == "input_json_delta"


@pytest.mark.parametrize("streamed", [False, True])
async def test_tokens_from_the_cache_are_counted_apart(served, streamed):
    """https://github.com/vllm-project/vllm/pull/40912"""
    served.mesh.cached = 3
    if streamed:
        events = await named_events(served, PATH, BODY)
        first, usage = events[0]["message"]["usage"], events[-2]["usage"]
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert [first[name] for name in names] == [usage[name] for name in names]
    else:
        usage = (await served.post(PATH, BODY))[1]["usage"]
    prompt = len(served.mesh.starts[-1].prompt)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt - 3, 3)
    assert usage["cache_creation_input_tokens"] == 0 and usage["output_tokens"] > 1


async def test_a_failure_inside_the_stream_is_an_event(served):
    says(served, "some text", finish=FinishReason.ERROR, error=("worker_lost", "gone"))
    events = await named_events(served, PATH, BODY)
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] in ("api_error", "overloaded_error") and events[-1]["request_id"]


async def test_an_abort_is_an_error(served):
    says(served, "some text", finish=FinishReason.ABORT)
    status, answer, _ = await served.post(PATH, BODY)
    assert (status, answer["error"]["type"]) == (503, "overloaded_error")
    assert (await named_events(served, PATH, BODY))[-1]["type"] == "error"


async def test_nothing_said_is_no_block(served):
    says(served, "")
    _, answer, _ = await served.post(PATH, BODY)
    assert (answer["content"], answer["stop_reason"]) == ([], "end_turn")
    assert folded_message(await named_events(served, PATH, BODY))["content"] == []


async def test_a_call_cut_short_keeps_its_raw_arguments(served):
    text = calls(call("Par"))
    ids = served.mesh.tokenizer.encode(text)
    limit = (
        len(ids)
        - len(served.mesh.tokenizer.encode("</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"))
        - 1
    )
    says(served, text)
    body = {**BODY, "tools": [TOOL], "max_tokens": limit}
    _, answer, _ = await served.post(PATH, body)
    assert answer["stop_reason"] == "max_tokens"
    raw = folded_message(await named_events(served, PATH, body))["content"][0]["json"]
    assert raw.startswith('{"city": "P') and answer["content"][0]["input"] == {"arguments": raw}


async def test_the_prompt(served):
    says(served, "ok")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                                     {"type": "text", "text": "b", "citations": None}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "xx"}, {"type": "text", "text": "c"}]},
        {"role": "user", "content": "d"},
    ]  # fmt: skip
    system = [{"type": "text", "text": "S1"}, {"type": "text", "text": "S2", "cache_control": None}]
    body = {"messages": messages, "system": system, "thinking": {"type": "disabled"}}
    await served.post(PATH, {**BODY, **body})
    assert prompt_of(served) == (
        "<｜begin▁of▁sentence｜>S1\n\nS2<｜User｜>a\n\nb<｜Assistant｜></think>c<｜end▁of▁sentence｜>"
        "<｜User｜>d<｜Assistant｜></think>"
    )


async def test_null_and_unknown_fields_at_every_depth_are_ignored(served):
    says(served, "ok")
    body = {
        **BODY,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "citations": None, "new": 1}], "id": None}
        ],
        "system": None, "tools": [], "tool_choice": None, "thinking": None, "stop_sequences": None, "metadata": None,
        "output_config": {"effort": None, "format": None, "new": {}}, "temperature": None, "top_k": None,
        "container": None, "mcp_servers": [], "context_management": {"edits": []}, "service_tier": "auto",
        "stream": None,
    }  # fmt: skip
    assert (await served.post(PATH, body))[0] == 200
    plain = served.mesh.starts[-1].prompt.tolist()
    assert (await served.post(PATH, BODY))[0] == 200
    assert plain == served.mesh.starts[-1].prompt.tolist()
    counted = {"messages": body["messages"], "model": "v4-nano", "tools": [], "thinking": None, "betas": None}
    assert (await served.post(PATH + "/count_tokens?beta=true", counted))[1] == {"input_tokens": len(plain)}


async def test_paths_and_headers(served):
    headers = {"anthropic-version": "2099-01-01", "anthropic-beta": "x,y", "x-request-id": "mine"}
    for path in ("/v1/messages", "/anthropic/v1/messages", "//v1//messages/"):
        status, _, given = await served.post(path, BODY, headers=headers)
        assert (status, given["request-id"], given["x-request-id"]) == (200, "mine", "mine")
    assert (await served.post("/anthropic/v1/messages/count_tokens", BODY))[0] == 200
    status, answer, _ = await served.get(PATH)
    assert (status, answer["type"]) == (405, "error")


async def test_more_tokens_than_fit_are_lowered(served):
    status, _, headers = await served.post(PATH, {**BODY, "max_tokens": 64_000})
    assert status == 200 and headers["x-v4mesh-clamped"].startswith("max_tokens=")


async def test_options_reach_the_sampler(served):
    says(served, "ok")
    options = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "stop_sequences": ["x"], "seed": 4}
    assert (await served.post(PATH, {**BODY, **options, "metadata": {"user_id": "u"}}))[0] == 200
    start = served.mesh.starts[-1]
    assert (start.params.temperature, start.params.top_p, start.params.top_k, start.seed) == (0.5, 0.25, 7, 4)
    salted = start.namespace
    await served.post(PATH, BODY)
    assert served.mesh.starts[-1].namespace != salted


@pytest.mark.parametrize(
    "body, said",
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"messages": None}, "messages is required"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"system": [{"type": "image"}]}, "system[0] has type 'image'"),
        ({"stop_sequences": ["a"] * 33}, "stop_sequences has 33"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is 'web_search_20250305'"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name is 'a b'"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema must"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
        ({"tool_choice": {"type": "any"}}, "tools is empty"),
        ({"thinking": {"type": "hard"}}, "thinking.type is 'hard'"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type is 'xml'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"metadata": {"user_id": "x" * 600}}, "metadata.user_id has 600 bytes"),
        ({"temperature": "warm"}, "temperature"),
    ],
)
async def test_bad_input_is_named(served, body, said):
    assert said in await refused(served, body)


async def test_a_missing_result_names_the_call_and_the_message(served):
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    body = {"messages": [*USER, {"role": "assistant", "content": [use]}, *USER], "system": "s"}
    said = await refused(served, body)
    assert "messages[1] calls tools" in said and "t1" in said
    stray = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2"}]}]
    assert "tool" in await refused(served, {"messages": stray})


@pytest.mark.parametrize("path, body", [(PATH, BODY), ("/v1/responses", {"input": "Hi"})])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(served, path, body, stream):
    says(served, "one two three four five", hold_after=3)
    asking = asyncio.create_task(served.session.post(served.url + path, json={**body, "stream": stream}))
    await until(lambda: bool(served.mesh.starts) and served.gateway.admission.waiting == 0)
    if asking.done():
        asking.result().close()
    else:
        asking.cancel()
    await until(lambda: bool(served.mesh.gone))
    assert served.mesh.gone == [served.mesh.starts[0].request_id]
    await until(lambda: served.gateway.admission.streams == 0)


async def test_routes_that_are_not_there(served):
    headers = {"anthropic-version": "2023-06-01"}
    status, answer, _ = await served.post("/v1/messages/batches", {}, headers=headers)
    assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")
    assert "error" in (await served.get("/v1/models/other", headers=headers))[1]


async def test_what_the_client_sent_is_quoted_in_part(served):
    assert len(await refused(served, {"messages": [{"role": "x" * 100_000, "content": "a"}]})) < 200


async def test_a_body_that_is_too_large(serve_with):
    async with serve_with(max_body_bytes=1024) as served:
        status, answer, _ = await served.post(PATH, {**BODY, "system": "x" * 2_000})
    assert (status, answer["error"]["type"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "path, body, sign, ending",
    [
        (PATH, {**BODY, "stream": True}, b"event: ping\n", b'data: {"type":"message_stop"}\n\n'),
        ("/v1/responses", {"input": "Hi", "stream": True}, b": keep-alive\n\n", b"}\n\n"),
    ],
)
async def test_streams_are_kept_alive_while_queued(mesh, serve_with, monkeypatch, path, body, sign, ending):
    monkeypatch.setattr(generation, "KEEP_ALIVE_SECONDS", 0.05)
    mesh.say = lambda start, choice: mesh.text("late", hold=True)
    async with (
        serve_with() as served,
        served.session.post(served.url + path, json=body) as response,
    ):
        seen = b""
        while seen.count(sign) < 2:
            seen += await response.content.readany()
        mesh.released.set()
        seen += await response.read()
    assert seen.startswith((b"event: message_start\n", b"event: response.created\n")) and seen.endswith(ending)
    assert seen.count(b"event: message_start") + seen.count(b"event: response.created") == 1


async def test_a_broken_body_has_the_dialects_shape(served):
    async with served.session.post(served.url + PATH, data="{", headers={"Content-Type": "application/json"}) as answer:
        said = json.loads(await answer.text())
    assert (answer.status, said["type"], said["error"]["type"]) == (400, "error", "invalid_request_error")
