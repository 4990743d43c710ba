"""Routes for operators, and what holds for every route: paths, methods, ids, keys, readiness."""

import asyncio
import time
from dataclasses import replace

import pytest

from gateway import operations
from gateway.text.chat_encoding import ChatOptions, encode_chat, parse_messages, parse_tools
from meshkit.build import build_id
from meshkit.testing import until

USER = [{"role": "user", "content": "Hi"}]


async def test_models(served):
    _, body, _ = await served.get("/v1/models")
    card = body["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("v4-nano", "model", 4096)
    names = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
    assert set(card) == names | {"type", "display_name", "created_at"}
    assert (await served.get("/v1/models/v4-nano"))[1] == card
    status, body, _ = await served.get("/v1/models/deepseek-ai/other")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_the_workers_word_on_the_context_counts(served):
    served.mesh.status = replace(served.mesh.status, model=replace(served.mesh.status.model, max_context=100))
    assert (await served.get("/v1/models"))[1]["data"][0]["max_model_len"] == 100
    status, body, _ = await served.post("/v1/completions", {"prompt": [5] * 100})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_tokenize_and_back(served, tokenizer):
    _, body, _ = await served.post("/tokenize", {"prompt": "Hi 😀 there", "add_special_tokens": False})
    assert body["tokens"] == tokenizer.encode("Hi 😀 there")
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 4096)
    assert (await served.post("/v1/detokenize", {"tokens": body["tokens"]}))[1] == {"text": "Hi 😀 there"}
    _, body, _ = await served.post("/v1/tokenize", {"messages": USER})
    await served.post("/v1/chat/completions", {"messages": USER})
    assert body["tokens"] == served.mesh.starts[0].prompt.tolist()
    hidden = {"tokens": [0, *tokenizer.encode("a")]}
    assert (await served.post("/detokenize", hidden))[1]["text"] == "a"
    shown = (await served.post("/detokenize", {**hidden, "skip_special_tokens": False}))[1]["text"]
    assert shown == "<｜begin▁of▁sentence｜>a"


async def test_tokenize_counts_beyond_the_context(served, tokenizer):
    text = "many words " * 6000
    expected = len(tokenizer.encode(text))
    assert expected > 4096
    status, body, _ = await served.post("/tokenize", {"prompt": text})
    assert (status, body["count"]) == (200, expected)
    _, body, _ = await served.post("/tokenize", {"prompt": [text, "a"]})
    assert body["count"] == expected + 1
    status, body, _ = await served.post("/tokenize", {"messages": [{"role": "user", "content": text}]})
    assert status == 200 and body["count"] > expected


async def test_tokenize_counts_tools_as_chat_would_encode_them(served, tokenizer):
    tools = [{"type": "function", "function": {"name": name, "description": "gets it"}} for name in ("get", "set")]
    plain = (await served.post("/tokenize", {"messages": USER}))[1]["tokens"]
    body = {"messages": USER, "tools": tools}
    status, answer, _ = await served.post("/tokenize", body)
    assert status == 200, answer
    options = ChatOptions(
        thinking=served.gateway.model.default_thinking,
        effort_revision=served.gateway.model.effort_revision,
        tools=parse_tools(tools),
    )
    assert answer["tokens"] == encode_chat(tokenizer, parse_messages(USER), options).ids
    assert answer["count"] > len(plain)
    assert (await served.post("/tokenize", {**body, "tool_choice": "none"}))[1]["tokens"] == plain
    status, answer, _ = await served.post("/tokenize", {**body, "tools": [{"type": "function", "function": {}}]})
    assert (status, answer["error"]["param"]) == (400, "tools[0].function.name")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": ["a"] * 1025}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_tokenize_refuses(served, path, body, param):
    status, answer, _ = await served.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_health_ready_and_their_difference(served):
    for path in ("/health", "/ping", "/ready"):
        assert (await served.get(path))[0] == 200
    served.mesh.status = replace(served.mesh.status, ready=False)
    assert (await served.get("/health"))[0] == 200
    status, body, headers = await served.get("/ready")
    assert status == 503 and int(headers["Retry-After"]) >= 1 and "worker" in body["error"]["message"]
    # A mesh that has served before takes requests while it heals: the journal keeps them.
    assert (await served.post("/v1/chat/completions", {"messages": USER}))[0] == 200


async def test_health_generate_runs_one_token(served, monkeypatch):
    assert (await served.get("/health_generate"))[0] == 200
    start = served.mesh.starts[0]
    assert (start.prompt.tolist(), start.params.max_tokens) == ([0], 1)
    monkeypatch.setattr(operations, "HEALTH_SECONDS", 0.05)
    served.mesh.say = lambda start, choice: served.mesh.text("x", hold=True)
    status, body, _ = await served.get("/health_generate")
    assert status == 503 and "no token" in body["error"]["message"] and len(served.mesh.gone) == 1


@pytest.mark.parametrize("state", ["no scheduler", "no model", "scheduler drains"])
async def test_503_until_requests_can_be_queued(served, state):
    if state == "no scheduler":
        served.mesh.status = None
    else:
        change = {"model": None} if state == "no model" else {"draining": True}
        served.mesh.status = replace(served.mesh.status, **change)
    for path, body in (
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": "a"}),
        ("/generate", {"text": "a"}),
    ):
        status, answer, headers = await served.post(path, body)
        assert (status, answer["error"]["type"]) == (503, "overloaded_error") and headers["Retry-After"]
    assert (await served.get("/ready"))[0] == 503


async def test_a_gateway_that_leaves_is_not_ready_but_serves_what_comes_on_open_connections(served):
    status, _, headers = await served.post("/v1/completions", {"prompt": "a"})
    assert status == 200 and headers.get("Connection") != "close"
    served.gateway.admission.draining = True
    for path, body in (
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": "a"}),
        ("/generate", {"text": "a"}),
    ):
        status, _, headers = await served.post(path, body)
        assert status == 200 and headers["Connection"] == "close", path
    for path in ("/health", "/ready"):
        status, _, headers = await served.get(path)
        assert status == 503 and headers["Retry-After"]


async def test_while_the_tokenizer_loads(mesh, serve_with):
    async with serve_with(tokenizer=None) as served:
        assert (await served.get("/health"))[0] == 200
        assert (await served.get("/v1/models"))[0] == 200
        for path, body in (("/v1/chat/completions", {"messages": USER}), ("/tokenize", {"prompt": "a"})):
            status, answer, headers = await served.post(path, body)
            assert status == 503 and "starting" in answer["error"]["message"] and headers["Retry-After"]


async def test_paths_are_forgiven(served):
    for path in ("/v1//models", "//v1/models/", "/models", "/v1/models"):
        assert (await served.get(path))[0] == 200
    for path in ("/chat/completions", "/beta/chat/completions", "//v1//chat/completions"):
        assert (await served.post(path, {"messages": USER}))[0] == 200
    for path in ("/completions", "/beta/completions"):
        assert (await served.post(path, {"prompt": "a"}))[0] == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health", "/server_info"])
async def test_head_wherever_get(served, path):
    async with served.session.head(served.url + path) as response:
        assert response.status == 200 and await response.read() == b""


async def test_unknown_routes_and_methods(served):
    status, body, _ = await served.get("/v1/nothing")
    assert (status, body["error"]["type"]) == (404, "invalid_request_error")
    status, body, headers = await served.get("/v1/chat/completions")
    assert status == 405 and "POST" in body["error"]["message"] and headers["Allow"] == "POST"
    assert (await served.get("/generate"))[2]["Allow"] == "POST, PUT"
    assert served.gateway.metrics.unknown_routes == 1


async def test_request_ids_are_echoed_or_made(served):
    for path, body in (("/v1/chat/completions", {"messages": USER}), ("/v1/chat/completions", {"n": 0}), ("/nope", {})):
        _, _, headers = await served.post(path, body, headers={"x-request-id": "abc-1"})
        assert headers["x-request-id"] == "abc-1"
    _, _, headers = await served.get("/health", headers={"x-request-id": "x" * 200})
    assert len(headers["x-request-id"]) == 32
    async with served.session.post(
        served.url + "/v1/completions", json={"prompt": "a", "stream": True}, headers={"x-request-id": "s1"}
    ) as response:
        assert response.headers["x-request-id"] == "s1"
        await response.read()


async def test_trace_context_goes_to_the_mesh_unless_malformed(served):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for value in (parent, "00-xyz"):
        await served.post("/v1/completions", {"prompt": "a"}, headers={"traceparent": value})
    assert [start.traceparent for start in served.mesh.starts] == [parent, ""]


async def test_keys(mesh, serve_with, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nalice secret-alice\n\nsecret-bob-1 # second\n")
    async with serve_with(api_key_file=file) as served:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret-alice"}):
            status, body, _ = await served.post("/v1/completions", {"prompt": "a"}, headers=headers)
            assert (status, body["error"]["type"]) == (401, "authentication_error")
            assert "secret" not in body["error"]["message"]
        for headers in ({"Authorization": "Bearer secret-alice"}, {"authorization": "bearer secret-bob-1"}):
            assert (await served.post("/v1/completions", {"prompt": "a"}, headers=headers))[0] == 200
        assert [start.tenant for start in mesh.starts] == ["alice", "key-4"]
        assert (await served.get("/health"))[0] == (await served.get("/ready"))[0] == 200
        assert (await served.get("/v1/models"))[0] == (await served.get("/server_info"))[0] == 401


async def test_the_build_is_told(served):
    assert (await served.get("/version"))[1] == {"version": build_id()}


async def test_server_info_and_model_info_hold_no_secret(mesh, serve_with, tmp_path):
    file = tmp_path / "keys"
    file.write_text("alice secret-alice")
    async with serve_with(api_key_file=file) as served:
        headers = {"Authorization": "Bearer secret-alice"}
        for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
            status, body, _ = await served.get(path, headers=headers)
            assert status == 200 and body["max_model_len"] == 4096 and "secret" not in str(body)
        info = (await served.get("/server_info", headers=headers))[1]
        assert info["scheduler"]["ready"] and info["limits"]["choices"] == 8


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, 200),
        ({"listen_http": "unix:/run/x/gateway.sock"}, 200),
        ({"listen_http": "0.0.0.0:8000", "listen_admin": "127.0.0.1:9"}, 403),
        ({"listen_http": "0.0.0.0:8000", "public_metrics": True}, 200),
    ],
)
async def test_insides_are_shown_on_loopback_or_by_flag(serve_with, options, status):
    async with serve_with(**options) as served:
        for path in ("/metrics", "/server_info", "/get_server_info"):
            async with served.session.get(served.url + path) as response:
                assert response.status == status
                assert status == 200 or "--public-metrics" in (await response.json())["error"]["message"]
        assert (await served.get("/health"))[0] == 200


async def test_a_tenant_aborts_its_own_requests_alone(mesh, serve_with, tmp_path):
    file = tmp_path / "keys"
    file.write_text("a key-of-alice\nb key-of-bobby")
    mesh.say = lambda start, choice: mesh.text("x", hold=True)
    async with serve_with(api_key_file=file) as served:
        alice, bob = ({"Authorization": f"Bearer key-of-{name}"} for name in ("alice", "bobby"))
        body = {"messages": USER, "rid": "mine"}
        of_alice, of_bob = (
            asyncio.create_task(served.post("/v1/chat/completions", body, headers=headers)) for headers in (alice, bob)
        )
        await until(lambda: len(mesh.open) == 2)
        ids = {start.tenant: start.request_id for start in mesh.starts}
        assert (await served.post("/v1/chat/completions", body, headers=bob))[0] == 400
        await served.post("/abort_request", {"rid": "mine"}, headers=bob)
        assert mesh.aborted == [ids["b"]]
        assert (await of_bob)[1]["choices"][0]["finish_reason"] == "abort"
        await served.post("/abort_request", {"abort_all": True}, headers=bob)
        assert mesh.aborted == [ids["b"]] and not of_alice.done()
        await served.post("/abort_request", {"abort_all": True}, headers=alice)
        assert mesh.aborted == [ids["b"], ids["a"]] and (await of_alice)[0] == 200


async def test_metrics_tell_what_happened(served):
    served.mesh.cached = 1
    served.mesh.status = replace(served.mesh.status, pages_total=10, pages_free=4)
    await served.post("/v1/chat/completions", {"messages": USER})
    await served.post("/v1/chat/completions", {"messages": USER, "n": 0})
    started = time.perf_counter()
    async with served.session.get(served.url + "/metrics") as response:
        assert response.status == 200 and response.headers["Content-Type"].startswith("text/plain")
        text = await response.text()
    assert time.perf_counter() - started < 0.2
    label = 'model_name="v4-nano"'
    for line in (
        f'vllm:request_success_total{{engine="0",finished_reason="stop",{label}}} 1.0',
        f'vllm:generation_tokens_total{{engine="0",{label}}} 6.0',
        f"sglang:generation_tokens_total{{{label}}} 6.0",
        f"sglang:cached_tokens_total{{{label}}} 1.0",
        f'vllm:time_to_first_token_seconds_count{{engine="0",{label}}} 1.0',
        f"sglang:e2e_request_latency_seconds_count{{{label}}} 1.0",
        'sglang:http_responses_total{status_code="400"} 1.0',
        'sglang:http_requests_total{endpoint="/v1/chat/completions"} 2.0',
        f'vllm:num_requests_running{{engine="0",{label}}} 0.0',
        f"sglang:token_usage{{{label}}} 0.6",
        f"sglang:num_used_tokens{{{label}}} 1536.0",
        f"sglang:kv_available_tokens{{{label}}} 1024.0",
    ):
        assert line in text, line
    assert 'gen_ai_client_token_usage_count{gen_ai_provider_name="deepseek"' in text
    assert f'vllm:inter_token_latency_seconds_count{{engine="0",{label}}} 5.0' in text


async def test_stages_of_a_request_add_up(served):
    """Also where a stop string ends it with its first token; without the scheduler's word there are none."""
    served.mesh.say = lambda start, choice: served.mesh.text("one two three", hold_after=1)
    running = asyncio.create_task(served.post("/v1/completions", {"prompt": "Hi", "max_tokens": 9}))
    await until(lambda: bool(served.mesh.starts))
    await asyncio.sleep(0.06)
    served.mesh.released.set()
    assert (await running)[0] == 200
    assert not sum(served.gateway.metrics.queue.counts)
    served.mesh.waited_ms = 20
    served.mesh.say = lambda start, choice: served.mesh.text("stop here at once", burst=50)
    for stop in ("here", None):
        assert (await served.post("/v1/completions", {"prompt": "Hi", "stop": stop}))[0] == 200
    metrics = served.gateway.metrics
    totals = {name: getattr(metrics, name).total for name in ("queue", "prefill", "decode", "inference")}
    assert totals["queue"] == pytest.approx(0.04) and totals["prefill"] >= 0 and totals["decode"] >= 0
    assert totals["inference"] == pytest.approx(totals["prefill"] + totals["decode"])
    async with served.session.get(served.url + "/metrics") as response:
        text = await response.text()
    label = 'model_name="v4-nano"'
    for line in (
        *(f'vllm:request_{name}_time_seconds_count{{engine="0",{label}}} 2.0' for name in totals),
        f"sglang:queue_time_seconds_count{{{label}}} 2.0",
        f'sglang:per_stage_req_latency_seconds_count{{{label},stage="request_process"}} 3.0',
        f'sglang:per_stage_req_latency_seconds_count{{{label},stage="prefill_forward"}} 2.0',
        f'sglang:per_stage_req_latency_seconds_bucket{{le="0.001",{label},stage="decode_forward"}} 2.0',
        f"sglang:grammar_compilation_time_seconds_count{{{label}}} 0.0",
    ):
        assert line in text, line


async def test_metrics_are_quick(served):
    metrics = served.gateway.metrics
    for code in range(200, 260):
        metrics.http_responses[code] += 1
    best = min(_seconds(metrics.exposition) for _ in range(5))
    assert best < 0.02


def _seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
