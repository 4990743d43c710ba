"""Server, channel, health and interceptors over real sockets, with the health service and one generic method."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshkit import errors
from meshkit.address import check_port, parse_address, prepare_listen
from meshkit.channel import open_channel
from meshkit.errors import BadRequest, ConfigError, DeadlineShort, MeshError, PortError, QueueFull
from meshkit.frames import SubmitReply, Verdict
from meshkit.health import READY, Health
from meshkit.interceptors import remaining_s, request_id
from meshkit.server import Serving, start_server
from meshkit.testing import FakeClock, serving, until

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

METHOD = "/v4mesh.test.Echo/Call"


def echo(behaviour):
    """Services for `serving`: one unary method over raw bytes."""

    def add(server):
        handler = grpc.unary_unary_rpc_method_handler(behaviour)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("v4mesh.test.Echo", {"Call": handler})])

    return add


async def call(address, timeout=5.0, data=b"x"):
    async with open_channel(address) as channel:
        return await channel.unary_unary(METHOD)(data, timeout=timeout)


async def test_unary_call_sees_shaved_deadline_and_request_id(tmp_path):
    seen = {}

    async def behaviour(request, context):
        seen.update(left=remaining_s(), id=request_id.get())
        return request

    async with serving(tmp_path, "a", echo(behaviour)) as address:
        request_id.set("r-17")
        assert await call(address, timeout=2.0) == b"x"
    assert seen["id"] == "r-17"
    assert 1.5 < seen["left"] < 2.0  # gRPC rounds timeouts up on the wire


async def test_deadline_is_mandatory_and_passed_to_inner_calls(tmp_path):
    async def inner(request, context):
        return str(context.time_remaining()).encode()

    async with serving(tmp_path, "inner", echo(inner)) as inner_address:

        async def outer(request, context):
            return await call(inner_address, timeout=None)

        async with serving(tmp_path, "outer", echo(outer)) as address:
            left = float(await call(address, timeout=3.0))
            assert 2.0 < left < 3.0  # gRPC rounds timeouts up on the wire
            with pytest.raises(BadRequest, match="no deadline"):
                await call(address, timeout=None)
            async with grpc.aio.insecure_channel(address) as bare:
                with pytest.raises(grpc.aio.AioRpcError, match="needs a deadline"):
                    await bare.unary_unary(METHOD)(b"")


@pytest.mark.parametrize(
    "error, kind, message",
    [
        (QueueFull("4096 waiting", retry_after_ms=70), QueueFull, "4096 waiting"),
        (errors.Superseded("attempt 3 is known"), errors.Superseded, "attempt 3"),
        (ZeroDivisionError("a secret"), MeshError, "internal error"),
    ],
)
async def test_errors_cross_the_wire_as_themselves(tmp_path, caplog, error, kind, message):
    async def behaviour(request, context):
        raise error

    async with serving(tmp_path, "e", echo(behaviour)) as address:
        with pytest.raises(MeshError, match=message) as caught:
            await call(address)
    assert type(caught.value) is kind
    assert caught.value.retry_after_ms == getattr(error, "retry_after_ms", 0)
    assert "secret" not in str(caught.value)


async def test_slow_handler_ends_at_its_deadline(tmp_path):
    async def behaviour(request, context):
        await asyncio.sleep(5)

    async with serving(tmp_path, "slow", echo(behaviour)) as address:
        start = time.monotonic()
        with pytest.raises(DeadlineShort):
            await call(address, timeout=0.2)
        with pytest.raises(DeadlineShort):
            await call(address, timeout=0.005)
    assert time.monotonic() - start < 2


async def test_health_names(tmp_path):
    health = Health()

    async def check(channel, name):
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=2)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)

    async with serving(tmp_path, "h", lambda server: None, health) as address, open_channel(address) as channel:
        assert [await check(channel, ""), await check(channel, READY)] == ["SERVING", "NOT_SERVING"]
        await health.set_ready(True)
        assert health.ready
        assert await check(channel, READY) == "SERVING"
        await health.enter_drain()
        assert not health.ready
        assert [await check(channel, ""), await check(channel, READY)] == ["NOT_SERVING", "NOT_SERVING"]


async def test_reflection_only_on_request(tmp_path):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async def names(reflected):
        spec = Serving(listen=f"unix:{tmp_path}/{len(reflected)}.sock", reflection=reflected)
        server, address = await start_server(spec, Health(), lambda server: None)
        async with open_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            try:
                async for reply in stub.ServerReflectionInfo(requests, timeout=2):
                    return {service.name for service in reply.list_services_response.service}
            finally:
                await server.stop(None)

    assert "grpc.health.v1.Health" in await names(("grpc.health.v1.Health",))
    with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
        await names(())


async def test_tcp_port_zero_and_busy_port():
    server, address = await start_server(Serving(listen="127.0.0.1:0"), Health(), lambda server: None)
    try:
        assert address.port > 0
        with pytest.raises(PortError, match=rf"127.0.0.1:{address.port} is in use by pid {os.getpid()} \(.*--port 0"):
            check_port(address)
    finally:
        await server.stop(None)


def test_addresses():
    assert str(parse_address("unix:/run/a.sock")) == str(parse_address("unix:///run/a.sock")) == "unix:/run/a.sock"
    assert str(parse_address("[::1]:80")) == "[::1]:80"
    assert [parse_address(a).is_local for a in ("[::1]:1", "localhost:1", "10.0.0.1:1", "scheduler:1", "unix:/a")] == [
        True,
        True,
        False,
        False,
        True,
    ]
    for text in ("nothing", "host:", "host:99999", ":80", "unix:/" + "x" * 120):
        with pytest.raises(ConfigError):
            parse_address(text)


def test_plain_tcp_beyond_loopback_needs_insecure():
    with pytest.raises(ConfigError, match="insecure = true"):
        prepare_listen(parse_address("0.0.0.0:0"))
    prepare_listen(parse_address("0.0.0.0:0"), insecure=True)


def test_unix_sockets_need_a_private_folder_and_a_free_name(tmp_path):
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    open_folder.chmod(0o755)
    with pytest.raises(ConfigError, match=r"mode 0755.*chmod 700"):
        prepare_listen(parse_address(f"unix:{open_folder}/s.sock"))
    path = tmp_path / "run" / "s.sock"
    prepare_listen(parse_address(f"unix:{path}"))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(str(path))
        holder.listen()
        with pytest.raises(PortError, match=f"in use by pid {os.getpid()}"):
            prepare_listen(parse_address(f"unix:{path}"))
    prepare_listen(parse_address(f"unix:{path}"))  # the holder is gone: its socket was only left behind
    assert not path.exists()


SERVICE = """
import asyncio, sys
from meshkit.health import Health
from meshkit.server import Serving, run, serve

async def work():
    print("working", flush=True)
    await asyncio.sleep(3600)

async def finish():
    print("finished", flush=True)

sys.exit(run(serve(Serving(listen=sys.argv[1]), Health(), lambda server: None, work=work, finish=finish)))
"""


def service(folder):
    args = [sys.executable, "-c", SERVICE, f"unix:{folder}/s.sock"]
    return subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env=ENV)


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_drain(tmp_path, number, status):
    with service(tmp_path) as process:
        assert process.stdout.readline() == "working\n"
        process.send_signal(number)
        assert process.stdout.readline() == "finished\n"
        assert process.wait(10) == status


def test_work_that_fails_ends_the_process(tmp_path):
    source = SERVICE.replace("await asyncio.sleep(3600)", "raise ValueError('broken')")
    args = [sys.executable, "-c", source, f"unix:{tmp_path}/s.sock"]
    done = subprocess.run(args, capture_output=True, text=True, env=ENV)
    assert done.returncode == 1
    assert "broken" in done.stderr


def test_error_tree():
    own = [kind for kind in errors._tree(MeshError) if kind.__module__ == errors.__name__]
    assert len(errors.BY_CODE) == len(own), "two classes share a code"
    for code, kind in errors.BY_CODE.items():
        grpc.StatusCode[kind.grpc_status]
        assert f" {code} " in errors.__doc__, f"{code} is missing from the tree in the docstring"
        assert f"{kind.__name__} " in errors.__doc__
        error = kind("text", retry_after_ms=5)
        back = errors.from_status(kind.grpc_status, "text", dict(errors.to_metadata(error)))
        assert (type(back), back.message, back.retry_after_ms) == (kind, "text", 5)
    assert type(errors.from_status("DATA_LOSS", "x", {})) is MeshError
    assert type(errors.from_status("UNAVAILABLE", "x", {errors.RETRY_KEY: "junk"})) is errors.Refused


def test_every_verdict_has_its_error():
    assert errors.from_verdict(SubmitReply(Verdict.ACCEPTED)) is None
    for verdict in Verdict:
        if verdict is not Verdict.ACCEPTED:
            error = errors.from_verdict(SubmitReply(verdict, retry_after_ms=9))
            assert error.retry_after_ms == 9
            assert verdict.name in error.message
    assert isinstance(errors.from_verdict(SubmitReply(Verdict.QUEUE_FULL, "full")), QueueFull)


async def test_until_and_fake_clock():
    clock = FakeClock()
    clock.advance(ms=2, ns=1)
    assert clock.now_ns() == 2_000_001
    with pytest.raises(AssertionError, match="not so within"):
        await until(lambda: False, 0.02)


def test_channel_import_loads_neither_torch_nor_rust():
    source = (
        "import meshkit.server, meshkit.wire, json, sys; "
        "print(json.dumps([m for m in ('torch','pydantic_core','tokenizers') if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, env=ENV)
    assert json.loads(out.stdout) == []


async def test_a_burst_of_calls_is_queued_not_shed(tmp_path):
    """Without max_pending_requests gRPC cancels a part of 1,500 calls at once."""

    async def behaviour(request, context):
        return request

    async with serving(tmp_path, "burst", echo(behaviour)) as address, open_channel(address) as channel:
        method = channel.unary_unary(METHOD)
        answers = await asyncio.gather(*(method(b"%d" % number, timeout=30) for number in range(1500)))
    assert answers == [b"%d" % number for number in range(1500)]


@pytest.mark.nightly
async def test_a_frozen_host_is_noticed(tmp_path):
    """SIGSTOP stands for it: the channel's pings are not answered any more."""
    with service(tmp_path) as process:
        process.stdout.readline()
        async with open_channel(f"unix:{tmp_path}/s.sock") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            start = time.monotonic()
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError, match="ping timeout"):
                await watch.read()
            assert time.monotonic() - start < 9
        process.kill()
