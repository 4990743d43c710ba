"""A real mesh of child processes for benchmarks: `with running_mesh(...) as url`."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 120.0
_URL = re.compile(r"http://127\.0\.0\.1:\d+")


@contextlib.contextmanager
def running_mesh(*flags: str) -> Iterator[str]:
    """Start `v4mesh up --port 0 FLAGS` and yield its base URL once a worker serves; stop it cleanly afterwards.

    Without a --grammar among the flags there is no grammar service: most who measure here send nothing constrained.
    """
    if "--grammar" not in flags:
        flags = ("--grammar", "off", *flags)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "mesh.log"
        with log.open("w") as out:
            child = subprocess.Popen(
                [sys.executable, "-m", "meshkit.cli", "up", "--port", "0", *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            yield _wait_ready(child, log)
        finally:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        # A counter of what only a bug of ours explains is logged in these words, whichever service it is.
        if impossible := re.findall(r".*this cannot happen.*", log.read_text()):
            raise RuntimeError(f"a mesh counted what cannot happen: {impossible[:5]}")


def _wait_ready(child: "subprocess.Popen[bytes]", log: Path) -> str:
    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end:
        if child.poll() is not None:
            raise RuntimeError(f"v4mesh up ended with {child.returncode}:\n{log.read_text()[-4000:]}")
        found = _URL.search(log.read_text())
        if found:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{found[0]}/ready", timeout=2) as answer:
                if answer.status == 200:
                    return found[0]
        time.sleep(0.1)
    raise RuntimeError(f"the mesh was not ready in {READY_TIMEOUT_S:.0f} s:\n{log.read_text()[-4000:]}")


def post(url: str, body: dict[str, Any]) -> urllib.request.Request:
    """A JSON POST."""
    data = json.dumps(body).encode()
    return urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})


@dataclass(frozen=True, slots=True)
class Arrival:
    """One event that carried tokens: when it came (monotonic seconds) and how many it held."""

    at_s: float
    tokens: int


def stream_arrivals(url: str, body: dict[str, Any], limit_s: float = 60.0) -> list[Arrival]:
    """The token-carrying events of one streamed /v1/completions request, at most `limit_s` of them.

    Asks for token ids, so that tokens are counted and not guessed from events: one event may hold several tokens, and
    the one that ends the stream holds none. Past `limit_s` the connection is closed, which cancels the request.
    """
    end = time.monotonic() + limit_s
    arrivals = []
    asked = body | {"stream": True, "return_token_ids": True}
    with urllib.request.urlopen(post(f"{url}/v1/completions", asked), timeout=limit_s) as answer:
        for line in answer:
            now = time.monotonic()
            if now > end:
                break
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"the mesh ended the stream: {event['error']}")
            if count := sum(len(choice.get("token_ids") or ()) for choice in event["choices"]):
                arrivals.append(Arrival(now, count))
    return arrivals


def decode_rate(arrivals: list[Arrival]) -> float:
    """Tokens per second from the arrival of the first token to that of the last; prompt work is before it."""
    if len(arrivals) < 2:
        raise RuntimeError(f"{len(arrivals)} events with tokens: too few for a rate")
    return sum(a.tokens for a in arrivals[1:]) / (arrivals[-1].at_s - arrivals[0].at_s)
