"""Odd bodies of every route: 200 or a refusal that explains itself, never a 500, and the server goes on."""

import gzip
import json
import random

import msgspec
import pytest

from gateway import schema

VALUES = [
    None, True, False, 0, -1, 1, 2, 7, 4095, 4096, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, "", "a", "x" * 600,
    "é", "\x00", "\udc00".encode("utf-16", "surrogatepass").decode("utf-16", "replace"), [], [[]], [None], [0], [4096],
    ["a"], ["a", 1], [[1], [2]], [[1], "a"], {}, {"a": 1}, {"1": 1}, {"type": "text"}, {"type": "enabled"}, [{}],
    {"include_usage": True}, [{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "["}}]}],
    [{"role": "assistant", "content": "a", "prefix": True}], "auto", "none", "high", {"thinking": True},
    {"type": "json_schema", "json_schema": 5}, {"type": "json_schema", "json_schema": [1]},
    {"type": "json_schema", "json_schema": "s"}, {"type": "json_schema", "json_schema": {"schema": {}}},
    {"type": "function", "function": {"name": "f"}}, {"type": "function", "function": 5}, "required",
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "function": {"name": []}}],
]  # fmt: skip
ROUTES = {
    "/v1/chat/completions": (schema.ChatRequest, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
    "/v1/completions": (schema.CompletionRequest, {"prompt": "Hi", "max_tokens": 5}),
    "/generate": (schema.GenerateRequest, {"text": "Hi", "sampling_params": {"max_new_tokens": 5}}),
    "/tokenize": (schema.TokenizeRequest, {"prompt": "Hi"}),
    "/detokenize": (schema.DetokenizeRequest, {"tokens": [5]}),
    "/abort_request": (schema.AbortRequest, {}),
    "/explain": (schema.ExplainRequest, {"prompt": "Hi"}),
}
STATUSES = {200, 400, 404, 501}


def names_of(kind: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind)]


@pytest.mark.parametrize("path", ROUTES)
async def test_no_body_is_a_500(served, path):
    kind, base = ROUTES[path]
    random_ = random.Random(path)
    names = names_of(kind)
    for round_ in range(250):
        body = dict(base)
        for _ in range(random_.choice([1, 1, 2, 3])):
            body[random_.choice(names)] = random_.choice(VALUES)
        if path == "/generate" and round_ % 2:
            inner = random_.choice(names_of(schema.NativeSampling))
            body["sampling_params"] = {"max_new_tokens": 5, inner: random_.choice(VALUES)}
        async with served.session.post(served.url + path, json=body) as response:
            text = await response.text()
        assert response.status in STATUSES, (body, text)
        if response.status != 200:
            error = json.loads(text)["error"]
            assert error["message"] and set(error) == {"message", "type", "param", "code"}
    assert (await served.post("/v1/completions", {"prompt": "Hi"}))[0] == 200


async def test_raw_bytes(served):
    random_ = random.Random(7)
    seed = json.dumps(ROUTES["/v1/chat/completions"][1]).encode()
    headers = {"Content-Type": "application/json"}
    for _ in range(400):
        body = bytearray(seed)
        for _ in range(random_.randrange(1, 5)):
            body[random_.randrange(len(body))] = random_.randrange(256)
        async with served.session.post(
            served.url + "/v1/chat/completions", data=bytes(body), headers=headers
        ) as response:
            assert response.status in STATUSES, (bytes(body), await response.text())


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_not_compressed_as_it_says(served, caplog, path, encoding):
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    for body in (json.dumps(ROUTES[path][1]).encode(), b"\x1f\x8b\x08", gzip.compress(b"{}")[:-6] + b"xxxxxx"):
        async with served.session.post(served.url + path, data=body, headers=headers) as response:
            assert response.status in (200, 400), (body, await response.text())
            if response.status == 400:
                assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert served.gateway.admission.body_bytes == 0
    assert not [record for record in caplog.records if record.exc_info], caplog.text


async def test_a_compressed_body_is_read(served):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    body = gzip.compress(json.dumps({"prompt": "Hi"}).encode())
    async with served.session.post(served.url + "/tokenize", data=body, headers=headers) as response:
        assert response.status == 200 and (await response.json())["count"] >= 1
