"""Text completions: shapes of prompts, echo, log-probabilities, streams."""

import json

import pytest

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


async def test_stop_expressions_in_every_dialect(served, mesh):
    mesh.say = lambda start, choice: mesh.text("The year 1984 was one. END")
    expression, messages = "[0-9]{4}", [{"role": "user", "content": "a"}]
    for streamed in (False, True):
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": messages})):
            asked = {**body, "stop_regex": [expression, "x+y"], "stop": "END", "max_tokens": 99, "stream": streamed}
            if streamed:
                parts = [json.loads(event)["choices"][0] for event in (await served.events(path, asked))[:-1]]
                text = "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)
                last = parts[-1]
            else:
                (last,) = (await served.post(path, asked))[1]["choices"]
                text = last["text"] if "text" in last else last["message"]["content"]
            assert (text, last["finish_reason"]) == ("The year ", "stop")
            assert last["matched_stop"] == last["stop_reason"] == expression
    kept = {"prompt": "a", "stop_regex": expression, "include_stop_str_in_output": True, "max_tokens": 99}
    assert (await served.post("/v1/completions", kept))[1]["choices"][0]["text"] == "The year 1984"
    native = {"text": "a", "sampling_params": {"stop_regex": expression}}
    answer = (await served.post("/generate", native))[1]
    assert answer["text"] == "The year " and answer["meta_info"]["finish_reason"]["matched"] == expression


@pytest.mark.parametrize("value", ["[.*", ["a"] * 33, "x" * 257, "", "a*", "(a{30}){30}", ["a{200}"] * 3])
async def test_stop_expressions_that_cannot_be_are_refused(served, value):
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "stop_regex": value}, "stop_regex"),
        ("/generate", {"text": "a", "sampling_params": {"stop_regex": value}}, "sampling_params.stop_regex"),
    ):
        status, answer, _ = await served.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert not served.mesh.starts


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
