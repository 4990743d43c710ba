"""Every field out of range answers 400 that names it, before any work; missing parts answer 501."""

import pytest

USER = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

SAMPLING = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.5),
    ("presence_penalty", -2.5),
    ("frequency_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", 2.1),
    ("n", 0),
    ("n", 9),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["x"] * 33),
    ("stop", "x" * 257),
    ("stop", [1]),
    ("stop", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [4096]),
    ("stop_token_ids", [1] * 65),
    ("stop_token_ids", ["a"]),
    ("ignore_eos", "yes"),
    ("min_tokens", -1),
    ("skip_special_tokens", 1),
    ("logit_bias", {"4096": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"abc": 5}),
    ("logit_bias", {"²": 5}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", {str(i): 0 for i in range(1025)}),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 2**70),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("user", "x" * 513),
    ("user", "é" * 257),
    ("cache_salt", "x" * 513),
    ("rid", "é"),
    ("cache_salt", 5),
    ("priority", 2**31),
    ("rid", "x" * 513),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": 5}),
    ("response_format", {"type": "json_schema", "json_schema": [1]}),
    ("response_format", {"type": "json_schema", "json_schema": "s"}),
    ("response_format", {"type": ["text"]}),
]
CHAT_ONLY = [
    ("messages", []),
    ("messages", None),
    ("messages", "Hi"),
    ("messages", [{"role": "user", "content": "x"}] * 4097),
    ("max_completion_tokens", 0),
    ("logprobs", 1),
    ("top_logprobs", 3),
    ("reasoning_effort", "bogus"),
    ("reasoning_effort", True),
    ("thinking", {"type": "sometimes"}),
    ("chat_template", "{{ x }}"),
    ("chat_template_kwargs", {"thinking": "yes"}),
    ("chat_template_kwargs", {"drop_thinking": 1}),
    ("continue_final_message", True),
    ("tool_choice", "maybe"),
    ("tool_choice", "required"),
    ("input_ids", [4096]),
    ("input_ids", []),
    ("parallel_tool_calls", "x"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tools", [5]),
    ("tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("tools", [TOOL, TOOL]),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": 5}}]),
    ("tools", [TOOL] * 129),
    ("modalities", ["audio"]),
]
COMPLETIONS_ONLY = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [""]),
    ("prompt", [[]]),
    ("prompt", None),
    ("prompt", [1, "a"]),
    ("prompt", [4096]),
    ("prompt", [[1], [-1]]),
    ("prompt", {"a": 1}),
    ("best_of", 2),
    ("logprobs", 21),
    ("logprobs", -1),
]


def base(path):
    return {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "Hi"}, GENERATE: {"text": "Hi"}}[path]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [(path, *row) for path in (CHAT, COMPLETIONS) for row in SAMPLING]
    + [(CHAT, *row) for row in CHAT_ONLY]
    + [(COMPLETIONS, *row) for row in COMPLETIONS_ONLY],
)
async def test_out_of_range_is_400_naming_the_field(served, path, field, value):
    status, body, _ = await served.post(path, {**base(path), field: value})
    error = body["error"]
    assert status == 400, body
    assert error["type"] == "invalid_request_error"
    assert error["param"].split("[")[0].split(".")[0] == field and field in error["message"]
    assert not served.mesh.starts


async def test_messages_name_value_and_range(served):
    _, body, _ = await served.post(CHAT, {"messages": USER, "temperature": 2.5})
    assert body["error"]["message"] == "temperature = 2.5 is out of range: allowed is 0 to 2"
    _, body, _ = await served.post(CHAT, {"messages": USER, "stop": [7]})
    assert "stop[0]" in body["error"]["message"] and "7" in body["error"]["message"]
    _, body, _ = await served.post(CHAT, {"messages": USER, "min_tokens": 9, "max_tokens": 5})
    assert body["error"]["param"] == "min_tokens" and "0 to max_tokens = 5" in body["error"]["message"]
    _, body, _ = await served.post(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21})
    assert body["error"]["message"] == "top_logprobs = 21 is out of range: allowed is 0 to 20"


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        (CHAT, {"regex": "a", "ebnf": "b"}, "ebnf"),
        (CHAT, {"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        (COMPLETIONS, {"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        (COMPLETIONS, {"stop_regex": "a", "n": 0}, "n"),
        (GENERATE, {"regex": "a", "json_schema": "{}"}, "json_schema"),
        (CHAT, {"tools": [TOOL], "temperature": 3}, "temperature"),
        (CHAT, {"tools": [TOOL], "messages": []}, "messages"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "regex"),
        (CHAT, {"logit_bias": {"5": 101}}, "logit_bias"),
        (GENERATE, {"sampling_params": {"logit_bias": {"5": 101}}}, "sampling_params.logit_bias"),
    ],
)
async def test_what_is_wrong_in_itself_comes_before_what_is_missing(served, path, extra, param):
    status, body, _ = await served.post(path, {**base(path), **extra})
    assert (status, body["error"]["param"]) == (400, param), body


async def test_labels_are_any_text_and_never_run_together(served):
    salts = [
        {"user": "é" * 256},
        {"user": "a\nb"},
        {"user_id": "a", "user": "b"},
        {"user_id": "a\nb"},
        {"extra_key": 'a", "b'},
        {"extra_key": "a", "user_id": "b"},
        {"cache_salt": "日本"},
    ]
    prompt = [5] * 256  # a whole page, which has a key
    for salt in salts:
        status, body, _ = await served.post(COMPLETIONS, {"prompt": prompt, **salt})
        assert status == 200, body
    assert len({start.page_keys for start in served.mesh.starts}) == len(salts)


async def test_no_log_probabilities_may_be_asked_for_in_so_many_words(served):
    status, body, _ = await served.post(CHAT, {"messages": USER, "logprobs": False, "top_logprobs": 0})
    assert status == 200 and body["choices"][0]["logprobs"] is None


async def test_a_prompt_that_is_too_long_is_counted_or_said_to_be_a_bound(served):
    _, body, _ = await served.post(COMPLETIONS, {"prompt": [5] * 5000})
    assert "has 5000 tokens" in body["error"]["message"]
    long = {"prompt": "many words " * 9000}
    _, body, _ = await served.post(COMPLETIONS, long)
    assert "has at least" in body["error"]["message"] and body["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "extra", "part"),
    [
        (CHAT, {"functions": [{"name": "f"}]}, "tool"),
        (CHAT, {"web_search_options": {}}, "search"),
        (COMPLETIONS, {"use_beam_search": True}, "beam"),
        (CHAT, {"logits_processors": ["x"]}, "code"),
        (CHAT, {"documents": [{"text": "x"}]}, "passages"),
        (CHAT, {"echo": True}, "message"),
        (CHAT, {"lora_path": "x"}, "adapter"),
        (COMPLETIONS, {"custom_logit_processor": "x"}, "code"),
        (GENERATE, {"return_hidden_states": True}, "worker"),
        (GENERATE, {"lora_path": ["x"]}, "adapter"),
    ],
)
async def test_missing_parts_are_501_and_named(served, path, extra, part):
    status, body, _ = await served.post(path, {**base(path), **extra})
    assert status == 501 and body["error"]["type"] == "not_implemented"
    assert part in body["error"]["message"] and body["error"]["param"] == next(iter(extra))
    assert not served.mesh.starts


async def test_earlier_reasoning_is_dropped_unless_asked_otherwise(served):
    messages = [*USER, {"role": "assistant", "content": "Hello.", "reasoning_content": "They greet me."}, *USER]
    body, counts = {"messages": messages, "thinking": {"type": "enabled"}}, []
    for kwargs in ({}, {"drop_thinking": True}, {"drop_thinking": False}):
        _, answer, _ = await served.post(CHAT, {**body, "chat_template_kwargs": kwargs})
        counts.append(answer["usage"]["prompt_tokens"])
    assert counts[0] == counts[1] < counts[2]


async def test_the_models_turn_is_always_opened(served):
    asked = {"messages": USER, "add_generation_prompt": False}
    for path in (CHAT, "/tokenize"):
        status, body, _ = await served.post(path, asked)
        assert status == 400 and body["error"]["param"] == "add_generation_prompt"
    last = {"role": "assistant", "content": "Well"}
    for messages, more in (([*USER, last], {"continue_final_message": True}), ([*USER, {**last, "prefix": True}], {})):
        status, _, _ = await served.post(CHAT, {**asked, "messages": messages, **more})
        assert status == 200


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"sampling_seed": 2**63}}, "sampling_params.sampling_seed"),
        ({"sampling_params": {"stop_token_ids": [9999]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": None}, "text"),
        ({"input_ids": [1]}, "text"),
        ({"text": [""]}, "text"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"token_ids_logprob": [-1]}, "token_ids_logprob"),
        ({"token_ids_logprob": [200_000], "return_logprob": True}, "token_ids_logprob"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"top_logprobs_num": 21, "return_logprob": True}, "top_logprobs_num"),
        ({"regex": "a", "sampling_params": {"regex": "a"}}, "regex"),
        ({"image_data": ["x"]}, "image_data"),
    ],
)
async def test_native_fields(served, extra, param):
    status, body, _ = await served.post(GENERATE, {"text": "Hi", **extra})
    assert status == 400 and body["error"]["param"] == param, body
    assert not served.mesh.starts


async def test_bounds_themselves_are_accepted(served):
    extremes = [
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "n": 1, "seed": -(2**63), "min_tokens": 0},
        {"temperature": 2, "top_p": 0.001, "top_k": 1, "min_p": 1, "n": 8, "seed": 2**63 - 1, "max_tokens": 1},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 2, "logit_bias": {"4095": -100}},
        {"stop": ["x" * 256] * 32, "stop_token_ids": [0, 4095], "user": "x" * 512, "priority": -(2**31)},
    ]
    for extra in extremes:
        status, body, _ = await served.post(CHAT, {"messages": USER, **extra})
        assert status == 200, body


async def test_null_is_absent_and_unknown_is_ignored(served):
    names = "temperature top_p top_k stop n seed logprobs top_logprobs tools stream_options max_tokens response_format"
    body = {"messages": [{**USER[0], "name": None, "extra": {"a": 1}}], **dict.fromkeys(names.split())}
    status, _, _ = await served.post(CHAT, {**body, "metadata": {"x": 1}, "store": True, "whatever": [1, {}]})
    assert status == 200
    nothing = {"use_beam_search": False, "logits_processors": [], "lora_path": "", "return_hidden_states": False}
    assert (await served.post(CHAT, {"messages": USER, **nothing, "documents": [], "echo": False}))[0] == 200
    nulls = dict.fromkeys(["input_ids", "rid", "return_logprob", "logprob_start_len", "regex", "image_data"])
    assert (await served.post(GENERATE, {"text": "Hi", "return_routed_experts": False, **nulls}))[0] == 200


async def test_sampling_reaches_the_mesh_resolved(served):
    sent = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.1, "max_completion_tokens": 5, "max_tokens": 9, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [9], "logit_bias": {"3": -5}, "logprobs": True, "top_logprobs": 4, "priority": -3,
    }  # fmt: skip
    await served.post(CHAT, {"messages": USER, **sent})
    start = served.mesh.starts[0]
    params = start.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.1)
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (5, 2, True)
    assert (params.stop_ids, params.bias, params.top_logprobs) == ((9,), ((3, -5.0),), 4)
    assert start.priority == -3


async def test_model_names(served):
    status, body, _ = await served.post(CHAT, {"messages": USER, "model": "gpt-9"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
    assert (await served.post(CHAT, {"messages": USER, "model": "v4-nano"}))[0] == 200


@pytest.mark.parametrize(
    ("data", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b'{"messages": NaN}', {}, 400),
        (b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", {}, 400),
        (b'{"a":' + b"[" * 200_000, {}, 400),
        (b'{"a":[' + b"{}," * 110_000 + b"{}]}", {}, 400),
        (b'{"temperature": 1e999}', {}, 400),
        (b"{}", {"Content-Type": "text/plain"}, 400),
        (b"{}", {"Content-Type": "application/json; charset=latin-1"}, 400),
    ],
)
async def test_broken_bodies(served, data, headers, status):
    headers = {"Content-Type": "application/json", **headers}
    async with served.session.post(served.url + CHAT, data=data, headers=headers) as response:
        assert response.status == status
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert served.gateway.admission.body_bytes == 0


async def test_body_limit_is_413(mesh, serve_with):
    async with serve_with(max_body_bytes=2000) as served:
        status, body, _ = await served.post(CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]})
        assert (status, body["error"]["code"]) == (413, "request_too_large")

        async def pieces():
            for _ in range(4):
                yield b"x" * 1000

        headers = {"Content-Type": "application/json"}
        async with served.session.post(served.url + CHAT, data=pieces(), headers=headers) as response:
            assert response.status == 413


async def test_errors_quote_a_bounded_part_of_what_was_sent(served):
    for body in ({"messages": [{"role": "x" * 100_000, "content": "a"}]}, {"messages": USER, "model": "x" * 100_000}):
        async with served.session.post(served.url + CHAT, json=body) as response:
            assert response.status in (400, 404) and len(await response.read()) < 5_000
