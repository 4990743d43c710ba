"""Keys given as hashes, and routes that need an operator's key."""

import io
import re
from contextlib import asynccontextmanager

import aiohttp
import grpc
import pytest
from aiohttp import web
from meshpb.v1 import generation_pb2 as pb
from meshpb.v1 import generation_pb2_grpc, scheduler_pb2

from gateway.app import build_admin_app, build_app
from gateway.config import GatewayConfig
from gateway.http_server import GatewayRunner
from meshkit.api_keys import HASHED, digest_of, read_api_keys
from meshkit.cli import main
from meshkit.errors import ConfigError
from meshkit.models import DEFAULT_MODEL

USER, OPERATOR = "sk-of-a-user", "sk-of-an-operator"


@pytest.fixture
def files(tmp_path):
    """A user's key as a hash, an operator's in the clear."""
    users, operators = tmp_path / "users", tmp_path / "operators"
    users.write_text(f"ann {HASHED}{digest_of(USER).hex()}  # rotated in spring\n")
    operators.write_text(f"{OPERATOR}\n")
    return {"api_key_file": users, "admin_api_key_file": operators}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def test_a_hashed_key_opens_and_nothing_else_does(mesh, serve_with, files):
    async with serve_with(**files) as served:
        body = {"prompt": "Hello", "max_tokens": 2}
        assert (await served.post("/v1/completions", body, headers=bearer(USER)))[0] == 200
        assert mesh.starts[-1].tenant == "ann"
        for wrong in (f"{HASHED}{digest_of(USER).hex()}", "sk-other-key", ""):
            assert (await served.post("/v1/completions", body, headers=bearer(wrong)))[0] == 401


@pytest.mark.parametrize("path", ["/server_info", "/flush_cache", "/get_server_info"])
async def test_what_concerns_the_mesh_needs_an_operator(serve_with, files, path):
    async with serve_with(**files) as served:
        for headers, status in ((bearer(OPERATOR), 200), (bearer(USER), 403), ({}, 401)):
            async with served.session.get(served.url + path, headers=headers) as response:
                assert response.status == status, await response.text()
        assert (await served.get("/v1/models", headers=bearer(USER)))[0] == 200
        assert (await served.post("/v1/completions", {"prompt": "x"}, headers=bearer(OPERATOR)))[0] == 200


async def test_operators_alone_without_users_keys(serve_with, files):
    async with serve_with(admin_api_key_file=files["admin_api_key_file"]) as served:
        assert (await served.post("/v1/completions", {"prompt": "x"}))[0] == 200
        assert (await served.get("/server_info"))[0] == 401


async def test_the_same_over_grpc(mesh, tokenizer, files):
    from tests.unit.gateway.test_rpc import listening

    async with listening(mesh, tokenizer, **files) as (channel, _):
        stub = generation_pb2_grpc.GenerationStub(channel)
        key = (("authorization", f"Bearer {OPERATOR}"),)
        assert (await stub.FlushCache(scheduler_pb2.FlushCacheRequest(), metadata=key)).pages == 3
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=(("x-api-key", USER),))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("line", ["sha256:abcd", "ann sha256:" + "g" * 64, "ann bob key-of-three-words", "short"])
def test_lines_that_are_no_key_are_refused(tmp_path, line):
    file = tmp_path / "keys"
    file.write_text(f"# keys\n{line}\n")
    with pytest.raises(ConfigError, match=r"keys:2: a line is .* 64 hex digits"):
        read_api_keys(file)


def test_hash_key_prints_what_the_file_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(USER + "\n"))
    assert main.main(["config", "hash-key"]) == 0
    line = capsys.readouterr().out.strip()
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", line) and bytes.fromhex(line[7:]) == digest_of(USER)
    file = tmp_path / "keys"
    file.write_text(line + "\n")
    assert read_api_keys(file)[0].digest == digest_of(USER)
    monkeypatch.setattr("sys.stdin", io.StringIO("short"))
    assert main.main(["config", "hash-key"]) == 2
    assert main.main(["chat", "--api-key-file", str(file), "-q", "Hello"]) == 3  # nothing to send
    assert "hashes only" in capsys.readouterr().err


async def test_the_operators_address_answers_them_alone(mesh, tokenizer, tmp_path):
    (tmp_path / "keys").write_text("ann key-of-ann-123\n")
    (tmp_path / "operators").write_text("ops key-of-ops-456\n")
    config = GatewayConfig(
        model=DEFAULT_MODEL,
        listen_http="0.0.0.0:8000",
        api_key_file=tmp_path / "keys",
        admin_api_key_file=tmp_path / "operators",
    )
    app = build_app(mesh, tokenizer, config)
    async with running(app) as url, running(build_admin_app(app)) as admin, aiohttp.ClientSession() as session:

        async def status(path, method="GET", key=""):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with session.request(method, path, headers=headers) as response:
                return response.status, await response.text()

        operator = "key-of-ops-456"
        assert (await status(f"{url}/metrics"))[0] == 403 and (await status(f"{admin}/metrics"))[0] == 200
        found, text = await status(f"{url}/server_info", key=operator)
        assert found == 403 and "--listen-admin" in text
        assert (await status(f"{admin}/server_info", key=operator))[0] == 200
        assert (await status(f"{admin}/server_info"))[0] == 401
        assert (await status(f"{admin}/server_info", key="key-of-ann-123"))[0] == 403
        assert (await status(f"{admin}/flush_cache", "POST", operator))[0] == 200
        assert (await status(f"{admin}/health"))[0] == 200
        for path in ("/v1/chat/completions", "/generate", "/v1/responses", "/tokenize", "/abort_request"):
            found, text = await status(f"{admin}{path}", "POST", "key-of-ann-123")
            assert found == 404 and "for operators" in text, path
        assert (await status(f"{admin}/v1/models", key="key-of-ann-123"))[0] == 404
        assert "sglang:http_requests_total" in (await status(f"{admin}/metrics"))[1]
    assert not mesh.starts


@asynccontextmanager
async def running(app):
    runner = GatewayRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
