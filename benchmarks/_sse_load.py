"""Streams that only count: opened by hand over plain sockets, so that the client costs little beside the server.

`python -m benchmarks._sse_load URL STREAMS TOKENS`: opens them all, prints one JSON line per second with the tokens
seen so far, ends when all streams have ended.
"""

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

BODY = {
    "model": "v4-nano",
    "messages": [{"role": "user", "content": "Tell me a story about a fox and a lamp."}],
    "stream": True,
    "ignore_eos": True,
    "temperature": 1.0,
    "chat_template_kwargs": {"thinking": False},
}
MARK = b'"finish_reason":null'


async def one(host: str, port: int, tokens: int, seed: int, counts: list[int]) -> None:
    body = json.dumps(BODY | {"max_tokens": tokens, "seed": seed}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    first = True
    while data := await reader.read(1 << 16):
        if first and b" 200 " not in data[:32]:
            raise SystemExit(data[:500].decode(errors="replace"))
        first = False
        counts[0] += data.count(MARK)
    writer.close()


async def main(url: str, streams: int, tokens: int) -> None:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    counts = [0]
    running = [asyncio.create_task(one(parts.hostname, parts.port, tokens, n, counts)) for n in range(streams)]
    while not all(task.done() for task in running):
        await asyncio.sleep(1.0)
        print(json.dumps({"at": time.monotonic(), "tokens": counts[0]}), flush=True)
    await asyncio.gather(*running)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
