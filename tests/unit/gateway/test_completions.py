"""Text completions: shapes of prompts, echo, log-probabilities, streams."""

import json

PATH = "/v1/completions"


async def test_default_of_16_tokens_and_raw_text(served):
    served.mesh.say = lambda start, choice: served.mesh.text("word " * 50)
    status, body, _ = await served.post(PATH, {"prompt": "Hi"})
    assert status == 200 and body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"][0]["finish_reason"] == "length"
    assert served.mesh.starts[0].params.max_tokens == 16 == body["usage"]["completion_tokens"]


async def test_markers_in_a_raw_prompt_are_tokens(served, tokenizer):
    await served.post(PATH, {"prompt": "<｜User｜>Hi"})
    assert served.mesh.starts[0].prompt[0] == tokenizer.id_of("<｜User｜>")


async def test_every_shape_of_prompt(served, tokenizer):
    hi, yo = tokenizer.encode("Hi"), tokenizer.encode("Yo")
    for prompt, expected in (("Hi", [hi]), (["Hi", "Yo"], [hi, yo]), (hi, [hi]), ([hi, yo], [hi, yo])):
        served.mesh.starts.clear()
        status, body, _ = await served.post(PATH, {"prompt": prompt})
        assert status == 200
        assert [start.prompt.tolist() for start in served.mesh.starts] == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))


async def test_batched_prompts_with_n_are_numbered_prompt_by_prompt(served):
    served.mesh.say = lambda start, choice: served.mesh.text(f"p{start.prompt[0]} c{choice}")
    body = {"prompt": [[10], [20]], "n": 2, "best_of": 2}
    _, whole, _ = await served.post(PATH, body)
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == ["p10 c0", "p10 c1", "p20 c0", "p20 c1"]
    assert whole["usage"]["prompt_tokens"] == 2
    streamed = [""] * 4
    for event in (await served.events(PATH, {**body, "stream": True}))[:-1]:
        choice = json.loads(event)["choices"][0]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts


async def test_logprobs_are_four_parallel_lists(served):
    served.mesh.say = lambda start, choice: served.mesh.text("añ b")
    _, body, _ = await served.post(PATH, {"prompt": "Hi", "logprobs": 2})
    listed = body["choices"][0]["logprobs"]
    assert "".join(listed["tokens"]).replace("\\xc3\\xb1", "ñ") == "añ b"
    assert len({len(listed[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
    assert listed["text_offset"][0] == 0 and listed["text_offset"] == sorted(listed["text_offset"])
    assert all(len(top) == 3 for top in listed["top_logprobs"])
    events = await served.events(PATH, {"prompt": "Hi", "logprobs": 2, "stream": True})
    parts = [json.loads(event)["choices"][0]["logprobs"] for event in events[:-1]]
    joined = {key: [value for part in parts if part for value in part[key]] for key in listed}
    assert joined == listed


async def test_echo_repeats_the_prompt(served, tokenizer):
    for prompt in ("Hi there", tokenizer.encode("Hi there")):
        _, body, _ = await served.post(PATH, {"prompt": prompt, "echo": True})
        assert body["choices"][0]["text"] == "Hi thereHello 0 world."
    events = await served.events(PATH, {"prompt": "Hi there", "echo": True, "stream": True})
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == "Hi thereHello 0 world."


async def test_echo_alone_asks_the_mesh_for_nothing(served):
    served.mesh.starts.clear()
    for stream in (False, True):
        body = {"prompt": "Hi", "echo": True, "max_tokens": 0, "stream": stream}
        if stream:
            parts = [json.loads(e)["choices"][0] for e in (await served.events(PATH, body))[:-1]]
            assert "".join(p["text"] for p in parts) == "Hi" and parts[-1]["finish_reason"] == "length"
        else:
            _, whole, _ = await served.post(PATH, body)
            assert whole["choices"][0]["text"] == "Hi" and whole["choices"][0]["finish_reason"] == "length"
            assert whole["usage"]["completion_tokens"] == 0
    assert not served.mesh.starts


async def test_stop_strings_count_everywhere_in_raw_text(served, tokenizer):
    served.mesh.say = lambda start, choice: served.mesh.text("b", think="a STOP")
    _, body, _ = await served.post(PATH, {"prompt": "Hi", "stop": "STOP"})
    assert body["choices"][0]["text"] == "a " and body["choices"][0]["matched_stop"] == "STOP"


async def test_special_ids_are_skipped_unless_asked_for(served):
    script = served.mesh.text("!")
    script.bursts.insert(0, [0])
    served.mesh.say = lambda start, choice: script
    _, body, _ = await served.post(PATH, {"prompt": "Hi"})
    assert body["choices"][0]["text"] == "!"
    _, body, _ = await served.post(PATH, {"prompt": "Hi", "skip_special_tokens": False})
    assert body["choices"][0]["text"] == "<｜begin▁of▁sentence｜>!"


async def test_suffix_fills_a_gap_or_says_what_is_missing(served, tokenizer):
    status, body, _ = await served.post(PATH, {"prompt": "def f(", "suffix": "return x"})
    if tokenizer.id_of("<｜fim▁hole｜>") is None:
        assert status == 501 and body["error"]["param"] == "suffix" and "fim" in body["error"]["message"]
    else:
        assert status == 200 and tokenizer.id_of("<｜fim▁hole｜>") in served.mesh.starts[0].prompt
    status, body, _ = await served.post(PATH, {"prompt": ["a", "b"], "suffix": "c"})
    assert status == 400 and body["error"]["param"] == "suffix"


async def test_usage_of_a_stream(served):
    body = {"prompt": "Hi", "stream": True, "stream_options": {"include_usage": True}}
    parts = [json.loads(event) for event in (await served.events(PATH, body))[:-1]]
    assert parts[-1]["choices"] == [] and parts[-1]["usage"]["completion_tokens"] == 6


async def test_too_many_choices_in_one_request(served):
    status, body, _ = await served.post(PATH, {"prompt": [[5]] * 33, "n": 2})
    assert status == 400 and body["error"]["param"] == "n"
    assert served.gateway.admission.streams == 0
