"""The native /generate dialect."""

import json
from itertools import pairwise

import pytest

PATH = "/generate"


@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_one_text(served, method):
    params = {"max_new_tokens": 20, "temperature": 0}
    async with served.session.request(
        method, served.url + PATH, json={"text": "Hi", "sampling_params": params}
    ) as response:
        body = await response.json()
    meta = body["meta_info"]
    assert body["text"] == "Hello 0 world." and body["output_ids"][-1] == 1
    assert meta["finish_reason"] == {"type": "stop", "matched": 1}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (1, 6, 0)
    assert meta["e2e_latency"] > 0 and meta["id"]


async def test_defaults_and_length(served):
    served.mesh.say = lambda start, choice: served.mesh.text("word " * 300)
    _, body, _ = await served.post(PATH, {"text": "Hi"})
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 128}


async def test_lists_give_lists(served, tokenizer):
    served.mesh.say = lambda start, choice: served.mesh.text(f"p{start.prompt[0]} t{start.params.temperature}")
    body = {"input_ids": [[10], [20]], "sampling_params": [{"temperature": 0}, {"temperature": 1}], "rid": ["a", "b"]}
    _, items, _ = await served.post(PATH, body)
    assert [item["text"] for item in items] == ["p10 t0.0", "p20 t1.0"]
    assert [item["meta_info"]["id"] for item in items] == ["a", "b"]
    _, items, _ = await served.post(PATH, {"text": ["Hi"]})
    assert isinstance(items, list) and len(items) == 1


async def test_n_is_flattened(served):
    _, items, _ = await served.post(PATH, {"text": ["Hi", "Yo"], "sampling_params": {"n": 2}})
    assert [item["text"] for item in items] == ["Hello 0 world.", "Hello 1 world."] * 2


async def test_stream_is_cumulative(served):
    events = await served.events(PATH, {"text": "Hi", "stream": True})
    assert events[-1] == "[DONE]"
    parts = [json.loads(event) for event in events[:-1]]
    for earlier, later in pairwise(parts):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
    assert parts[-1]["text"] == "Hello 0 world." and parts[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    assert all(part["meta_info"]["finish_reason"] is None for part in parts[:-1])


async def test_stream_of_deltas_by_option(mesh, serve_with):
    async with serve_with(incremental_streaming_output=True) as served:
        parts = [json.loads(event) for event in (await served.events(PATH, {"text": "Hi", "stream": True}))[:-1]]
    assert "".join(part["text"] for part in parts) == "Hello 0 world."
    assert len([token for part in parts for token in part["output_ids"]]) == 6


async def test_stream_of_several_names_the_index(served):
    body = {"text": ["Hi", "Yo"], "stream": True}
    parts = [json.loads(event) for event in (await served.events(PATH, body))[:-1]]
    last = {part["index"]: part["text"] for part in parts}
    assert last == {0: "Hello 0 world.", 1: "Hello 0 world."}


@pytest.mark.parametrize("texts", [False, True])
async def test_logprobs_have_one_entry_per_output_id(served, tokenizer, texts):
    body = {"text": "Hi", "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": texts}
    _, answer, _ = await served.post(PATH, body)
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])
    assert meta["output_token_logprobs"][0] == [-0.25, answer["output_ids"][0], "Hello" if texts else None]


async def test_no_tokens_asked_for(served):
    _, body, _ = await served.post(PATH, {"text": "Hi", "sampling_params": {"max_new_tokens": 0}})
    assert body["text"] == "" and body["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert not served.mesh.starts


async def test_stop_and_no_stop_trim(served):
    params = {"stop": ["wor"], "max_new_tokens": 50}
    _, body, _ = await served.post(PATH, {"text": "Hi", "sampling_params": params})
    assert body["text"] == "Hello 0 " and body["meta_info"]["finish_reason"] == {"type": "stop", "matched": "wor"}
    _, body, _ = await served.post(PATH, {"text": "Hi", "sampling_params": {**params, "no_stop_trim": True}})
    assert body["text"] == "Hello 0 wor"
