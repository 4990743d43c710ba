"""New connections to a port that several gateway processes share, after one of them was killed or frozen.

Every connection is a new one, so that the kernel chooses a process anew. Before the fault they are counted too: what
they take then is what the machine takes.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks._kill_parts import quantile
from benchmarks._mesh import running_mesh

TITLE = "new connections to a shared port after one of its gateway processes was killed or frozen"

EVERY_S: Final = 0.02
LIMIT_S: Final = 60.0
FROZEN_S: Final = 5.0
BACK_S: Final = 60.0

Metrics = dict[str, float | int | str]


@dataclass(slots=True)
class Asked:
    """Milliseconds from dialling to the answer, and what went wrong."""

    took_ms: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def add(self, metrics: Metrics, name: str) -> None:
        metrics |= {
            f"connections_{name}": len(self.took_ms),
            f"lost_{name}": len(self.lost),
            f"p50_ms_{name}": round(statistics.median(self.took_ms), 2),
            f"p99_ms_{name}": round(quantile(self.took_ms, 0.99), 2),
            f"max_ms_{name}": round(max(self.took_ms), 2),
        }


def processes() -> list[psutil.Process]:
    """Those that accept, of the mesh that this process has started."""
    found = []
    for it in psutil.Process().children(recursive=True):
        try:
            if "--hub" in it.cmdline():
                found.append(it)
        except psutil.Error:  # it ends just now
            continue
    return found


async def one(url: str, asked: Asked) -> None:
    began = time.perf_counter()
    try:
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(f"{url}/health") as reply:
            await reply.read()
        asked.took_ms.append((time.perf_counter() - began) * 1e3)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        asked.lost.append(f"{type(error).__name__}: {error}")


async def dial(url: str, asked: Asked, seconds: float) -> None:
    """A new connection every so often, whatever becomes of those before it."""
    tasks, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        tasks.append(asyncio.create_task(one(url, asked)))
        await asyncio.sleep(EVERY_S)
    await asyncio.gather(*tasks)


async def back(count: int) -> None:
    """Until as many processes run as before, and what is new among them has had time to come up."""
    end = time.monotonic() + BACK_S
    while len(processes()) < count:
        if time.monotonic() > end:
            raise RuntimeError(f"{len(processes())} of {count} gateway processes after {BACK_S:.0f} s")
        await asyncio.sleep(0.1)
    await asyncio.sleep(3.0)


async def measure(url: str, count: int, options: argparse.Namespace) -> dict[str, Asked]:
    found = {name: Asked() for name in ("calm", "killed", "frozen")}
    rng = random.Random(options.seed)
    await back(count)
    await dial(url, found["calm"], options.seconds)
    for number in range(options.kills):
        os.kill(rng.choice(processes()).pid, signal.SIGKILL)
        await dial(url, found["killed"], options.seconds)
        await back(count)
        print(f"{count} processes, kill {number + 1}/{options.kills}", file=sys.stderr, flush=True)
    victim = rng.choice(processes())
    victim.suspend()
    try:
        await dial(url, found["frozen"], FROZEN_S)
    finally:
        victim.resume()
    return found


def run(args: list[str]) -> Metrics:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks siblings")
    parser.add_argument("--processes", default="2,4", help="that share the port, comma separated")
    parser.add_argument("--kills", type=int, default=8, help="for each number of processes")
    parser.add_argument("--seconds", type=float, default=6.0, help="of new connections after each kill")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(args)
    metrics: Metrics = {}
    table = Table("processes", "one of them", "connections", "lost", "p50 ms", "p99 ms", "max ms", title=TITLE)
    for count in map(int, options.processes.split(",")):
        if count < 2:
            parser.error("--processes: siblings are at least 2")
        with running_mesh("--backend", "sim", "--gateway-processes", str(count)) as url:
            found = asyncio.run(measure(url, count, options))
        for name, asked in found.items():
            asked.add(metrics, f"{name}_{count}")
            figures = [str(metrics[f"{it}_ms_{name}_{count}"]) for it in ("p50", "p99", "max")]
            table.add_row(str(count), name, str(len(asked.took_ms)), str(len(asked.lost)), *figures)
            for line in asked.lost[:3]:
                print(line, file=sys.stderr)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return metrics | {"load_average": os.getloadavg()[0]}
