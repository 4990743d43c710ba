"""Clients that leave, and clients that do not read."""

import asyncio
import json

import pytest

from gateway import generation
from gateway.sse import KEEP_ALIVE, json_text
from meshkit.testing import until

USER = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "decoding"])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_closed_socket_cancels_in_the_mesh(served, stream, when, n):
    hold = {"hold": True} if when == "queued" else {"hold_after": 3}
    served.mesh.say = lambda start, choice: served.mesh.text("one two three four five", **hold)
    body = {"messages": USER, "stream": stream, "n": n}
    request = asyncio.create_task(served.session.post(served.url + CHAT, json=body))
    await until(lambda: bool(served.mesh.starts))
    if when == "decoding":
        await until(lambda: served.gateway.admission.waiting == 0)
    assert served.gateway.admission.streams == 1
    if request.done():
        request.result().close()
    else:
        request.cancel()
    await until(lambda: bool(served.mesh.gone))
    assert served.mesh.gone == [served.mesh.starts[0].request_id]
    await until(lambda: served.gateway.metrics.http_active == 0)
    assert served.gateway.metrics.http_responses[499] == 1 and served.gateway.metrics.aborted == 1
    assert served.gateway.admission.streams == served.gateway.admission.waiting == 0
    assert not served.mesh.open


async def test_a_batch_is_cancelled_whole_but_ended_prompts_are_not(served):
    served.mesh.say = lambda start, choice: served.mesh.text("x", hold=start.prompt[0] == 20)
    request = asyncio.create_task(served.post("/v1/completions", {"prompt": [[10], [20], [20]]}))
    await until(lambda: len(served.mesh.starts) == 3 and len(served.mesh.open) == 2)
    await until(lambda: served.gateway.admission.streams == 2)
    request.cancel()
    await until(lambda: len(served.mesh.gone) == 2)
    assert set(served.mesh.gone) == {start.request_id for start in served.mesh.starts[1:]}


async def test_a_finished_request_is_not_cancelled(served):
    await served.post(CHAT, {"messages": USER})
    await served.events(CHAT, {"messages": USER, "stream": True})
    assert served.mesh.gone == []


async def test_an_error_in_one_choice_cancels_its_siblings(served):
    def say(start, choice):
        script = served.mesh.text("one two", hold=choice == 1)
        if choice == 0:
            script.bursts.pop()
            script.finish, script.error = 4, ("internal", "lost")
        return script

    served.mesh.say = say
    status, _, _ = await served.post(CHAT, {"messages": USER, "n": 2})
    assert status == 500 and served.mesh.gone == [served.mesh.starts[0].request_id]


async def test_a_client_that_does_not_read_is_cut_off(mesh, serve_with):
    mesh.say = lambda start, choice: mesh.text("many words follow each other " * 400, burst=4)
    async with serve_with(stream_stall_seconds=0.3, max_streams=10) as served:
        host, port = served.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps({"prompt": "a", "stream": True, "n": 8, "max_tokens": 4000, "logprobs": 20}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        writer.transport.pause_reading()
        writer.write(head.encode() + body)
        await until(lambda: bool(mesh.gone), 20)
        assert served.gateway.guard.cut == 1
        await until(lambda: served.gateway.admission.streams == 0)
        writer.close()


async def test_keep_alive_comments_while_queued(mesh, serve_with, monkeypatch):
    monkeypatch.setattr(generation, "KEEP_ALIVE_SECONDS", 0.05)
    mesh.say = lambda start, choice: mesh.text("late", hold=True)
    async with serve_with() as served:
        async with served.session.post(served.url + CHAT, json={"messages": USER, "stream": True}) as response:
            assert response.status == 200
            seen = b""
            while seen.count(KEEP_ALIVE) < 2:
                seen += await response.content.readany()
            mesh.released.set()
            seen += await response.read()
        assert b'"finish_reason":"stop"' in seen and seen.endswith(b"data: [DONE]\n\n")


async def test_streams_and_queue_are_bounded(mesh, serve_with):
    mesh.say = lambda start, choice: mesh.text("x", hold=True)
    async with serve_with(max_streams=3, max_waiting=2) as served:
        held = [asyncio.create_task(served.post(CHAT, {"messages": USER})) for _ in range(2)]
        await until(lambda: len(mesh.open) == 2)
        for _ in range(2):  # the handle of a refused request is free again
            status, body, headers = await served.post(CHAT, {"messages": USER, "rid": "mine"})
            assert (status, body["error"]["code"]) == (429, "queue_full") and headers["Retry-After"]
        mesh.released.set()
        assert [status for status, _, _ in await asyncio.gather(*held)] == [200, 200]
        assert (await served.post(CHAT, {"messages": USER}))[0] == 200
        status, body, _ = await served.post("/v1/completions", {"prompt": [[5]] * 4})
        assert status == 429
        assert served.gateway.admission.streams == served.gateway.admission.waiting == 0


async def test_sixteen_streams_of_which_eight_vanish(served):
    served.mesh.say = lambda start, choice: served.mesh.text("alpha beta gamma delta", hold_after=2)
    responses = []
    for _ in range(16):
        responses.append(await served.session.post(served.url + CHAT, json={"messages": USER, "stream": True}))
    for response in responses[::2]:
        response.close()
    await until(lambda: len(served.mesh.gone) == 8)
    served.mesh.released.set()
    for response in responses[1::2]:
        raw = (await response.read()).decode()
        text = "".join(
            json.loads(line.removeprefix("data: "))["choices"][0]["delta"]["content"] or ""
            for line in raw.split("\n\n")
            if line.startswith("data: {")
        )
        assert text == "alpha beta gamma delta" and raw.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_both_http_versions_stream(served, version):
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    raw = (await reader.read()).decode()
    writer.close()
    assert raw.startswith("HTTP/1.") and ("chunked" in raw) == (version == "1.1")
    assert raw.count("data: {") == 6 and "data: [DONE]" in raw


@pytest.mark.parametrize("way", ["short", "long"])
async def test_a_bug_in_one_stream_ends_that_stream_alone(served, monkeypatch, way):
    script = served.mesh.text("one two three four five")
    served.mesh.say = lambda start, choice: script

    def broken(self, updates):
        if any(delta.text == " three" for update in updates for delta in update.deltas):
            raise RuntimeError("secret detail")
        return good(self, updates)

    def broken_text(text):
        if text == " three":
            raise RuntimeError("secret detail")
        return json_text(text)

    from gateway.chat_answer import ChatAnswer

    good = ChatAnswer.render
    if way == "long":
        monkeypatch.setattr(ChatAnswer, "render", broken)
    else:
        monkeypatch.setattr("gateway.token_path.json_text", broken_text)
    asked = {"messages": USER, "stream": True, "logprobs": way == "long"}
    events = await served.events(CHAT, asked)
    assert json.loads(events[-2])["error"] == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": 500,
    }
    assert events[-1] == "[DONE]" and len(served.mesh.gone) == 1
    monkeypatch.undo()
    assert (await served.events(CHAT, asked))[-1] == "[DONE]"
