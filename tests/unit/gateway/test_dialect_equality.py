"""Messages and Responses: outputs cut at random token boundaries stream to exactly what is answered whole."""

import json
import random

import pytest

from tests.unit.gateway.dialects import WEATHER, call, calls, folded_message, folded_response, named_events

TOOL = {"name": "get_weather", "input_schema": WEATHER}
PIECES = ["a", " b", "\n", "😀", "é", "漢字", "</think>", "STOP", "ST", "\n\n", "<｜DSML｜", "�", '"q"', "👩‍👩‍👧"]


def script(mesh, seed: int):
    """Prose, thoughts and calls, sometimes broken off, in bursts of random size."""
    rng = random.Random(seed)
    text = "".join(rng.choices(PIECES, k=rng.randrange(20)))
    if rng.random() < 0.7:
        text += "</think>" + "".join(rng.choices(PIECES[:9], k=rng.randrange(8)))
    if rng.random() < 0.6:
        text += calls(*(call(rng.choice(["Paris", 'Ro"me\n', "", "東京"]), rng.choice([None, 3])) for _ in range(2)))
    ids = mesh.tokenizer.encode(text)
    cut = rng.random() < 0.4
    ids = ids[: rng.randrange(len(ids) + 1)] if cut else [*ids, 1]
    made = mesh.text("")
    made.bursts.clear()
    while ids:
        size = rng.choice([1, 1, 2, 7])
        made.bursts.append(ids[:size])
        ids = ids[size:]
    made.finish = 2 if cut else made.finish
    return made


def without_names(value):
    """The answer without its random ids."""
    text = json.dumps(value)
    for found in {*json.loads(text).get("id", "").split("_")[-1:]} - {""}:
        text = text.replace(found, "ID")
    whole = json.loads(text)
    for block in whole.get("content", whole.get("output", [])):
        for name in ("id", "call_id"):
            if str(block.get(name, "")).startswith("call_"):
                block[name] = block[name][:7]
    return whole


@pytest.mark.parametrize("seed", range(40))
async def test_messages(served, seed):
    served.mesh.say = lambda start, choice: script(served.mesh, seed)
    thinking = {"type": "enabled", "budget_tokens": 1} if seed % 3 else {"type": "disabled"}
    body = {"max_tokens": 3_000, "messages": [{"role": "user", "content": "Hi"}], "thinking": thinking}
    body |= {"tools": [TOOL] if seed % 4 else [], "stop_sequences": ["STOP"]}
    _, whole, _ = await served.post("/v1/messages", body)
    events = await named_events(served, "/v1/messages", body)
    assert all(event.get("delta", {}).get("text") != "" for event in events)
    folded = folded_message(events)
    for block in folded["content"]:
        arguments = block.pop("json")
        if block["type"] != "tool_use":
            assert arguments == ""
            continue
        try:
            block["input"] = json.loads(arguments or "{}")
        except ValueError:
            block["input"] = {"arguments": arguments}
    assert without_names(folded) == without_names(whole)


@pytest.mark.parametrize("seed", range(40))
async def test_responses(served, seed):
    served.mesh.say = lambda start, choice: script(served.mesh, 1_000 + seed)
    body = {"input": "Hi", "reasoning": {"effort": "low" if seed % 3 else "none"}, "stop": ["STOP"]}
    body |= {"tools": [{**TOOL, "type": "function", "parameters": WEATHER}] if seed % 4 else []}
    body |= {"top_logprobs": 1} if seed % 2 else {}
    _, whole, _ = await served.post("/v1/responses", body)
    events = await named_events(served, "/v1/responses", body)
    final = events[-1]["response"]
    assert folded_response(events) == final["output"]
    for answer in (whole, final):
        for name in ("created_at", "completed_at"):
            answer.pop(name)
    assert without_names(final) == without_names(whole)
    assert events[-1]["type"] == f"response.{whole['status']}"
