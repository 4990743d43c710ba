"""A small HTTP/1.1 client on asyncio streams: requests to a mesh, JSON or server-sent events back.

For the readiness probes of `up`, for `bench` and `chat`: no dependency, no connection pool, no redirects, no proxy.
One connection per request; the body is JSON out, and read by Content-Length, by chunks, or to the end of the stream.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from meshkit.exit_codes import Exit, Problem, ProblemsError

LONGEST_HEAD_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a mesh listens, taken apart once. `prefix` has no trailing slash."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """From `http://host:port[/v1]`, with the scheme optional; a trailing /v1 is dropped."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as e:
            raise ProblemsError(Problem("USAGE", Exit.USAGE, f"--url {url}: {e}", "give http://HOST:PORT")) from e
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ProblemsError(
                Problem("USAGE", Exit.USAGE, f"--url {url} is no http address", "give http://HOST:PORT")
            )
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.prefix}"


class StatusError(ConnectionError):
    """Somebody answers, but not with 200. `message` is the server's own."""

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"GET {path} answered {status}: {message}")
        self.status, self.message = status, message


class Response:
    """An open response: status and headers are there, the body is read from `lines` or `text`."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._reader.readline()).split(b";")[0] or b"0", 16):
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)
            return
        left = int(self.headers.get("content-length", -1))
        while left and (data := await self._reader.read(65_536 if left < 0 else min(left, 65_536))):
            left -= len(data) if left > 0 else 0
            yield data

    async def text(self) -> str:
        """The whole body."""
        return b"".join([c async for c in self.chunks()]).decode("utf-8", "replace")

    async def events(self) -> AsyncIterator[str]:
        """The `data:` payload of each server-sent event, until the stream ends; comments are dropped."""
        held = b""
        async for chunk in self.chunks():
            *blocks, held = (held + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
            for block in blocks:
                data = [ln[5:].removeprefix(b" ") for ln in block.split(b"\n") if ln.startswith(b"data:")]
                if data:
                    yield b"\n".join(data).decode("utf-8", "replace")


@contextlib.asynccontextmanager
async def request(
    endpoint: Endpoint,
    method: str,
    path: str,
    *,
    body: Any = None,
    api_key: str = "",
    timeout_s: float = 10.0,
) -> AsyncIterator[Response]:
    """Open one request; `timeout_s` is for connecting and for the response's head. Raises OSError and its kin."""
    payload = b"" if body is None else json.dumps(body).encode()
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    head = [f"{method} {endpoint.prefix}{path} HTTP/1.1", f"Host: {host}:{endpoint.port}", "Connection: close"]
    if api_key:
        head.append(f"Authorization: Bearer {api_key}")
    if body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
    context = ssl.create_default_context() if endpoint.tls else None
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(
            endpoint.host, endpoint.port, ssl=context, limit=LONGEST_HEAD_LINE
        )
    try:
        async with asyncio.timeout(timeout_s):
            writer.write("\r\n".join([*head, "", ""]).encode() + payload)
            await writer.drain()
            status, headers = await _head(reader)
        yield Response(status, headers, reader)
    finally:
        writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    line = await reader.readline()
    if not line.startswith(b"HTTP/1."):
        raise ConnectionError(f"no HTTP answer: {line[:40]!r}")
    headers: dict[str, str] = {}
    while (row := await reader.readline()) not in (b"\r\n", b"\n", b""):
        name, _, value = row.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(line.split()[1]), headers


async def get_answer(endpoint: Endpoint, path: str, timeout_s: float = 1.0) -> tuple[int, str]:
    """Status and error text of a GET; (0, "no answer") when nobody is there."""
    try:
        async with request(endpoint, "GET", path, timeout_s=timeout_s) as response:
            return response.status, "" if response.status == 200 else error_text(await response.text())
    except (OSError, TimeoutError, EOFError, ValueError, IndexError):
        return 0, "no answer"


async def get_json(endpoint: Endpoint, path: str, *, api_key: str = "", timeout_s: float = 5.0) -> Any:
    """The JSON body of a GET; a status other than 200 raises StatusError."""
    async with request(endpoint, "GET", path, api_key=api_key, timeout_s=timeout_s) as response:
        text = await response.text()
        if response.status != 200:
            raise StatusError(path, response.status, error_text(text))
        return json.loads(text)


def error_text(body: str) -> str:
    """The message inside an OpenAI error object, or the body itself."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.strip()[:300] or "empty answer"
