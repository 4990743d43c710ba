"""A small HTTP server in a thread that answers like a mesh, for the commands that talk to one."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class Script:
    """What the server says, and what it was asked."""

    events: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    error: str = "queue is full"
    delay_s: float = 0.0
    finish: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)  # of /explain
    wanted_key: str = ""  # empty: everybody may ask
    url: str = ""


def text_event(content: str = "", reasoning: str = "") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content, "reasoning_content": reasoning}}]}


def usage_event(prompt: int, completion: int) -> dict[str, Any]:
    details = {"cached_tokens": 192}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return {"choices": [], "usage": usage}


@pytest.fixture
def server() -> Iterator[Script]:
    script = Script(events=[text_event("Once "), text_event("upon"), usage_event(224, 2)])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def _json(self, status: int, body: object) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def _may_not(self) -> bool:
            wanted = f"Bearer {script.wanted_key}"
            if not script.wanted_key or self.headers.get("Authorization") == wanted:
                return False
            self._json(401, {"error": {"message": "Incorrect API key"}})
            return True

        def do_GET(self) -> None:
            if self._may_not():
                return
            if self.path == "/v1/models":
                self._json(200, {"data": [{"id": "fake"}]})
            else:
                self._json(200 if self.path == "/health" else 503, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self._may_not():
                return
            if self.path == "/tokenize":
                self._json(200, {"count": 2 * len(body["prompt"].split()), "tokens": []})
                return
            script.bodies.append(body)
            script.keys.append(self.headers.get("Authorization", ""))
            if script.status != 200:
                self._json(script.status, {"error": {"message": script.error}})
                return
            if self.path == "/explain":
                self._json(200, script.answer)
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._chunk(b": keep-alive\n\n")
            for event in script.events:
                time.sleep(script.delay_s)
                raw = f"data: {json.dumps(event)}\n\n".encode()
                self._chunk(raw[:7])  # an event may arrive in pieces
                self._chunk(raw[7:])
            if script.finish:
                self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

        def _chunk(self, data: bytes) -> None:
            with contextlib.suppress(ConnectionError):  # who asked may be gone
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    script.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    yield script
    httpd.shutdown()
    httpd.server_close()
    thread.join()
