"""A gateway that leaves while its successor serves: handed over sockets, last requests on open connections, signals."""

import asyncio
import json
import os
import signal
import socket
from contextlib import asynccontextmanager

import aiohttp
import grpc
import pytest
from meshpb.v1 import generation_pb2, generation_pb2_grpc

from gateway.config import GatewayConfig
from meshkit.config import FieldError
from meshkit.models import DEFAULT_MODEL
from meshkit.testing import ServiceProcess, until

pytestmark = pytest.mark.timeout(90)
MODEL = ("--model", str(DEFAULT_MODEL))
TOKENS = 600
ASK = {"model": "v4-nano", "prompt": "Once there was a fox", "max_tokens": 4, "ignore_eos": True}
LONG = ASK | {"stream": True, "max_tokens": TOKENS, "return_token_ids": True}
ENDLESS = LONG | {"max_tokens": 60_000}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A folder with a scheduler and a worker that computes nothing, and the scheduler's address."""
    folder = tmp_path_factory.mktemp("handover")
    folder.chmod(0o700)
    scheduler = f"unix:{folder}/s.sock"
    worker = ("--listen", f"unix:{folder}/w.sock", "--scheduler", scheduler, "--backend", "sim", *MODEL)
    with (
        ServiceProcess("scheduler_svc", "--listen", scheduler, log=folder / "scheduler.log"),
        ServiceProcess("worker_svc", *worker, log=folder / "worker.log"),
    ):
        yield folder, scheduler


@pytest.fixture
def held():
    """A listening socket that outlives gateways, and its URL."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(64)
        yield holder, f"http://127.0.0.1:{holder.getsockname()[1]}"


@asynccontextmanager
async def gateway(mesh, held, name, *flags, ready_fd=0):
    """A gateway at the held socket; with `ready_fd` as a successor, else once it serves."""
    folder, scheduler = mesh
    holder, url = held
    fds = (holder.fileno(), ready_fd) if ready_fd else (holder.fileno(),)
    args = ["--listen-fds", str(fds[0]), "--ready-fd", str(ready_fd), "--scheduler", scheduler, *MODEL, *flags]
    here = url.removeprefix("http://")
    with ServiceProcess("gateway", *args, "--listen-http", here, log=folder / f"{name}.log", pass_fds=fds) as process:
        if not ready_fd:
            await serves(url)
        yield process


async def serves(url):
    async with aiohttp.ClientSession() as session:
        for _ in range(1000):
            async with session.get(f"{url}/ready") as reply:
                if reply.status == 200:
                    return
            await asyncio.sleep(0.05)
    raise AssertionError("not ready")


async def ids(stream):
    """Token ids of the rest of a stream, and how it ended."""
    found, finish = [], ""
    async for line in stream.content:
        if line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            found += choice.get("token_ids") or []
            finish = choice["finish_reason"] or finish
    return found, finish


async def status_of(process, number):
    process.process.send_signal(number)
    return await asyncio.to_thread(process.process.wait, 30)


async def test_the_successor_takes_new_connections_while_the_first_finishes(mesh, held):
    url = f"{held[1]}/v1/completions"
    async with gateway(mesh, held, "first") as first, aiohttp.ClientSession() as session:
        stream = await session.post(url, json=LONG)
        told, says = os.pipe()
        async with gateway(mesh, held, "second", ready_fd=says) as second:
            os.close(says)
            assert await asyncio.wait_for(asyncio.to_thread(os.read, told, 16), 60) == b"ready"
            os.close(told)
            first.process.send_signal(signal.SIGUSR1)
            await until(lambda: "draining" in first.log.read_text())
            async with aiohttp.ClientSession() as other, other.post(url, json=ASK) as reply:
                assert reply.status == 200 and "Connection" not in reply.headers  # the successor's
            found, finish = await ids(stream)
            assert (len(found), finish) == (TOKENS, "length")
            async with session.post(url, json=ASK) as reply:  # at once, on the connection that brought the stream
                assert reply.status == 200 and reply.headers["Connection"] == "close"
            assert await asyncio.to_thread(first.process.wait, 30) == 0
            assert await status_of(second, signal.SIGTERM) == 0


async def test_sigusr1_waits_until_sigterm_sets_the_limit(mesh, held):
    async with gateway(mesh, held, "patient", "--drain-seconds", "0.2") as first, aiohttp.ClientSession() as session:
        stream = await session.post(f"{held[1]}/v1/completions", json=ENDLESS)
        first.process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(0.8)
        assert first.process.poll() is None and "did not finish" not in first.log.read_text()
        first.process.send_signal(signal.SIGTERM)
        assert (await ids(stream))[1] == "abort"
        assert await asyncio.to_thread(first.process.wait, 30) == 0


async def test_grpc_calls_finish_too(mesh, held):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        public = f"127.0.0.1:{probe.getsockname()[1]}"
    async with gateway(mesh, held, "grpc", "--listen-grpc", public) as first, grpc.aio.insecure_channel(public) as way:
        sampling = generation_pb2.Sampling(max_tokens=TOKENS, ignore_eos=True)
        asked = generation_pb2.GenerateRequest(text="a", sampling=sampling)
        call = generation_pb2_grpc.GenerationStub(way).Generate(asked, timeout=60)
        replies = []
        async for reply in call:
            if not replies:
                first.process.send_signal(signal.SIGTERM)
            replies.append(reply)
        assert len(replies) > 1 and any(reply.HasField("complete") for reply in replies)
        assert await asyncio.to_thread(first.process.wait, 30) == 0


def test_every_process_needs_its_socket():
    with pytest.raises(FieldError, match="2 sockets for 3 processes"):
        GatewayConfig(model=DEFAULT_MODEL, processes=3, listen_fds=(3, 4))
