"""Bounds on JSON structure, open generations, waits; what each is answered with."""

import asyncio
import gzip
import json
import time
from contextlib import suppress

import pytest

from gateway import generation
from gateway.errors import ApiError, ended
from gateway.limits import Admission, Limits, check_structure
from meshkit.testing import until

USER = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


def nested(depth: int, inside: bytes = b"") -> bytes:
    return b"[" * depth + inside + b"]" * depth


@pytest.mark.parametrize(
    "body",
    [
        nested(64),
        b'{"a":"' + b"[" * 1000 + b'"}',
        b'{"a":"\\"' + b"[{" * 1000 + b'\\\\"}',
        b"[" + b"[]," * 49_000 + b"[]]",
        b"",
    ],
)
def test_structure_within_bounds(body):
    check_structure(body, Limits())


@pytest.mark.parametrize("body", [nested(65), b'["\\\\",' + nested(64) + b"]", b'{"a":' * 70 + b"1" + b"}" * 70])
def test_too_deep(body):
    with pytest.raises(ApiError, match="levels deep") as refused:
        check_structure(body, Limits())
    assert refused.value.status == 400


def test_too_many_containers():
    with pytest.raises(ApiError, match="more than 100000"):
        check_structure(b"[" + b"{}," * 100_000 + b"{}]", Limits())


def test_structure_check_is_linear_on_hostile_bodies():
    for unit in (b'"\\', b'"', b"\\", b'[{"a', b"[["):
        body = unit * (4 * 2**20 // len(unit))
        start = time.perf_counter()
        with suppress(ApiError):
            check_structure(body, Limits())
        assert time.perf_counter() - start < 3


def test_admission_takes_all_or_none():
    admission = Admission(Limits(streams=3, queue=2, tenant_streams=2))
    admission.open(2, "a")
    with pytest.raises(ApiError, match="wait here"):
        admission.open(1, "b")
    admission.first_token()
    admission.first_token()
    with pytest.raises(ApiError, match="this key has 2 of 2"):
        admission.open(1, "a")
    with pytest.raises(ApiError, match="3 generations are open"):
        admission.open(2, "b")
    assert not admission.idle.is_set()
    admission.close("a")
    admission.close("a")
    assert admission.idle.is_set() and (admission.streams, admission.waiting) == (0, 0)
    admission.open(2, "a")


async def test_a_key_has_its_own_bound(mesh, serve_with, tmp_path):
    file = tmp_path / "keys"
    file.write_text("a key-of-alice\nb key-of-bobby")
    mesh.say = lambda start, choice: mesh.text("x", hold=True)
    async with serve_with(api_key_file=file) as served:
        alice, bob = ({"Authorization": f"Bearer key-of-{name}"} for name in ("alice", "bobby"))
        body = {"prompt": [[5]] * 64}
        held = asyncio.create_task(served.post("/v1/completions", body, headers=alice))
        await until(lambda: len(mesh.open) == 64)
        status, answer, headers = await served.post(CHAT, {"messages": USER}, headers=alice)
        assert status == 429 and "this key" in answer["error"]["message"] and headers["Retry-After"]
        told = {name: headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining", "reset")}
        assert told == {"limit": "64", "remaining": "0", "reset": "1s"}
        mesh.released.set()
        assert (await served.post(CHAT, {"messages": USER}, headers=bob))[0] == 200
        assert (await held)[0] == 200


async def test_the_bound_of_a_key_can_be_set(mesh, serve_with, tmp_path):
    file = tmp_path / "keys"
    file.write_text("a key-of-alice")
    async with serve_with(api_key_file=file, max_key_streams=2) as served:
        headers = {"Authorization": "Bearer key-of-alice"}
        assert (await served.post("/v1/completions", {"prompt": [[5]] * 2}, headers=headers))[0] == 200
        status, answer, _ = await served.post("/v1/completions", {"prompt": [[5]] * 3}, headers=headers)
        assert status == 429 and "0 of 2" in answer["error"]["message"]


@pytest.mark.parametrize("how", ["length", "chunks", "gzip"])
async def test_bytes_of_bodies_are_bounded_however_they_come(mesh, serve_with, monkeypatch, how):
    body = json.dumps({"prompt": "x" * 60_000}).encode()
    headers = {"Content-Type": "application/json"} | ({"Content-Encoding": "gzip"} if how == "gzip" else {})

    async def sent():
        for at in range(0, len(body), 9_000):
            yield body[at : at + 9_000]

    async with serve_with() as served:

        async def post():
            data = {"length": body, "chunks": sent(), "gzip": gzip.compress(body)}[how]
            async with served.session.post(served.url + "/tokenize", data=data, headers=headers) as response:
                return response.status, await response.json()

        assert (await post())[0] == 200
        monkeypatch.setattr(served.gateway.admission, "_limits", Limits(bodies_in_flight=50_000))
        status, answer = await post()
        assert status == 429 and "bytes in flight" in answer["error"]["message"]
        assert served.gateway.admission.body_bytes == 0
    async with serve_with(max_body_bytes=50_000) as served:
        assert (await post())[0] == 413
        assert served.gateway.admission.body_bytes == 0


async def test_a_request_that_waits_too_long_is_refused(mesh, serve_with, monkeypatch):
    monkeypatch.setattr(generation, "KEEP_ALIVE_SECONDS", 0.02)
    mesh.say = lambda start, choice: mesh.text("x", hold=True)
    async with serve_with() as served:
        limits = Limits(first_token_seconds=0.01)
        monkeypatch.setattr(served.gateway, "limits", limits)
        status, body, _ = await served.post(CHAT, {"messages": USER})
        assert status == 503 and "first token" in body["error"]["message"]
        assert len(mesh.gone) == 1


async def test_too_many_header_fields(served):
    headers = {f"x-{number}": "y" for number in range(70)}
    status, body, _ = await served.get("/health", headers=headers)
    assert status == 431 and "64" in body["error"]["message"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("deadline", 504),
        ("journal_full", 429),
        ("request_poisoned", 500),
        ("no_worker", 503),
        ("never_fits", 400),
        ("", 500),
    ],
)
def test_ends_with_an_error_have_a_status(code, status):
    assert ended(code, "why").status == status
