"""Chat completions over HTTP, whole and streamed, against a scripted mesh."""

import asyncio
import json
from typing import Any

import pytest

from meshkit.frames import Verdict
from meshkit.pages import page_keys
from meshkit.testing import until
from meshkit.types import FinishReason

USER = [{"role": "user", "content": "Hi"}]
PATH = "/v1/chat/completions"


def chunks(events: list[str]) -> list[dict[str, Any]]:
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def joined(parts: list[dict[str, Any]], index: int = 0) -> tuple[str, str]:
    """Reasoning and content of one choice."""
    deltas = [c["choices"][0]["delta"] for c in parts if c["choices"] and c["choices"][0]["index"] == index]
    return tuple("".join(d[key] or "" for d in deltas) for key in ("reasoning_content", "content"))


async def test_whole_message(served):
    status, body, headers = await served.post(PATH, {"messages": USER})
    assert status == 200
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello 0 world.", "reasoning_content": None}
    assert (choice["finish_reason"], choice["matched_stop"], choice["stop_reason"]) == ("stop", 1, None)
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "v4-nano"
    start = served.mesh.starts[0]
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(start.prompt) and usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"]
    assert start.params.max_tokens == 4096 - len(start.prompt)
    assert start.deadline_ms == 3_600_000 and len(start.request_id) == 16
    assert headers["x-request-id"]


async def test_stream_has_role_text_finish_and_done_in_this_order(served):
    parts = chunks(await served.events(PATH, {"messages": USER, "stream": True}))
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": "", "reasoning_content": None}
    assert all(set(delta) == {"content", "reasoning_content"} for delta in deltas[1:])
    assert all((delta["content"] is None) != (delta["reasoning_content"] is None) for delta in deltas[1:])
    assert deltas[-1] == {"content": "", "reasoning_content": None}
    finishes = [part["choices"][0]["finish_reason"] for part in parts]
    assert finishes == [None] * (len(parts) - 1) + ["stop"]
    assert joined(parts) == ("", "Hello 0 world.")
    assert len({(p["id"], p["created"], p["model"]) for p in parts}) == 1
    assert all("usage" not in part for part in parts)


async def test_thinking_goes_into_its_own_field(served):
    served.mesh.say = lambda start, choice: served.mesh.text("Fine.", think="\nlet me see\n")
    body = {"messages": USER, "thinking": {"type": "enabled"}}
    _, whole, _ = await served.post(PATH, body)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("let me see", "Fine.")
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    parts = chunks(await served.events(PATH, {**body, "stream": True}))
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": None, "reasoning_content": ""}
    assert joined(parts) == ("let me see", "Fine.")


@pytest.mark.parametrize(
    ("extra", "content"),
    [({"separate_reasoning": False}, "<think>why</think>Fine."), ({"include_reasoning": False}, "Fine.")],
)
async def test_reasoning_inline_or_dropped(served, extra, content):
    served.mesh.say = lambda start, choice: served.mesh.text("Fine.", think="why")
    body = {"messages": USER, "reasoning_effort": "low", **extra}
    _, whole, _ = await served.post(PATH, body)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": content, "reasoning_content": None}
    parts = chunks(await served.events(PATH, {**body, "stream": True}))
    assert joined(parts) == ("", content)


async def test_length_without_end_of_thought_is_all_reasoning(served):
    served.mesh.say = lambda start, choice: served.mesh.text("a b c d e f g h")
    _, whole, _ = await served.post(PATH, {"messages": USER, "thinking": {"type": "enabled"}, "max_tokens": 3})
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] and whole["usage"]["completion_tokens"] == 3


async def test_three_choices_interleave_by_index(served):
    body = {"messages": USER, "n": 3, "seed": 5}
    _, whole, _ = await served.post(PATH, body)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert texts == [f"Hello {n} world." for n in range(3)]
    assert whole["usage"]["completion_tokens"] == 18
    parts = chunks(await served.events(PATH, {**body, "stream": True}))
    for index in range(3):
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert sum("role" in choice["delta"] for choice in mine) == 1
        assert sum(choice["finish_reason"] is not None for choice in mine) == 1
        assert joined(parts, index)[1] == texts[index]
    assert served.mesh.starts[0].seed == 5 and served.mesh.starts[0].n == 3


async def test_usage_chunk_comes_last_and_others_say_null(served):
    options = {"include_usage": True}
    parts = chunks(await served.events(PATH, {"messages": USER, "stream": True, "stream_options": options}))
    assert parts[-1]["choices"] == [] and parts[-1]["usage"]["completion_tokens"] == 6
    assert all(part["usage"] is None for part in parts[:-1])


async def test_continuous_usage_counts_up(served):
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = chunks(await served.events(PATH, {"messages": USER, "stream": True, "stream_options": options}))
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts) and counts[-1] == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_cover_every_visible_token(served, stream):
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2, "stream": stream}
    if stream:
        parts = chunks(await served.events(PATH, body))
        listed = [p["choices"][0]["logprobs"] for p in parts if p["choices"][0]["logprobs"]]
        entries = [entry for item in listed for entry in item["content"]]
    else:
        _, whole, _ = await served.post(PATH, body)
        entries = whole["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "Hello 0 world."
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == b"Hello 0 world."
    assert all(entry["logprob"] == -0.25 and len(entry["top_logprobs"]) == 2 for entry in entries)


@pytest.mark.parametrize("burst", [1, 3, 50])
async def test_stop_string_is_cut_and_tells_the_mesh_how_much_counts(served, burst):
    served.mesh.say = lambda start, choice: served.mesh.text("one two three four five", burst=burst)
    body = {"messages": USER, "stop": ["three"]}
    _, whole, _ = await served.post(PATH, body)
    choice = whole["choices"][0]
    assert choice["message"]["content"] == "one two "
    assert (choice["finish_reason"], choice["matched_stop"], choice["stop_reason"]) == ("stop", "three", "three")
    (_, number, keep) = served.mesh.stopped[0]
    assert number == 0 and keep == whole["usage"]["completion_tokens"]
    parts = chunks(await served.events(PATH, {**body, "stream": True}))
    assert joined(parts) == ("", "one two ")
    _, kept, _ = await served.post(PATH, {**body, "include_stop_str_in_output": True})
    assert kept["choices"][0]["message"]["content"] == "one two three"


async def test_held_text_comes_out_when_the_stop_string_does_not_come(served):
    served.mesh.say = lambda start, choice: served.mesh.text("x Obs")
    body = {"messages": USER, "stop": "Observation:"}
    assert joined(chunks(await served.events(PATH, {**body, "stream": True}))) == ("", "x Obs")


async def test_stop_strings_do_not_count_in_the_reasoning(served):
    served.mesh.say = lambda start, choice: served.mesh.text("Answer: 4 Question: next", think="so Question: 2+2")
    body = {"messages": USER, "thinking": {"type": "enabled"}, "stop": ["Question:"]}
    _, whole, _ = await served.post(PATH, body)
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"] == "so Question: 2+2" and message["content"] == "Answer: 4 "


async def test_split_characters_wait_until_they_are_whole(served, tokenizer):
    served.mesh.say = lambda start, choice: served.mesh.text("a😀é漢b")
    parts = chunks(await served.events(PATH, {"messages": USER, "stream": True}))
    assert joined(parts) == ("", "a😀é漢b")
    assert all("�" not in (part["choices"][0]["delta"]["content"] or "") for part in parts)


async def test_a_stop_id_is_reported_and_left_out(served, tokenizer):
    comma = tokenizer.encode(",")[0]
    script = served.mesh.text("one,")
    script.bursts.pop()
    served.mesh.say = lambda start, choice: script
    _, whole, _ = await served.post(PATH, {"messages": USER, "stop_token_ids": [comma]})
    choice = whole["choices"][0]
    assert choice["message"]["content"] == "one"
    assert choice["matched_stop"] == choice["stop_reason"] == comma


async def test_error_of_a_choice_is_a_status_or_an_event(served):
    script = served.mesh.text("partly", finish=FinishReason.ERROR, error=("internal", "worker lost"))
    script.bursts.pop()
    served.mesh.say = lambda start, choice: script
    status, body, _ = await served.post(PATH, {"messages": USER})
    assert status == 500 and body["error"]["type"] == "server_error"
    events = await served.events(PATH, {"messages": USER, "stream": True})
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == 500
    assert joined(chunks([*events[:-2], "[DONE]"])) == ("", "partly")


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        ((Verdict.QUEUE_FULL, "full", 2500), 429, "queue_full"),
        ((Verdict.NO_WORKER, "", 0), 503, "no_worker"),
        ((Verdict.DRAINING, "", 0), 503, "draining"),
        ((Verdict.NEVER_FITS, "too large", 0), 400, "context_length_exceeded"),
        ((Verdict.INVALID, "bad", 0), 400, "invalid_request_error"),
        ((Verdict.POISONED, "", 0), 500, "poisoned"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_come_before_the_first_byte(served, refusal, status, code, stream):
    served.mesh.refusal = refusal
    answered, body, headers = await served.post(PATH, {"messages": USER, "stream": stream})
    assert (answered, body["error"]["code"]) == (status, code)
    assert ("Retry-After" in headers) == (status in (429, 503))
    if status == 429:
        assert headers["Retry-After"] == "3"


async def test_too_large_max_tokens_is_lowered_and_said(served):
    status, _, headers = await served.post(PATH, {"messages": USER, "max_tokens": 100_000})
    room = served.mesh.starts[0].params.max_tokens
    assert status == 200 and room == 4096 - len(served.mesh.starts[0].prompt)
    assert headers["x-v4mesh-clamped"] == f"max_tokens={room}"


async def test_a_prompt_beyond_the_context_is_refused(served):
    status, body, _ = await served.post(PATH, {"messages": [{"role": "user", "content": "word " * 5000}]})
    assert status == 400
    assert (body["error"]["code"], body["error"]["param"]) == ("context_length_exceeded", "messages")
    assert not served.mesh.starts


async def test_empty_tools_and_choice_none_are_plain_requests(served):
    tool = {"type": "function", "function": {"name": "f"}}
    for extra in ({"tools": []}, {"tools": [tool], "tool_choice": "none"}, {"tools": None}):
        status, _, _ = await served.post(PATH, {"messages": USER, **extra})
        assert status == 200
    lengths = {len(start.prompt) for start in served.mesh.starts}
    assert len(lengths) == 1


async def test_input_ids_replace_the_encoding(served):
    await served.post(PATH, {"messages": USER, "input_ids": [5, 6, 7]})
    assert served.mesh.starts[0].prompt.tolist() == [5, 6, 7]


async def test_token_ids_on_request(served):
    body = {"messages": USER, "return_token_ids": True}
    _, whole, _ = await served.post(PATH, body)
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == 6 and ids[-1] == 1
    assert whole["prompt_token_ids"] == served.mesh.starts[0].prompt.tolist()
    parts = chunks(await served.events(PATH, {**body, "stream": True}))
    assert [token for part in parts for token in part["choices"][0]["token_ids"]] == ids


async def test_seed_is_drawn_when_absent_and_kept_when_given(served):
    for body in ({}, {}, {"seed": -1}):
        await served.post(PATH, {"messages": USER, **body})
    first, second, third = (start.seed for start in served.mesh.starts)
    assert first != second and third == 2**64 - 1


async def test_salt_and_model_separate_page_keys(served):
    long = [{"role": "user", "content": "word " * 600}]
    for extra in ({}, {}, {"cache_salt": "a"}, {"user": "b"}):
        await served.post(PATH, {"messages": long, **extra})
    keys = [start.page_keys for start in served.mesh.starts]
    assert len(keys[0]) == len(served.mesh.starts[0].prompt) // 256 > 0
    assert keys[0] == keys[1] and len({k[0] for k in keys}) == 3


async def test_the_namespace_travels_with_the_keys(served):
    for extra in ({}, {"cache_salt": "a"}):
        await served.post(PATH, {"messages": [{"role": "user", "content": "word " * 600}], **extra})
    for start in served.mesh.starts:
        assert page_keys(start.prompt, start.namespace) == list(start.page_keys)


async def test_explain_asks_with_the_keys_a_request_would_have(served):
    body = {"messages": [{"role": "user", "content": "word " * 600}], "cache_salt": "a"}
    await served.post(PATH, body)
    status, answer, _ = await served.post("/explain", body)
    ((keys, tokens),) = served.mesh.explained
    (start,) = served.mesh.starts
    assert (status, keys, tokens) == (200, start.page_keys, len(start.prompt))
    assert answer == {"tokens": tokens, "ranks": [{"group": "w", "rank": 0, "why": "hit"}]}


async def test_the_cache_is_flushed_when_nothing_runs(served):
    for method in (served.session.get, served.session.post):
        async with method(served.url + "/flush_cache") as response:
            assert response.status == 200 and "3 pages" in await response.text()
    served.mesh.say = lambda start, choice: served.mesh.text("one two three", hold_after=2)
    request = asyncio.create_task(served.events(PATH, {"messages": USER, "stream": True, "rid": "mine"}))
    await until(lambda: bool(served.mesh.open))
    status, error, _ = await served.post("/flush_cache", {})
    assert (status, error["error"]["code"]) == (400, "busy")
    for wrong in ("soon", "-1", "nan", "1e9"):
        status, error, _ = await served.get(f"/flush_cache?timeout={wrong}")
        assert (status, error["error"]["param"]) == (400, "timeout") and wrong in error["error"]["message"]
    flushes = served.mesh.flushes
    waiting = asyncio.create_task(served.session.get(served.url + "/flush_cache?timeout=20"))
    await until(lambda: served.mesh.flushes > flushes)
    served.mesh.released.set()
    await request
    assert (await waiting).status == 200


async def test_cached_tokens_reach_the_usage(served):
    served.mesh.cached = 3
    _, whole, _ = await served.post(PATH, {"messages": USER, "n": 2})
    usage = whole["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_cache_hit_tokens"] == 3
    assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"] - 3


async def test_abort_ends_the_stream_with_its_reason(served):
    served.mesh.say = lambda start, choice: served.mesh.text("one two three", hold_after=2)
    request = asyncio.create_task(served.events(PATH, {"messages": USER, "stream": True, "rid": "mine"}))
    await until(lambda: bool(served.mesh.open) and served.gateway.admission.waiting == 0)
    status, body, _ = await served.post(PATH, {"messages": USER, "rid": "mine"})
    assert (status, body["error"]["param"]) == (400, "rid") and "already in use" in body["error"]["message"]
    assert (await served.post("/abort_request", {}))[0] == 200
    assert (await served.post("/abort_request", {"rid": ""}))[0] == 200
    assert not served.mesh.aborted
    await served.post("/abort_request", {"rid": "mine"})
    parts = chunks(await request)
    assert parts[-1]["choices"][0]["finish_reason"] == "abort"
    served.mesh.released.set()
    assert (await served.post(PATH, {"messages": USER, "rid": "mine"}))[0] == 200
