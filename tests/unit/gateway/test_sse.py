"""Events by the rules of the standard: whatever they hold and however the socket cuts them, a reader gets the same."""

import asyncio
import json
import re

from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http_server import GatewayRunner
from gateway.sse import BUFFER, DONE, KEEP_ALIVE, EventStream, StallGuard, event, named_event

TEXT = st.text() | st.text('\r\n\0\ufeff\u2028\u2029\x85: data event"\\', max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def read(raw: bytes) -> list[tuple[str, str]]:
    """(name, data) of each event, as the HTML standard says streams are read."""
    found, name, data = [], "", []
    for line in re.split("\r\n|\n|\r", raw.decode("utf-8-sig")):
        if not line:
            if data:
                found.append((name, "\n".join(data)))
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        else:
            assert not field, f"an unknown field {field!r}"
    return found


@given(st.lists(st.tuples(st.sampled_from(["", "message_start", "ping"]), JSON), max_size=6), st.booleans())
def test_what_is_written_is_read(values, pause):
    raw = b"".join(named_event(name, value) if name else event(value) for name, value in values)
    found = read(KEEP_ALIVE + raw if pause else raw)
    assert [(name, json.loads(data)) for name, data in found] == values
    assert read(raw + DONE)[-1] == ("", "[DONE]")


async def stream(sizes: list[int], reads: list[int], version: str) -> tuple[bytes, bytes]:
    """What was written, and the body that a client read that takes a few bytes at a time."""
    blocks = [event({"n": number, "text": "x" * size}) for number, size in enumerate(sizes)]
    guard = StallGuard(5.0, 100)
    streams = []

    async def answer(request: web.Request) -> web.StreamResponse:
        sse = EventStream(request, guard, {}, lambda: 0)
        streams.append(sse)
        try:
            await sse.start(blocks[0])
            for block in blocks[1:]:
                await sse.write(block)
            await sse.end()
        finally:
            sse.close()
        return sse.response

    app = web.Application()
    app.router.add_get("/", answer)
    runner = GatewayRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1], limit=1024)
    try:
        writer.write(f"GET / HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        raw = b""
        turn = 0
        while part := await reader.read(reads[turn % len(reads)] if turn < 200 else 1 << 20):
            raw += part
            turn += 1
    finally:
        writer.close()
        await runner.cleanup()
    assert streams[0].blocked_since is None and not guard.cut
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/{version} 200".encode())
    chunked = b"transfer-encoding: chunked" in head.lower()
    assert chunked is (version == "1.1")
    return b"".join(blocks), unchunked(body) if chunked else body


def unchunked(body: bytes) -> bytes:
    whole = b""
    while True:
        size, _, rest = body.partition(b"\r\n")
        count = int(size, 16)
        assert rest[count : count + 2] == b"\r\n", "a chunk ends where its size says"
        if not count:
            assert len(rest) == 2
            return whole
        whole, body = whole + rest[:count], rest[count + 2 :]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 300) | st.integers(BUFFER - 50, 3 * BUFFER), min_size=1, max_size=12),
    st.lists(st.integers(1, 5_000), min_size=1, max_size=4),
    st.sampled_from(["1.0", "1.1"]),
)
def test_any_sizes_and_any_reader_give_the_same_body(sizes, reads, version):
    written, body = asyncio.run(stream(sizes, reads, version))
    assert body == written
    assert [json.loads(data)["n"] for _, data in read(body)] == list(range(len(sizes)))
