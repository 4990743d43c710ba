"""Cases from other servers' trackers, E1 to E24, each beside the report it comes from: those a scripted mesh can play.

`text/test_tracker_cases.py` has those that hang on ids of DeepSeek-V4's vocabulary, `tests/mesh/test_end_to_end.py` and
`test_constrained.py` beside it those that need a model.
"""

import asyncio
import json
from dataclasses import replace

import pytest

from gateway.errors import ApiError
from gateway.limits import Limits
from gateway.models import read_model_folder
from gateway.schema import SamplingFields
from gateway.validate import check_sampling
from meshkit.models import DEFAULT_MODEL
from meshkit.testing import until
from tests.unit.gateway.conftest import EOS, Script
from tests.unit.gateway.dialects import WEATHER, call, calls

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
OFF = {"reasoning_effort": "none"}
ON = {"thinking": {"type": "enabled"}}


def plays(served, *bursts):
    served.mesh.say = lambda start, choice: Script([list(burst) for burst in bursts])


def says(served, text, **options):
    served.mesh.say = lambda start, choice: served.mesh.text(text, **options)


async def both_ways(served, body):
    """The first choice of the whole answer, and the one the stream adds up to, with all its deltas."""
    status, answer, _ = await served.post(CHAT, body)
    assert status == 200, answer
    events = await served.events(CHAT, {**body, "stream": True})
    assert events[-1] == "[DONE]"
    folded = {"content": "", "reasoning_content": "", "calls": [], "finish": None, "matched": None, "deltas": []}
    for event in map(json.loads, events[:-1]):
        choice = event["choices"][0]
        folded["deltas"].append(choice["delta"])
        for part in ("content", "reasoning_content"):
            folded[part] += choice["delta"].get(part) or ""
        for piece in choice["delta"].get("tool_calls") or ():
            if "id" in piece:
                folded["calls"].append([piece["function"]["name"], ""])
            folded["calls"][piece["index"]][1] += piece["function"].get("arguments", "")
        folded["finish"] = choice["finish_reason"] or folded["finish"]
        folded["matched"] = choice.get("matched_stop") or folded["matched"]
    return answer["choices"][0], folded


def written(choice):
    """Name and arguments of each call of a whole answer."""
    return [[c["function"]["name"], c["function"]["arguments"]] for c in choice["message"].get("tool_calls", ())]


PARIS = [["get_weather", '{"city": "Paris"}']]


async def test_e1_the_start_of_a_block_token_by_token(served):
    """https://github.com/vllm-project/vllm/issues/40801"""
    says(served, "Let me check." + calls(call()))
    whole, streamed = await both_ways(served, {"messages": USER, "tools": [TOOL], **OFF})
    assert whole["message"]["content"] == streamed["content"] == "Let me check."
    texts = [delta.get("content") or "" for delta in streamed["deltas"]]
    assert not any("<" in text or "DSML" in text or "tool_calls>" in text for text in texts)
    assert written(whole) == streamed["calls"] == PARIS
    assert whole["finish_reason"] == streamed["finish"] == "tool_calls"


async def test_e2_a_block_that_lacks_its_opening(served):
    """https://github.com/vllm-project/vllm/issues/48931"""
    says(served, call() + "</｜DSML｜tool_calls>")
    whole, streamed = await both_ways(served, {"messages": USER, "tools": [TOOL], **OFF})
    assert written(whole) == streamed["calls"] == PARIS
    assert not whole["message"]["content"] and not streamed["content"]
    assert whole["finish_reason"] == streamed["finish"] == "tool_calls"


async def test_e3_tools_that_may_not_be_called_are_not_in_the_prompt(served):
    """https://github.com/sgl-project/sglang/issues/35736"""
    body = {"messages": USER, **OFF}
    _, plain, _ = await served.post(CHAT, body)
    _, none, _ = await served.post(CHAT, {**body, "tools": [TOOL], "tool_choice": "none"})
    assert plain["usage"]["prompt_tokens"] == none["usage"]["prompt_tokens"]
    assert none["choices"][0]["message"] == plain["choices"][0]["message"]


async def test_e4_stop_strings_do_not_count_in_thoughts(served):
    """https://github.com/vllm-project/vllm/issues/52393"""
    says(served, "Answer: 4 Question: next", think="It asks Question: 2+2")
    whole, streamed = await both_ways(served, {"messages": USER, "stop": ["Question:"], **ON})
    for found in (whole["message"], streamed):
        assert (found["reasoning_content"], found["content"]) == ("It asks Question: 2+2", "Answer: 4 ")
    assert (whole["finish_reason"], whole["matched_stop"]) == ("stop", "Question:")
    assert (streamed["finish"], streamed["matched"]) == ("stop", "Question:")


@pytest.mark.parametrize(("said", "text"), [("x Observation: y", "x "), ("x Obs", "x Obs")])
async def test_e6_what_may_become_a_stop_string_is_held_and_let_go(served, said, text):
    """https://github.com/vllm-project/vllm/issues/2577"""
    says(served, said)
    whole, streamed = await both_ways(served, {"messages": USER, "stop": ["Observation:"], **OFF})
    assert whole["message"]["content"] == streamed["content"] == text


@pytest.mark.parametrize("prompt", [[""], "", []])
async def test_e7_an_empty_prompt_is_refused_and_the_next_request_served(served, prompt):
    """https://github.com/vllm-project/vllm/issues/7632"""
    status, answer, _ = await served.post("/v1/completions", {"prompt": prompt})
    assert status == 400 and answer["error"]["param"] == "prompt" and not served.mesh.starts
    status, _, _ = await served.post("/v1/completions", {"prompt": "Once"})
    assert status == 200


async def test_e8_each_token_of_a_burst_has_its_own_alternatives(served):
    """https://github.com/sgl-project/sglang/issues/39260"""
    ids = served.mesh.tokenizer.encode("one two three four five six")
    plays(served, ids[:1], ids[1:4], ids[4:], [EOS])
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2, **OFF}
    _, answer, _ = await served.post(CHAT, body)
    whole = answer["choices"][0]["logprobs"]["content"]
    events = [json.loads(event) for event in (await served.events(CHAT, {**body, "stream": True}))[:-1]]
    chunks = [c["logprobs"]["content"] for e in events if (c := e["choices"][0])["logprobs"]]
    assert [entry for chunk in chunks for entry in chunk] == whole and len(whole) == len(ids)
    assert 3 in [len(chunk) for chunk in chunks]
    alternatives = [tuple(item["token"] for item in entry["top_logprobs"]) for entry in whole]
    assert len(set(alternatives)) == len(set(ids)) > 3 and all(len(found) == 2 for found in alternatives)


async def test_e10_choices_of_a_stream_are_told_apart(served):
    """https://github.com/sgl-project/sglang/issues/2912"""
    body = {"messages": USER, "n": 3, "seed": 5, **OFF}
    _, answer, _ = await served.post(CHAT, body)
    texts, roles, finishes = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for event in (await served.events(CHAT, {**body, "stream": True}))[:-1]:
        (choice,) = json.loads(event)["choices"]
        index, delta = choice["index"], choice["delta"]
        texts[index] += delta.get("content") or ""
        roles[index] += "role" in delta
        finishes[index] += choice["finish_reason"] is not None
    assert texts == [choice["message"]["content"] for choice in answer["choices"]]
    assert roles == finishes == [1, 1, 1]


async def test_e12_cached_tokens_are_those_of_the_place_that_read_the_prompt(served):
    """https://github.com/vllm-project/vllm-ascend/issues/8910

    A later place of the same request finds the whole prompt: that says nothing of what the prompt has cost.
    """
    script = served.mesh.text("one two three", hold_after=1)
    served.mesh.say = lambda start, choice: script
    served.mesh.cached = 128
    body = {"prompt": [5] * 300, "max_tokens": 20}
    asked = asyncio.create_task(served.post("/v1/completions", body))
    await until(lambda: bool(served.mesh.starts) and not served.gateway.admission.waiting)
    served.mesh.cached = 256
    served.mesh.released.set()
    usage = (await asked)[1]["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 128}
    assert (usage["prompt_cache_hit_tokens"], usage["prompt_cache_miss_tokens"]) == (128, 172)


async def test_e13_input_tokens_leave_out_what_was_cached(served):
    """https://github.com/vllm-project/vllm/pull/40912"""
    served.mesh.cached = 64
    messages = [{"role": "user", "content": "word " * 90}]
    _, counted, _ = await served.post("/v1/messages/count_tokens", {"messages": messages})
    _, answer, _ = await served.post("/v1/messages", {"messages": messages, "max_tokens": 20})
    usage = answer["usage"]
    assert usage["input_tokens"] == counted["input_tokens"] - 64 > 0
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (64, 0)


@pytest.mark.parametrize("key", ["129280", "-1", "abc"])
def test_e16_a_bias_is_for_ids_of_the_vocabulary(key):
    """https://github.com/sgl-project/sglang/issues/7670"""
    model = replace(read_model_folder(DEFAULT_MODEL), vocab_size=129_280)
    with pytest.raises(ApiError, match="logit_bias") as caught:
        check_sampling(SamplingFields(logit_bias={key: 5}), model, Limits())
    assert (caught.value.status, caught.value.param) == (400, "logit_bias")
    taken = check_sampling(SamplingFields(logit_bias={"129279": -100}), model, Limits())
    assert taken.params.bias == ((129_279, -100.0),)


@pytest.mark.parametrize("path", [CHAT, "/generate"])
async def test_e19_an_abort_handle_is_one_requests_until_it_ends(served, path):
    """https://github.com/sgl-project/sglang/pull/19035"""
    body = ({"messages": USER} if path == CHAT else {"text": "Once"}) | {"rid": "mine"}
    served.mesh.say = lambda start, choice: served.mesh.text("Hello.", hold_after=1)
    first = asyncio.create_task(served.post(path, body))
    await until(lambda: bool(served.mesh.starts))
    status, answer, _ = await served.post(path, body)
    assert status == 400 and answer["error"]["param"] == "rid" and "already in use" in answer["error"]["message"]
    served.mesh.released.set()
    status, answer, _ = await first
    assert status == 200 and "Hello." in json.dumps(answer) and len(served.mesh.starts) == 1
    assert (await served.post(path, body))[0] == 200


@pytest.mark.parametrize("profile", ["open", "deepseek"])
async def test_e21_special_ids_in_an_answer_are_no_text(mesh, serve_with, profile):
    """https://github.com/vllm-project/vllm-ascend/issues/9767"""
    async with serve_with(api_profile=profile) as served:
        (ok,), (mark,) = (served.mesh.tokenizer.encode(text) for text in ("a", "!"))
        plays(served, [ok], [0], [mark], [EOS])
        whole, streamed = await both_ways(served, {"messages": USER, "thinking": {"type": "disabled"}})
        assert whole["message"]["content"] == streamed["content"] == "a!"


@pytest.mark.parametrize("return_logprob", [True, False])
@pytest.mark.parametrize("token", [-1, 200_000])
async def test_e24_logprobs_of_ids_that_do_not_exist(served, token, return_logprob):
    """https://github.com/sgl-project/sglang/pull/28088"""
    body = {"text": "Once", "token_ids_logprob": [token], "return_logprob": return_logprob}
    status, answer, _ = await served.post("/generate", body)
    assert status == 400 and answer["error"]["param"] == "token_ids_logprob"
    assert (await served.post("/generate", {"text": "Once"}))[0] == 200
