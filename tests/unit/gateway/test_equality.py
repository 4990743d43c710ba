"""However ids arrive, the pieces of a stream add up to the whole answer, and no character is ever broken."""

import json
import random

import pytest

USER = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
ALPHABET = ["a", " b", "\n", "😀", "é", "漢字", "</think>", "<think>", "STOP", "ST", "OP", "\n\n", "�", "👩‍👩‍👧"]


def script(mesh, seed: int):
    random_ = random.Random(seed)
    text = "".join(random_.choice(ALPHABET) for _ in range(40))
    ids = [*mesh.tokenizer.encode(text), *random_.choices(range(2, 256), k=5)]
    if random_.random() < 0.7:
        ids.append(1)
    made = mesh.text("")
    made.bursts.clear()
    while ids:
        size = random_.choice([1, 1, 2, 5])
        made.bursts.append(ids[:size])
        ids = ids[size:]
    made.finish = made.finish if made.bursts[-1][-1] == 1 else 2
    return made


@pytest.mark.parametrize("seed", range(12))
async def test_stream_equals_whole(served, seed):
    served.mesh.say = lambda start, choice: script(served.mesh, 100 * seed + choice)
    thinking = {"type": "enabled" if seed % 2 else "disabled"}
    body = {
        "messages": USER,
        "n": 3,
        "thinking": thinking,
        "stop": ["STOP", "b\n"],
        "logprobs": True,
        "top_logprobs": 1,
    }
    _, whole, _ = await served.post(CHAT, body)
    events = await served.events(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    parts = [json.loads(event) for event in events[:-1]]
    assert parts[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [p["choices"][0] for p in parts if p["choices"] and p["choices"][0]["index"] == choice["index"]]
        for field in ("content", "reasoning_content"):
            text = "".join(part["delta"][field] or "" for part in mine)
            assert text == (choice["message"][field] or "")
        listed = [part["logprobs"] for part in mine if part["logprobs"]]
        for field in ("content", "reasoning_content"):
            assert [entry for item in listed for entry in item[field]] == choice["logprobs"][field]
        ends = [part for part in mine if part["finish_reason"]]
        assert [(end["finish_reason"], end["matched_stop"]) for end in ends] == [
            (choice["finish_reason"], choice["matched_stop"])
        ]


@pytest.mark.parametrize("seed", range(6))
async def test_plain_chunks_carry_the_same_text_as_detailed_ones(served, seed):
    served.mesh.say = lambda start, choice: script(served.mesh, seed)
    texts = []
    for extra in ({}, {"logprobs": 0}, {"return_token_ids": True}):
        events = await served.events("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 500, **extra})
        texts.append("".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]))
    assert texts[0] == texts[1] == texts[2]
