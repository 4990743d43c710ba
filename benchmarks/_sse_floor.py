"""The least a token can cost: one bare `send` of a ready event per stream and step, and nothing else.

`python -m benchmarks._sse_floor PORT STEP_MS STREAMS`: takes STREAMS connections, then sends each the same bytes at
every step, until one leaves. Charged per token is the kernel's way through loopback TCP, up to the reader's socket.
"""

import contextlib
import itertools
import select
import socket
import sys
import time

EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1790000000,'
    b'"model":"v4-nano","system_fingerprint":"fp_0123456789ab","choices":[{"index":0,"delta":{"content":" lamp",'
    b'"reasoning_content":null},"logprobs":null,"finish_reason":null}]}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def accepted(port: int, streams: int) -> list[socket.socket]:
    """The clients' sockets, their requests read and answered with headers."""
    found = []
    with socket.create_server(("127.0.0.1", port), backlog=streams) as server:
        for _ in range(streams):
            client, _ = server.accept()
            client.recv(1 << 16)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.send(HEAD)
            client.setblocking(False)
            found.append(client)
    return found


def main(port: int, step_s: float, streams: int) -> None:
    clients = accepted(port, streams)
    chunk = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
    began_s = time.monotonic()
    for number in itertools.count(1):
        select.select((), (), (), max(0.0, began_s + number * step_s - time.monotonic()))
        for client in clients:
            client.send(chunk)


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):
        main(int(sys.argv[1]), float(sys.argv[2]) / 1e3, int(sys.argv[3]))
