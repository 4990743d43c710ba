"""Processor time of the gateway per streamed token: one process, two on one port, beside a bare send and FastAPI.

256 chat streams against a simulated worker at constant step times; detokenising, parsing, journal and SSE included.
Only the gateway's processes are charged, all their threads, user and kernel; client, scheduler and worker run beside
them, as does the client's side of loopback TCP, which the kernel charges to the sender. Two processes are measured
sharing the streams of one, and with as many each (what a second process is for). `bare send` is a server that sends
ready bytes to the same client at the same pace: what a token costs here before a line of ours has run. Medians over
the seconds in the middle of the runs, which alternate. Options: `--streams`, `--seconds`, `--step-ms`, `--rounds`.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from meshkit.models import DEFAULT_MODEL
from meshkit.testing import ServiceProcess

TITLE = "gateway: CPU per streamed token and where it goes, one process and two, beside a bare send and FastAPI"
SETTLE_S = 3


@dataclass(frozen=True, slots=True)
class Spent:
    """Of some processes, so far."""

    ns: int  # on a processor, by the scheduler's clock
    user_s: float  # of which in user mode, by ticks
    kernel_s: float


@dataclass(frozen=True, slots=True)
class Second:
    """One second of a run, or the medians of many."""

    us_per_token: float
    tokens_per_s: float
    kernel: float  # share of the processor time
    busy: float  # share of one core
    mib: float  # resident, of all processes together


def spent_by(processes: Sequence[psutil.Process]) -> Spent:
    ns, user_s, kernel_s = 0, 0.0, 0.0
    for process in processes:
        times = process.cpu_times()
        user_s, kernel_s = user_s + times.user, kernel_s + times.system
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(OSError):  # a thread that has just ended
                ns += int((task / "schedstat").read_text().split()[0])
    return Spent(ns, user_s, kernel_s)


def seconds_of(pids: Sequence[int], url: str, streams: int, seconds: int, step_ms: float) -> list[Second]:
    """Load the server and watch its processes."""
    tokens = int((seconds + SETTLE_S + 4) * 1000 / step_ms)
    client = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._sse_load", url, str(streams), str(tokens)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    looks: list[tuple[float, Spent, int]] = []
    processes = [psutil.Process(pid) for pid in pids]
    for line in client.stdout:
        looks.append((time.monotonic(), spent_by(processes), json.loads(line)["tokens"]))
        if len(looks) > seconds + SETTLE_S:
            break
    mib = sum(process.memory_info().rss for process in processes) / (1 << 20)
    client.terminate()
    client.wait()
    if len(looks) <= SETTLE_S + 2:
        raise SystemExit("the streams ended before anything could be measured")
    found = []
    for (at_a, a, tokens_a), (at_b, b, tokens_b) in zip(looks[SETTLE_S:], looks[SETTLE_S + 1 :], strict=False):
        user_s, kernel_s = b.user_s - a.user_s, b.kernel_s - a.kernel_s
        new, passed_s = max(1, tokens_b - tokens_a), at_b - at_a
        kernel = kernel_s / max(1e-9, user_s + kernel_s)
        found.append(Second((b.ns - a.ns) / 1e3 / new, new / passed_s, kernel, (b.ns - a.ns) / 1e9 / passed_s, mib))
    return found


def median_of(seconds: Sequence[Second]) -> Second:
    return Second(*[statistics.median(getattr(it, name) for it in seconds) for name in Second.__slots__])


@contextmanager
def gateway(
    processes: int, streams: int, step_ms: float, stages: Path | None = None
) -> Iterator[tuple[str, list[int]]]:
    """A mesh with a simulated worker: its address, and the pids of the gateways.

    `stages` is where a single gateway writes its stopwatches.
    """
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
        module = ("gateway",) if stages is None else ("benchmarks._sse_stages", str(stages))
        parent = start(*module, *many, "--scheduler", scheduler, *model, log=log)
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
def other(module: str, *args: str) -> Iterator[tuple[str, list[int]]]:
    """A server of this folder on a port of its own: its address and its pid."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", module, str(port), *args])
    try:
        end = time.monotonic() + 60
        while not any(it.status == psutil.CONN_LISTEN for it in psutil.Process(server.pid).net_connections()):
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{module} did not listen in time")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", [server.pid]
    finally:
        server.kill()
        server.wait()


def stage_table(file: Path, cost: Second, floor: Second) -> Table:
    """Where the time of a token goes, from the stopwatches of the seconds in the middle."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line for line in lines if line["steps"]]
    if len(lines) < 3:
        raise SystemExit("the stopwatches have seen too little")
    first, last = lines[min(SETTLE_S, len(lines) - 3)], lines[-2]
    tokens = cost.tokens_per_s * (last["at"] - first["at"])
    us = {name: (last[name] - first[name]) / 1e3 / tokens for name in ("decode", "journal", "step", "write")}
    rest = cost.us_per_token - us["decode"] - us["step"] - us["write"]
    steps = last["steps"] - first["steps"]
    table = Table(title=f"where they go: {tokens / max(1, steps):.0f} tokens per write-out, {steps} of them")
    table.add_column("stage")
    table.add_column("us per token", justify="right")
    for name, value in (
        ("read a step's message", us["decode"]),
        ("journal", us["journal"]),
        ("detokenise, parse, cut the event", us["step"] - us["journal"]),
        (f"write to the sockets (a bare send is {floor.us_per_token:.1f})", us["write"]),
        ("event loop, gRPC's threads, waking up", rest),
        ("together", cost.us_per_token),
    ):
        table.add_row(name, f"{value:.1f}")
    return table


ONE, TWO, FLOOR, ECHO = "gateway, 1 process", "gateway, 2 processes", "bare send", "FastAPI + uvicorn echo"
TWICE = "gateway, 2 processes, twice the streams"


def run(args: list[str]) -> dict[str, float | int | str]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gateway", description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=int, default=8, help="measured of each run, after the first three")
    parser.add_argument("--step-ms", type=float, default=50.0, help="of the simulated worker: one token per stream")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each server, by turns")
    options = parser.parse_args(args)
    streams, step_ms = options.streams, options.step_ms
    servers: dict[str, Callable[[], AbstractContextManager[tuple[str, list[int]]]]] = {
        ONE: lambda: gateway(1, streams, step_ms),
        TWO: lambda: gateway(2, streams, step_ms),
        TWICE: lambda: gateway(2, 2 * streams, step_ms),
        FLOOR: lambda: other("benchmarks._sse_floor", str(step_ms), str(streams)),
    }
    if find_spec("fastapi") is not None and find_spec("uvicorn") is not None:
        servers[ECHO] = lambda: other("benchmarks._sse_echo", str(step_ms))
    found: dict[str, list[Second]] = {name: [] for name in servers}
    for _ in range(options.rounds):
        for name, start in servers.items():
            with start() as (url, pids):
                many = 2 * streams if name == TWICE else streams
                found[name] += seconds_of(pids, url, many, options.seconds, step_ms)
    costs = {name: median_of(seconds) for name, seconds in found.items()}
    with tempfile.TemporaryDirectory() as folder:
        stages = Path(folder) / "stages"
        with gateway(1, streams, step_ms, stages) as (url, pids):
            timed = median_of(seconds_of(pids, url, streams, options.seconds, step_ms))
        where = stage_table(stages, timed, costs[FLOOR])
    load = os.getloadavg()[0]
    rate = streams / step_ms * 1e3
    table = Table(
        title=f"{streams} chat streams, steps of {step_ms:g} ms: {rate:.0f} tokens/s asked for; load {load:.1f}"
    )
    for column in ("server", "us CPU per token", "in the kernel", "tokens/s", "of one core", "MiB"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for name, cost in costs.items():
        numbers = (f"{cost.us_per_token:.1f}", f"{cost.kernel:.0%}", f"{cost.tokens_per_s:.0f}", f"{cost.busy:.0%}")
        table.add_row(name, *numbers, f"{cost.mib:.0f}")
    Console().print(table)
    Console().print(where)
    one, two, twice, floor = costs[ONE], costs[TWO], costs[TWICE], costs[FLOOR]
    metrics: dict[str, float | int | str] = {
        "gateway_us_per_token": round(one.us_per_token, 2),
        "two_processes_ratio": round(two.us_per_token / one.us_per_token, 3),
        "two_processes_twice_the_load_ratio": round(twice.us_per_token / one.us_per_token, 3),
        "tokens_per_s": round(one.tokens_per_s),
        "streams": streams,
        "step_ms": step_ms,
        "bare_send_us_per_token": round(floor.us_per_token, 2),
        "over_bare_send_us": round(one.us_per_token - floor.us_per_token, 2),
        "load_average": round(load, 1),
    }
    if ECHO in costs:
        metrics["fastapi_echo_us_per_token"] = round(costs[ECHO].us_per_token, 2)
        metrics["fastapi_echo_ratio"] = round(costs[ECHO].us_per_token / one.us_per_token, 3)
    return metrics
