"""Processor time of the gateway per streamed token: one process, two on one port, and a FastAPI echo of as many tokens.

256 chat streams against a simulated worker at constant step times; detokenising, parsing, journal and SSE included.
Only the gateway's processes are charged; client, scheduler and worker run beside them. Medians over the seconds in the
middle of a run. Options: `--streams`, `--seconds`, `--step-ms`.
"""

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from meshkit.models import DEFAULT_MODEL
from meshkit.testing import ServiceProcess

TITLE = "gateway: CPU per streamed token, one process and two, beside a FastAPI echo"
SETTLE_S = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over the seconds of a run."""

    us_per_token: float
    tokens_per_s: float
    busy: float  # share of one core
    mib: float  # resident, of all processes together


def cost_of(pids: list[int], url: str, streams: int, seconds: int, step_ms: float) -> Cost:
    """Load the server and watch its processes."""
    tokens = int((seconds + SETTLE_S + 4) * 1000 / step_ms)
    client = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._sse_load", url, str(streams), str(tokens)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    looks = []
    processes = [psutil.Process(pid) for pid in pids]
    for line in client.stdout:
        spent = sum(times.user + times.system for times in (it.cpu_times() for it in processes))
        looks.append((time.monotonic(), spent, json.loads(line)["tokens"]))
        if len(looks) > seconds + SETTLE_S:
            break
    rss = sum(process.memory_info().rss for process in processes) / (1 << 20)
    client.terminate()
    client.wait()
    if len(looks) <= SETTLE_S + 2:
        raise SystemExit("the streams ended before anything could be measured")
    pairs = list(zip(looks[SETTLE_S:], looks[SETTLE_S + 1 :], strict=False))
    per_token = [(b[1] - a[1]) * 1e6 / max(1, b[2] - a[2]) for a, b in pairs]
    rates = [(b[2] - a[2]) / (b[0] - a[0]) for a, b in pairs]
    busy = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs]
    return Cost(statistics.median(per_token), statistics.median(rates), statistics.median(busy), rss)


@contextmanager
def gateway(processes: int, streams: int, step_ms: float) -> Iterator[tuple[str, list[int]]]:
    """A mesh with a simulated worker: its address, and the pids of the gateways."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scheduler, log = f"unix:{folder}/s.sock", folder / "gateway.log"
        model = ("--model", str(DEFAULT_MODEL))

        def start(module: str, *args: str, log: Path) -> ServiceProcess:
            return stack.enter_context(ServiceProcess(module, *args, log=log))

        start("scheduler_svc", "--listen", scheduler, log=folder / "scheduler.log")
        worker = ("--backend", "sim", "--sim-step-ms", str(step_ms), "--slots", str(streams), "--listen")
        start(
            "worker_svc", *worker, f"unix:{folder}/w.sock", "--scheduler", scheduler, *model, log=folder / "worker.log"
        )
        many = ("--processes", str(processes), "--listen-http", "127.0.0.1:0", "--log-level", "info")
        parent = start("gateway", *many, "--scheduler", scheduler, *model, log=log)
        url = _wait_ready(log)
        pids = (
            [parent.process.pid] if processes == 1 else [it.pid for it in psutil.Process(parent.process.pid).children()]
        )
        yield url, pids


def _wait_ready(log: Path) -> str:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        if found is not None and _answers(found[0]):
            return found[0]
        time.sleep(0.2)
    raise SystemExit(f"the mesh was not ready in 90 s:\n{log.read_text()[-2000:]}")


def _answers(url: str) -> bool:
    import urllib.request

    try:
        for _ in range(6):  # of several processes, each should be ready
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                pass
    except OSError:
        return False
    return True


@contextmanager
def echo(step_ms: float) -> Iterator[tuple[str, list[int]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "benchmarks._sse_echo", str(port), str(step_ms)])
    try:
        time.sleep(3.0)
        yield f"http://127.0.0.1:{port}", [server.pid]
    finally:
        server.kill()
        server.wait()


def run(args: list[str]) -> dict[str, float | int | str]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gateway", description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--step-ms", type=float, default=50.0, help="of the simulated worker: one token per stream")
    options = parser.parse_args(args)
    costs: dict[str, Cost] = {}
    for processes in (1, 2):
        with gateway(processes, options.streams, options.step_ms) as (url, pids):
            costs[f"gateway, {processes} process{'es' if processes > 1 else ''}"] = cost_of(
                pids, url, options.streams, options.seconds, options.step_ms
            )
    if find_spec("fastapi") is not None and find_spec("uvicorn") is not None:
        with echo(options.step_ms) as (url, pids):
            costs["FastAPI + uvicorn echo"] = cost_of(pids, url, options.streams, options.seconds, options.step_ms)
    table = Table(title=f"{options.streams} chat streams, steps of {options.step_ms:g} ms")
    for name in ("server", "us CPU per token", "tokens/s", "of one core", "MiB"):
        table.add_column(name, justify="left" if name == "server" else "right")
    for name, cost in costs.items():
        table.add_row(
            name, f"{cost.us_per_token:.1f}", f"{cost.tokens_per_s:.0f}", f"{cost.busy:.0%}", f"{cost.mib:.0f}"
        )
    Console().print(table)
    one, two, *rest = costs.values()
    metrics: dict[str, float | int | str] = {
        "gateway_us_per_token": round(one.us_per_token, 2),
        "two_processes_ratio": round(two.us_per_token / one.us_per_token, 3),
        "tokens_per_s": round(one.tokens_per_s),
    }
    if rest:
        metrics["fastapi_echo_us_per_token"] = round(rest[0].us_per_token, 2)
        metrics["fastapi_echo_ratio"] = round(rest[0].us_per_token / one.us_per_token, 3)
    return metrics
