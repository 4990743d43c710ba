"""Answers of both dialects, whole and streamed, equal those DeepSeek's own package builds from the same output.

Outputs are well formed here: what is not is read differently on purpose, and so are names with spaces. Left out of the
comparison: random ids, times, fields that one of the two alone repeats, reasoning in the token counts (the package is
told none).
"""

import json
import random

import deepseek_recipe as recipe
import pytest

from tests.unit.gateway.dialects import WEATHER, calls, named_events

OPTIONS = recipe.ConversionOptions().with_model_alias("v4-nano", recipe.ModelVersion.DeepseekV4Pro)
WORDS = ["Paris", " is", " warm", "\n", "😀", "é", " \n\n", "漢字", "<b>", '"q"', "\\", " and", "`code`"]
VALUES = [("true", 'Ro"me\n'), ("true", ""), ("true", "東京 </x>"), ("false", "7"), ("false", '{"k": [1, null]}')]
FIELDS = ("type", "id", "status", "arguments", "name", "text", "thinking", "input", "content", "summary", "role")


def invoke(rng: random.Random) -> str:
    names = rng.sample(["city", "days", "é", "two-words"], rng.randrange(4))
    params = "".join(
        f'<｜DSML｜parameter name="{name}" string="{kind}">{value}</｜DSML｜parameter>\n'
        for name, (kind, value) in zip(names, rng.choices(VALUES, k=len(names)))
    )
    return f'<｜DSML｜invoke name="get_weather">\n{params}</｜DSML｜invoke>\n'


def output(rng: random.Random, thinking: bool) -> tuple[str, bool]:
    """What a model may write, and whether its limit ends it."""
    text = "".join(rng.choices(WORDS, k=rng.randrange(1, 12))) + "."
    if thinking:
        text = "".join(rng.choices(WORDS, k=rng.randrange(1, 12))) + ".</think>" + text
    if rng.random() < 0.3:
        return text, True
    return text + (calls(*(invoke(rng) for _ in range(rng.randrange(1, 4)))) if rng.random() < 0.6 else ""), False


def theirs(request_kind, response_kind, body, text, cut):
    """Types of the events, each run of one type once, and the whole answer."""
    request = request_kind(body).convert(OPTIONS)
    stream = recipe.StreamProcessor(request_kind.chunk_generator(request, "id", "v4-nano"), request.parsing_options)
    usage = recipe.PromptUsage(prompt_tokens=100, prompt_cache_hit_tokens=3)
    events = stream.push(recipe.InferenceChunk.ready(prompt_usage=usage))
    for character in text:
        events += stream.push(recipe.InferenceChunk.text(character, 1))
    reasons = recipe.InferenceFinishReason
    events += stream.push(recipe.InferenceChunk.finish(reasons.Length if cut else reasons.Stop))
    answer = response_kind("id", "v4-nano", 1, 100, 3)
    kinds = [json.loads(event.to_json())["type"] for event in events]
    for event in events:
        answer.accumulate(event)
    return runs(kinds), json.loads(answer.to_json())


def runs(kinds):
    return [kind for kind, before in zip(kinds, [None, *kinds]) if kind != before]


def shown(parts):
    """Parts of an answer without random ids."""
    kept = []
    for part in parts:
        part = {name: value for name, value in part.items() if name in FIELDS}
        part["id"] = part["id"].split("_")[:-1][:1] if "id" in part else None
        if isinstance(part.get("content"), list):
            part["content"] = [{"type": inner["type"], "text": inner["text"]} for inner in part["content"]]
        kept.append(part)
    return kept


def says(served, text, cut, rng):
    tokens = served.mesh.tokenizer.encode(text)
    ids = tokens if cut else [*tokens, 1]
    made = served.mesh.text("")
    made.bursts.clear()
    while ids:
        size = rng.choice([1, 1, 2, 5])
        made.bursts.append(ids[:size])
        ids = ids[size:]
    made.finish = 2 if cut else made.finish
    served.mesh.say = lambda start, choice: made
    served.mesh.cached = 3


@pytest.mark.parametrize("seed", range(60))
async def test_messages(served, seed):
    rng = random.Random(seed)
    thinking = bool(seed % 3)
    text, cut = output(rng, thinking)
    says(served, text, cut, rng)
    body = {"model": "v4-nano", "max_tokens": 3_000, "messages": [{"role": "user", "content": "q"}]}
    body |= {"tools": [{"name": "get_weather", "input_schema": WEATHER}]}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 9} if thinking else {"type": "disabled"}}
    kinds, wanted = theirs(recipe.MessagesRequest, recipe.MessagesResponse, body, text, cut)
    _, answer, _ = await served.post("/v1/messages", body)
    assert shown(answer["content"]) == shown(wanted["content"])
    for name in ("type", "role", "model", "stop_reason", "stop_sequence"):
        assert answer[name] == wanted[name]
    assert set(wanted["usage"]) <= set(answer["usage"])
    assert answer["usage"]["cache_read_input_tokens"] == 3
    assert runs([event["type"] for event in await named_events(served, "/v1/messages", body)]) == kinds


@pytest.mark.parametrize("seed", range(60))
async def test_responses(served, seed):
    rng = random.Random(1_000 + seed)
    thinking = bool(seed % 3)
    text, cut = output(rng, thinking)
    says(served, text, cut, rng)
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER}
    body = {"model": "v4-nano", "input": "q", "tools": [tool], "reasoning": {"effort": "low" if thinking else "none"}}
    kinds, wanted = theirs(recipe.ResponsesRequest, recipe.ResponsesResponse, body, text, cut)
    _, answer, _ = await served.post("/v1/responses", body)
    assert shown(answer["output"]) == shown(wanted["output"])
    for name in ("object", "status", "incomplete_details", "error", "store", "background", "truncation"):
        assert answer[name] == wanted[name]
    assert answer["usage"].keys() == wanted["usage"].keys()
    assert runs([event["type"] for event in await named_events(served, "/v1/responses", body)]) == kinds
