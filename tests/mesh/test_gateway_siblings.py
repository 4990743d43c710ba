"""Several gateway processes on one port: all answer, counts add up, aborts find theirs, a killed one comes back."""

import asyncio
import json
import os
import re
import signal
import socket
import urllib.request
from pathlib import Path

import aiohttp
import psutil
import pytest

from gateway.siblings.merge import merge
from meshkit.models import DEFAULT_MODEL
from meshkit.testing import ServiceProcess, until

BODY = {"model": "v4-nano", "prompt": "Once there was a fox", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A scheduler, a worker that computes nothing, and three gateways on one port."""
    folder = tmp_path_factory.mktemp("siblings")
    folder.chmod(0o700)
    scheduler, log = f"unix:{folder}/s.sock", folder / "gateway.log"
    model = ("--model", str(DEFAULT_MODEL))
    with (
        ServiceProcess("scheduler_svc", "--listen", scheduler, log=folder / "scheduler.log"),
        ServiceProcess(
            "worker_svc", "--listen", f"unix:{folder}/w.sock", "--scheduler", scheduler, "--backend", "sim", *model,
            log=folder / "worker.log",
        ),
        ServiceProcess(
            "gateway", "--listen-http", "127.0.0.1:0", "--processes", "3", "--scheduler", scheduler, *model,
            "--drain-seconds", "3", log=log,
        ) as parent,
    ):  # fmt: skip
        asyncio.run(until(lambda: log.read_text().count("tokenizer loaded") == 3, 60))
        url = re.search(r"http://127\.0\.0\.1:\d+(?= with 3 processes)", log.read_text())[0]
        asyncio.run(until(lambda: ready(url), 60))
        yield url, parent, log
        assert parent.end(signal.SIGTERM) == 0


def ready(url):
    """All of them, as far as a dozen new connections can tell."""
    try:
        for _ in range(12):
            with urllib.request.urlopen(f"{url}/ready", timeout=2) as answer:
                if answer.status != 200:
                    return False
    except OSError:
        return False
    return True


async def ask(url, body=BODY):
    """One request on a connection of its own, so that the kernel chooses anew."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        return response.status, await response.json()


async def metrics(url):
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        assert response.status == 200
        return await response.text()


def value(text, name):
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


async def test_whichever_process_is_asked_knows_what_all_have_done(mesh):
    url, parent, _ = mesh
    before = await metrics(url)
    answers = await asyncio.gather(*(ask(url) for _ in range(24)))
    assert [status for status, _ in answers] == [200] * 24
    seen = [await metrics(url) for _ in range(6)]
    for text in seen:
        assert value(text, "sglang:num_requests_total") - value(before, "sglang:num_requests_total") == 24
        assert value(text, "vllm:generation_tokens_total") - value(before, "vllm:generation_tokens_total") == 24 * 8
        assert value(text, "v4mesh_workers") == 1  # a level, not a sum
    busy = [child for child in psutil.Process(parent.process.pid).children() if child.num_threads()]
    assert len(busy) == 3


async def test_an_abort_finds_its_request_in_another_process(mesh):
    url, _, _ = mesh
    long = BODY | {"max_tokens": 3000, "stream": True, "rid": "far-away"}

    async def stream():
        events = []
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=long) as response:
            started.set()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
        return events

    started = asyncio.Event()
    running = asyncio.create_task(stream())
    await started.wait()
    for _ in range(6):  # some of these land in processes that do not have it
        asking = {"rid": "far-away"}
        async with aiohttp.ClientSession() as session, session.post(f"{url}/abort_request", json=asking) as response:
            assert response.status == 200
    async with asyncio.timeout(10):
        events = await running
    assert events[-1]["choices"][0]["finish_reason"] == "abort"


async def test_a_kept_response_is_found_and_forgotten_from_any_process(mesh):
    url, _, _ = mesh

    async def call(method, path, **options):
        async with aiohttp.ClientSession() as session, session.request(method, url + path, **options) as response:
            return response.status, await response.json()

    body = {"model": "v4-nano", "input": "Hi", "store": True, "max_output_tokens": 4}
    _, made = await call("POST", "/v1/responses", json=body)
    path = f"/v1/responses/{made['id']}"
    asked = [await call("GET", path) for _ in range(12)]
    assert all(status == 200 and answer == made for status, answer in asked)
    on = {**body, "store": False, "previous_response_id": made["id"]}
    answers = [await call("POST", "/v1/responses", json=on) for _ in range(6)]
    assert {answer["usage"]["input_tokens"] > made["usage"]["input_tokens"] for _, answer in answers} == {True}
    assert (await call("DELETE", path))[0] == 200
    assert {(await call(method, path))[0] for method in ("GET", "DELETE") for _ in range(6)} == {404}


async def connect(url, count=40):
    """So many connections at once, each with a request; the answers' first lines. Nothing is tried twice."""
    host, _, number = url.removeprefix("http://").partition(":")

    async def one():
        reader, writer = await asyncio.open_connection(host, int(number))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.partition(b"\r\n")[0]

    async with asyncio.timeout(30):
        return await asyncio.gather(*(one() for _ in range(count)))


ALL_FINE = [b"HTTP/1.1 200 OK"] * 40


def serving(log):
    """How often a process has begun to accept, the parent's own line apart."""
    return log.read_text().count("listening on http") - 1


async def shares(url, pids):
    """Of 60 connections, how many each process has."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        replies = await asyncio.gather(*(session.get(f"{url}/health") for _ in range(60)))
        port = int(url.rpartition(":")[2])
        found = [
            sum(it.laddr[1] == port and it.status == "ESTABLISHED" for it in psutil.Process(pid).net_connections())
            for pid in pids
        ]
        for reply in replies:
            reply.release()
    return found


async def test_siblings_take_the_connections_of_a_killed_process_until_it_is_back(mesh):
    """Its successor is held at its start: all that is answered meanwhile is answered by the others."""
    url, parent, log = mesh
    family = psutil.Process(parent.process.pid)
    before, began = {child.pid for child in family.children()}, serving(log)
    os.kill(min(before), signal.SIGKILL)
    assert await connect(url) == ALL_FINE  # some of these were in its queue before anybody knew
    await until(lambda: {child.pid for child in family.children()} - before)
    (successor,) = (child for child in family.children() if child.pid not in before)
    successor.suspend()
    try:
        assert await connect(url) == ALL_FINE and serving(log) == began
    finally:
        successor.resume()
    await until(lambda: serving(log) == began + 1, 30)
    assert f"(pid {min(before)}) is gone: its siblings accept its connections" in log.read_text()
    await until(lambda: ready(url), 10)
    assert min(await shares(url, [child.pid for child in family.children()])) > 5  # each at its own socket again


async def test_siblings_take_the_new_connections_of_a_frozen_process(mesh):
    url, parent, log = mesh
    frozen = psutil.Process(parent.process.pid).children()[0]
    frozen.suspend()
    try:
        assert await connect(url) == ALL_FINE
        warned = f"(pid {frozen.pid}) has not answered for 2 s: its siblings accept new connections in its place"
        assert warned in log.read_text()
        assert "vllm:" in await metrics(url)
    finally:
        frozen.resume()
    await until(lambda: f"(pid {frozen.pid}) answers again" in log.read_text(), 10)
    assert await connect(url) == ALL_FINE


async def test_a_port_that_is_given_up_refuses_at_once_while_open_answers_finish(mesh):
    """And the last one: the port's processes leave."""
    url, parent, _ = mesh
    child = psutil.Process(parent.process.pid).children()[0].cmdline()
    hub = Path(child[child.index("--hub") + 1])
    assert (hub.parent / "pid").read_text() == str(parent.process.pid)
    async with aiohttp.ClientSession() as session:
        stream = await session.post(f"{url}/v1/completions", json=BODY | {"max_tokens": 30_000, "stream": True})
        parent.process.send_signal(signal.SIGTERM)
        await until(lambda: refused(url), 10)
        assert parent.process.poll() is None
        assert (await stream.content.read()).endswith(b"data: [DONE]\n\n")
    assert await asyncio.to_thread(parent.process.wait, 30) == 0
    assert not hub.parent.exists()


def refused(url):
    host, _, number = url.removeprefix("http://").partition(":")
    try:
        socket.create_connection((host, int(number)), timeout=1).close()
    except ConnectionRefusedError:
        return True
    return False


def test_counters_add_up_and_levels_do_not():
    one = '# TYPE a counter\na_total{x="1"} 2\na_total{x="2"} 1\n# TYPE g gauge\ng 5\n'
    two = '# TYPE a counter\na_total{x="1"} 3\n# TYPE g gauge\ng 4\n'
    two += '# TYPE h histogram\nh_bucket{le="+Inf"} 1\nh_count 1\nh_sum 2\n'
    text = merge([one, two]).decode()
    assert 'a_total{x="1"} 5.0' in text and 'a_total{x="2"} 1.0' in text and "\ng 5.0" in text and "h_sum 2.0" in text
    own = "# TYPE sglang:http_requests_active gauge\nsglang:http_requests_active 2\n"
    assert "sglang:http_requests_active 4.0" in merge([own, own]).decode()
