"""What is no HTTP, or HTTP that aiohttp answers by itself: our JSON, our name, no traceback, and the server goes on."""

import asyncio
import json
import logging

import pytest

CASES = {
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "words": (b"hello there\r\n\r\n", 400),
    "version": (b"GET / HTTP/9.x\r\n\r\n", 400),
    "header": (b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400),
    "long line": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "two lengths": (b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
    "length": (b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
    "smuggling": (
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "chunk": (b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "gzip": (b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 400),
    "expect": (b"POST /generate HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\nContent-Length: 2\r\n\r\n{}", 417),
    "star": (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 404),
}


async def answer_to(url: str, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the first response on a new connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    async with asyncio.timeout(5):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *fields = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
        body = await reader.readexactly(int(headers["content-length"]))
    writer.close()
    return int(first.split()[1]), headers, body


@pytest.mark.parametrize("case", CASES)
async def test_bad_http(served, caplog, case):
    data, expected = CASES[case]
    caplog.set_level(logging.DEBUG)
    status, headers, body = await answer_to(served.url, data)
    assert status == expected
    assert headers["server"] == "v4mesh" and headers["content-type"].startswith("application/json")
    error = json.loads(body)["error"]
    assert error["message"] and set(error) == {"message", "type", "param", "code"}
    assert not [r for r in caplog.records if r.exc_info or r.levelno > logging.INFO], caplog.text
    assert len([r for r in caplog.records if r.name == "gateway.http"]) <= 1
    assert (await served.get("/health"))[0] == 200


@pytest.mark.parametrize("path", ["/health", "/nothing", "/v1/models"])
async def test_every_answer_carries_our_name(served, path):
    assert (await served.get(path))[2]["Server"] == "v4mesh"
