"""From a command to a token: `v4mesh --help`, `v4mesh up` until ready, the first token, Ctrl-C until gone.

`--clone` also measures the newcomer's way: a fresh clone of this checkout, `make setup`, `v4mesh demo` to its first
token, with whatever the package cache holds.
"""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meshkit.cli.http_client import Endpoint
from meshkit.cli.turn import stream_turn
from meshkit.exit_codes import Exit

TITLE = "seconds from a command to a ready mesh and a first token"
ROOT = Path(__file__).parents[1]
V4MESH = (sys.executable, "-m", "meshkit.cli")
REPEATS = 5


def help_ms() -> float:
    """The fastest of REPEATS runs of `v4mesh --help`: what the machine can do when nothing disturbs it."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        subprocess.run([*V4MESH, "--help"], stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
        times.append((time.perf_counter() - began) * 1e3)
    return min(times)


def up_seconds() -> dict[str, float]:
    """Start, first token, stop: wall-clock seconds of each."""
    began = time.perf_counter()
    process = subprocess.Popen([*V4MESH, "up", "--port", "0", "--quiet"], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    try:
        url = ""
        while not url:
            line = process.stderr.readline()
            assert line, "v4mesh up ended before it was ready"
            print(line, end="")
            if found := re.search(r"^ready in .*? · (http://\S+) ", line):
                url = found[1]
        ready = time.perf_counter() - began
        body = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 16}
        turn = asyncio.run(stream_turn(Endpoint.parse(url), body))
        assert not turn.error, turn.error
        stopping = time.perf_counter()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == Exit.INTERRUPTED
        return {"up_to_ready_s": ready, "first_token_ms": turn.ttft_s * 1e3, "stop_s": time.perf_counter() - stopping}
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def clone_seconds() -> dict[str, float]:
    """A newcomer's way in a temporary folder: clone, set up, demo until its first token."""
    with tempfile.TemporaryDirectory(prefix="v4mesh-clone-") as folder:
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}  # noqa: TID251
        began = time.perf_counter()
        subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        subprocess.run(["make", "setup"], cwd=folder, check=True, env=clean, stdout=subprocess.DEVNULL)
        set_up = time.perf_counter() - began
        demo = subprocess.Popen(["make", "demo"], cwd=folder, env=clean, stdout=subprocess.PIPE)
        assert demo.stdout is not None
        assert demo.stdout.read(1), "the demo said nothing"
        first = time.perf_counter() - began
        demo.communicate()
        assert demo.returncode == 0
    return {"clone_to_setup_s": set_up, "clone_to_first_token_s": first}


def run(args: list[str]) -> dict[str, float | int | str]:
    """Metrics: help_ms, up_to_ready_s, first_token_ms, stop_s; with --clone also the newcomer's way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks startup", description=TITLE)
    parser.add_argument("--clone", action="store_true", help="also clone and set up from scratch")
    options = parser.parse_args(args)
    figures = {"help_ms": help_ms(), **up_seconds()}
    if options.clone:
        figures |= clone_seconds()
    for name, value in figures.items():
        print(f"{name:24} {value:8.2f}")
    return {name: round(value, 2) for name, value in figures.items()}
