"""Log-probabilities of prompts and of chosen ids, restricted vocabularies, cut prompts: every dialect that has them."""

import json

import pytest

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
USER = [{"role": "user", "content": "Hi"}]
PROMPT = "A child called Karl"


@pytest.fixture(autouse=True)
def says(mesh):
    mesh.say = lambda start, choice: mesh.text("So be it.")


async def test_an_echo_tells_the_values_of_the_prompt_too(served, mesh, tokenizer):
    ids = tokenizer.encode(PROMPT)
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 3}
    status, answer, _ = await served.post(COMPLETIONS, body)
    (choice,), (start,) = answer["choices"], mesh.starts
    told = choice["logprobs"]
    assert status == 200 and choice["text"].startswith(PROMPT) and choice["finish_reason"] == "length"
    assert "".join(told["tokens"]) == choice["text"] and len(told["tokens"]) == len(ids) + 3
    assert told["token_logprobs"] == [None, *[-0.25] * (len(ids) + 2)]
    assert told["top_logprobs"][0] is None and all(len(top) == 3 for top in told["top_logprobs"][1:])
    assert [choice["text"][a:b] for a, b in zip(told["text_offset"], told["text_offset"][1:])] == told["tokens"][:-1]
    assert (start.prompt.tolist(), list(start.params.given_ids)) == (ids[:1], ids[1:])
    assert start.params.max_tokens == len(ids) - 1 + 3
    assert answer["usage"]["prompt_tokens"] == len(ids) and answer["usage"]["completion_tokens"] == 3


async def test_a_streamed_echo_waits_for_its_values(served):
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 3}
    whole = (await served.post(COMPLETIONS, body))[1]["choices"][0]
    parts = [
        json.loads(event)["choices"][0] for event in (await served.events(COMPLETIONS, {**body, "stream": True}))[:-1]
    ]
    assert parts[0]["text"] == PROMPT and "".join(part["text"] for part in parts) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts if part["logprobs"] for value in part["logprobs"][name]] == values


async def test_a_prompt_alone_is_scored_without_output(served):
    body = {"prompt": [[5, 6], [7, 8, 9]], "echo": True, "logprobs": 0, "max_tokens": 0}
    _, answer, _ = await served.post(COMPLETIONS, body)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert answer["choices"][1]["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    assert answer["usage"]["completion_tokens"] == 0


async def test_vllms_form(served, mesh):
    asked = {"prompt": [7, 8], "max_tokens": 2, "prompt_logprobs": 1}
    (choice,) = (await served.post(COMPLETIONS, asked))[1]["choices"]
    assert choice["logprobs"] is None and choice["text"]
    assert choice["prompt_logprobs"][0] is None
    rows = choice["prompt_logprobs"][1]
    assert rows["8"]["logprob"] == -0.25 and rows["8"]["rank"] is None and rows["9"]["rank"] == 1
    _, answer, _ = await served.post(CHAT, {"messages": USER, "max_tokens": 2, "logprobs": True, "prompt_logprobs": 2})
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(row) == 3 for row in answer["prompt_logprobs"][1:])
    assert [token["top_logprobs"] for token in answer["choices"][0]["logprobs"]["content"]] == [[], []]
    assert mesh.starts[-1].params.top_logprobs == 2


async def test_the_native_form_from_a_position_on(served, mesh, tokenizer):
    ids = tokenizer.encode(PROMPT)
    body = {"text": PROMPT, "return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 1}
    body |= {"token_ids_logprob": [5, 6], "sampling_params": {"max_new_tokens": 2}}
    meta = (await served.post(GENERATE, body))[1]["meta_info"]
    assert mesh.starts[0].prompt.tolist() == ids[:2] and mesh.starts[0].params.logprob_ids == (5, 6)
    assert meta["input_token_logprobs"] == [[-0.25, token, None] for token in ids[2:]]
    assert [row[0][1] for row in meta["input_top_logprobs"]] == [token + 1 for token in ids[2:]]
    assert meta["output_token_ids_logprobs"] == [[[-5.0, 5, None], [-6.0, 6, None]]] * 2
    assert len(meta["input_token_ids_logprobs"]) == len(ids) - 2 and len(meta["output_top_logprobs"][0]) == 1
    whole = (await served.post(GENERATE, {**body, "logprob_start_len": 0}))[1]["meta_info"]
    assert whole["input_token_logprobs"][0] == [None, ids[0], None] and whole["input_top_logprobs"][0] is None
    none = (await served.post(GENERATE, {**body, "logprob_start_len": 99}))[1]["meta_info"]
    assert none["input_token_logprobs"] == [] and none["prompt_tokens"] == len(ids)


async def test_a_stop_string_counts_the_given_ids_for_the_mesh(served, mesh, tokenizer):
    body = {"prompt": [7, 8, 9], "echo": True, "logprobs": 0, "max_tokens": 9, "stop": ["be"]}
    (choice,) = (await served.post(COMPLETIONS, body))[1]["choices"]
    assert choice["finish_reason"] == "stop" and choice["text"].endswith("So ")
    ((_, _, keep),) = mesh.stopped
    assert keep == 2 + len(tokenizer.encode("So be"))


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt_logprobs": 21}, 400, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, 400, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "n": 2}, 400, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "regex": "a"}, 400, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "presence_penalty": 1}, 400, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "prompt": [5, 1, 6]}, 501, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "prompt": [5, 8, 6], "stop_token_ids": [8]}, 501, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "suffix": "x"}, 400, "echo"),
        ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
        ({"allowed_token_ids": [4096]}, 400, "allowed_token_ids"),
        ({"bad_words": [""]}, 400, "bad_words"),
        ({"bad_words": ["  "]}, 400, "bad_words"),
        ({"bad_words": ["x"] * 65}, 400, "bad_words"),
        ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 4096}, 400, "truncate_prompt_tokens"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(served, mesh, body, status, param):
    found, answer, _ = await served.post(COMPLETIONS, {"prompt": "Hi there", **body})
    assert (found, answer["error"]["param"]) == (status, param), answer
    assert not mesh.starts


async def test_restricted_vocabularies_reach_the_mesh(served, mesh, tokenizer):
    for path, body in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "a"})):
        asked = {**body, "allowed_token_ids": [9, 5, 9], "bad_words": ["brave mouse", " the"]}
        status, answer, _ = await served.post(path, asked)
        assert status == 200, answer
        params = mesh.starts[-1].params
        assert params.allowed_ids == (5, 9)
        assert set(params.bad_words) == {
            tuple(tokenizer.encode(text)) for text in ("brave mouse", " brave mouse", " the")
        }


async def test_prompts_are_cut_from_the_left(served, mesh):
    ids = list(range(10, 30))
    for keep, kept in ((5, ids[-5:]), (-1, ids), (4_000, ids)):
        await served.post(COMPLETIONS, {"prompt": ids, "truncate_prompt_tokens": keep})
        assert mesh.starts[-1].prompt.tolist() == kept
    long = [7] * 9_000
    status, answer, _ = await served.post(COMPLETIONS, {"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 96})
    assert status == 200 and len(mesh.starts[-1].prompt) == 4_000
    words = {"prompt": "many words " * 9_000, "truncate_prompt_tokens": 3, "echo": True}
    _, answer, _ = await served.post(COMPLETIONS, words)
    assert answer["usage"]["prompt_tokens"] == 3 and len(answer["choices"][0]["text"]) < 60
    chat = {"messages": [{"role": "user", "content": "many words " * 4_000}], "truncate_prompt_tokens": 50}
    status, answer, _ = await served.post(CHAT, chat)
    assert status == 200 and answer["usage"]["prompt_tokens"] == 50
