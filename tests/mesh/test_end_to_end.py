"""The whole mesh as real processes with the shipped model: the official client, many streams, vanishing clients."""

import asyncio
import json
import re
import urllib.request

import aiohttp
import openai
import pytest

from meshkit.cli import main
from meshkit.testing import until

MODEL = "v4-nano"
STORY = [{"role": "user", "content": "Tell me a story about a fox and a lamp."}]


@pytest.fixture(scope="module")
def url(plain_mesh):
    return plain_mesh


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def _gauge(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found, name
    return float(found[1])


def _server_info(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/server_info", timeout=5) as answer:
        return json.load(answer)


def test_chat_answers_in_words_and_repeats_with_a_seed(client):
    first, second = (
        client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=60, seed=7) for _ in range(2)
    )
    assert re.search(r"[a-z]{3,} [a-z]+", first.choices[0].message.content)
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    assert first.choices[0].finish_reason in {"stop", "length"}


def test_streamed_chat_equals_the_whole_answer(client):
    whole = client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=50, seed=3)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=STORY, max_tokens=50, seed=3, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_n_choices_differ_and_repeat(client):
    answers = [
        [c.message.content for c in client.chat.completions.create(
            model=MODEL, messages=STORY, max_tokens=40, seed=7, n=2).choices]
        for _ in range(2)
    ]  # fmt: skip
    assert answers[0][0] != answers[0][1]
    assert answers[0] == answers[1]
    chunks = client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=40, seed=7, n=2, stream=True)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == answers[0]


def test_logprobs_cover_each_token(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=STORY, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(e.token for e in entries) == answer.choices[0].message.content
    assert all(len(e.top_logprobs) == 3 and e.logprob == e.top_logprobs[0].logprob <= 0 for e in entries)


def test_a_prompt_has_the_values_that_it_had_while_it_was_written(client):
    options = {"model": MODEL, "temperature": 0, "logprobs": 1}
    written = client.completions.create(
        prompt="Once upon a time", max_tokens=12, extra_body={"return_token_ids": True}, **options
    ).choices[0]
    ids = [*written.prompt_token_ids, *written.token_ids]
    read = client.completions.create(prompt=ids, max_tokens=0, echo=True, **options).choices[0]
    assert read.text == "Once upon a time" + written.text and read.logprobs.token_logprobs[0] is None
    values = read.logprobs.token_logprobs[-12:]
    assert max(abs(a - b) for a, b in zip(values, written.logprobs.token_logprobs, strict=True)) < 1e-4
    assert read.logprobs.top_logprobs[-12:] != [None] * 12


def test_what_may_not_be_said_is_not(client):
    options = {"model": MODEL, "prompt": "Once upon", "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**options).choices[0].text
    words = plain.split()[2:4]
    other = client.completions.create(extra_body={"bad_words": [" ".join(words)]}, **options).choices[0].text
    assert " ".join(words) in plain and " ".join(words) not in other
    (stopped,) = client.completions.create(extra_body={"stop_regex": r"[aeiou]{2}\w"}, **options).choices
    assert stopped.finish_reason == "stop" and plain.startswith(stopped.text) and len(stopped.text) < len(plain)
    ids = client.completions.create(extra_body={"return_token_ids": True}, **options).choices[0].token_ids[:3]
    narrow = {"allowed_token_ids": ids, "return_token_ids": True}
    assert set(client.completions.create(extra_body=narrow, **options).choices[0].token_ids) <= set(ids)


def test_stop_string_ends_before_itself(client):
    whole = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=40, temperature=0)
    word = re.findall(r"[a-z]{4,}", whole.choices[0].text)[3]
    cut = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=40, temperature=0, stop=[word])
    assert cut.choices[0].text == whole.choices[0].text[: whole.choices[0].text.index(word)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < whole.usage.completion_tokens


def test_completions_stream_and_not(client):
    arguments = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**arguments)
    parts = list(client.completions.create(**arguments, stream=True))
    assert "".join(p.choices[0].text for p in parts if p.choices) == whole.choices[0].text
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens == 20


async def _stream(session: aiohttp.ClientSession, url: str, index: int, leave_after: int | None) -> str | None:
    body = {"model": MODEL, "messages": STORY, "max_tokens": 90, "seed": index, "stream": True, "ignore_eos": True}
    text, events, finish = "", 0, None
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
            events += 1
            if leave_after is not None and events >= leave_after:
                answer.close()
                return None
    assert finish == "length"
    return text


async def test_vanishing_clients_free_their_requests_and_leave_the_others_alone(url):
    async with aiohttp.ClientSession() as session:
        alone = await _stream(session, url, 3, None)
        tasks = [_stream(session, url, i, 6 + i if i >= 8 else None) for i in range(16)]
        texts = await asyncio.gather(*tasks)
    assert all(text for text in texts[:8])
    assert texts[3] == alone, "batch companions change nothing in deterministic mode"
    for _ in range(100):
        if not _gauge(url, "vllm:num_requests_running"):
            break
        await asyncio.sleep(0.05)
    assert _gauge(url, "vllm:num_requests_running") == 0
    assert _gauge(url, "vllm:num_requests_waiting") == 0
    # Pages a finished request published stay cached; none may be owned by a request that is gone.
    assert _server_info(url)["scheduler"]["running"] == 0


def test_e10_choices_of_a_stream_are_told_apart(client):
    """https://github.com/sgl-project/sglang/issues/2912"""
    arguments = {"model": MODEL, "messages": STORY, "max_tokens": 20, "seed": 9, "n": 3}
    whole = [choice.message.content for choice in client.chat.completions.create(**arguments).choices]
    texts, roles, finishes = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for chunk in client.chat.completions.create(**arguments, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
        finishes[choice.index] += choice.finish_reason is not None
    assert texts == whole and roles == finishes == [1, 1, 1]


def test_e11_a_long_prompt_is_read_once_and_usage_says_so(client):
    """https://github.com/sgl-project/sglang/issues/4707"""
    story = [{"role": "user", "content": "A fox and a lamp, and eleven more. " * 90}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for _ in range(2):
        last = list(client.chat.completions.create(model=MODEL, messages=story, max_tokens=3, **options))[-1]
    usage = last.usage
    cached = usage.prompt_tokens_details.cached_tokens
    assert not last.choices and 0 < cached == usage.prompt_cache_hit_tokens
    assert usage.prompt_cache_hit_tokens + usage.prompt_cache_miss_tokens == usage.prompt_tokens


async def test_e15_a_client_that_leaves_a_long_answer_frees_its_place(url, client):
    """https://github.com/sgl-project/sglang/issues/37833"""
    body = {"model": MODEL, "messages": STORY, "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            chunks = 0
            async for line in answer.content:
                chunks += line.startswith(b"data: {")
                if chunks == 3:
                    break
            answer.close()
        await until(lambda: not _server_info(url)["scheduler"]["running"], 2)
    later = client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=4)
    assert later.choices[0].message.content


def test_e23_a_seed_repeats_all_choices_and_none_repeats_none(client):
    """https://github.com/vllm-project/vllm/issues/10852"""

    def asked(**options):
        answer = client.chat.completions.create(
            model=MODEL, messages=STORY, max_tokens=30, temperature=1, n=4, **options
        )
        return [choice.message.content for choice in answer.choices]

    assert asked() != asked()
    first = asked(seed=7)
    assert first == asked(seed=7) and len(set(first)) == 4


def test_an_operator_looks_at_the_mesh(url, client, capsys):
    """What the gateway answers is what the commands expect."""
    story = "A lamp and a fox, and eleven more. " * 90
    message = [{"role": "user", "content": story}]
    used = client.chat.completions.create(model=MODEL, messages=message, max_tokens=2).usage
    assert main.main(["explain", story, "--url", url]) == 0
    told = capsys.readouterr().out
    assert f"{used.prompt_tokens} tokens" in told and "hit - all full pages are there" in told
    assert main.main(["explain", "Hi", "--url", url]) == 0
    assert "no full page to share" in capsys.readouterr().out
    assert main.main(["top", "--once", "--interval", "0.2", "--url", url]) == 0
    assert re.search(r"slots +\[.*\] \d+ of \d+", capsys.readouterr().out)


def test_bad_input_is_refused_and_the_next_request_is_served(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=STORY, temperature=3)
    assert "temperature" in str(refused.value)
    assert client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=4).choices[0].message.content


def test_without_a_grammar_service_a_constraint_is_refused_and_says_what_to_do(client):
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(model=MODEL, messages=STORY, extra_body={"regex": "a"}, stream=True)
    assert refused.value.status_code == 501 and refused.value.param == "regex"
    assert "--grammar on" in refused.value.message
