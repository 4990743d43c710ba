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
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 120.0
_URL = re.compile(r"http://127\.0\.0\.1:\d+")


@contextlib.contextmanager
def running_mesh(*flags: str) -> Iterator[str]:
    """Start `v4mesh up --port 0 FLAGS` and yield its base URL once a worker serves; stop it cleanly afterwards."""
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


def stream_tokens(url: str, body: dict[str, Any]) -> list[float]:
    """Arrival times (monotonic seconds) of the events that carry text, of one streamed /v1/completions request."""
    times = []
    with urllib.request.urlopen(post(f"{url}/v1/completions", body | {"stream": True}), timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {") and b'"text"' in line:
                times.append(time.monotonic())
    return times
