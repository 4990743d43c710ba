"""Goodput when twice as much is asked as can be served, what refusals look like, and memory meanwhile.

A simulated worker with fixed slots and step time, so that its capacity is known and no model's; requests arrive at
random times whatever happens to those before them. Rates are raised until goodput grows no more: that is the peak. Then
twice that rate for a minute. A request is good if its first token came within the promised time and it ran to its end.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from meshkit.cli.preflight import free_port
from meshkit.models import DEFAULT_MODEL
from meshkit.testing import ServiceProcess

TITLE = "goodput, refusals and memory at twice the load that can be served (simulated worker)"

SHARES: Final = (0.5, 0.7, 0.85, 1.0, 1.15)  # of the capacity on paper, in search of the peak
LIMIT_S: Final = 60.0
REFUSED: Final = (429, 503)
MIB: Final = 1 << 20

Metrics = dict[str, float | int | str]


@dataclass(slots=True)
class Seen:
    """What became of the requests of one rate."""

    rate: float
    seconds: float
    asked: int = 0
    good_ends: list[float] = field(default_factory=list)  # when good requests ended
    first_s: list[float] = field(default_factory=list)  # time to first token of all that were served
    late: int = 0  # served, but the first token came too late
    refused: Counter[int] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)  # how long a refusal took
    no_retry_after: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    rss: dict[str, list[float]] = field(default_factory=dict)  # MiB, by service, twice a second
    cpu_s: dict[str, float] = field(default_factory=dict)

    def goodput(self, began: float) -> float:
        """Good ends per second while requests arrived."""
        return sum(began <= at <= began + self.seconds for at in self.good_ends) / self.seconds


class Client:
    """Sends requests at a rate, counts what comes back."""

    def __init__(self, url: str, tokens: int, promise_s: float, rng: random.Random) -> None:
        self._url, self._tokens, self._promise_s, self._rng = f"{url}/v1/completions", tokens, promise_s, rng

    async def load(self, rate: float, seconds: float, services: dict[str, psutil.Process]) -> tuple[Seen, float]:
        """`rate` requests a second for so long. Returns what was seen and the goodput."""
        seen = Seen(rate, seconds)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=LIMIT_S)
        ) as self._http:
            before = {name: sum(process.cpu_times()[:2]) for name, process in services.items()}
            watching = asyncio.create_task(_watch(seen, services))
            began = time.monotonic()
            at, tasks = began, []
            while (at := at + self._rng.expovariate(rate)) < began + seconds:
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                tasks.append(asyncio.create_task(self._ask(seen)))
            await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
            seen.cpu_s = {name: sum(it.cpu_times()[:2]) - before[name] for name, it in services.items()}
            await asyncio.gather(*tasks)
            watching.cancel()
        return seen, seen.goodput(began)

    async def _ask(self, seen: Seen) -> None:
        seen.asked += 1
        prompt = f"Story {self._rng.getrandbits(40)}: once upon a time there was a fox"
        body = {"model": "v4-nano", "prompt": prompt, "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        began = time.monotonic()
        try:
            async with self._http.post(self._url, json=body) as reply:
                if reply.status != 200:
                    await self._refused(seen, reply, time.monotonic() - began)
                    return
                await self._served(seen, reply, began)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            seen.errors[type(error).__name__] += 1

    async def _refused(self, seen: Seen, reply: aiohttp.ClientResponse, took_s: float) -> None:
        text = await reply.text()
        if reply.status not in REFUSED:
            seen.errors[f"{reply.status} {text[:80]}"] += 1
            return
        seen.refused[reply.status] += 1
        seen.refused_s.append(took_s)
        told = reply.headers.get("Retry-After", "")
        seen.no_retry_after += not (told.isdigit() and int(told) >= 1)

    async def _served(self, seen: Seen, reply: aiohttp.ClientResponse, began: float) -> None:
        first, finish = math.inf, ""
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                seen.errors[f"in the stream: {event['error'].get('code')}"] += 1
                return
            if event["choices"]:
                first = min(first, time.monotonic() - began)
                finish = event["choices"][0]["finish_reason"] or finish
        if finish != "length":
            seen.errors[f"ended with {finish!r}"] += 1
            return
        seen.first_s.append(first)
        if first <= self._promise_s:
            seen.good_ends.append(time.monotonic())
        else:
            seen.late += 1


async def _watch(seen: Seen, services: dict[str, psutil.Process]) -> None:
    while True:
        for name, process in services.items():
            seen.rss.setdefault(name, []).append(process.memory_info().rss / MIB)
        await asyncio.sleep(0.5)


@contextmanager
def simulated(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, psutil.Process]]]:
    """Gateway, scheduler and a worker that computes nothing: the address and the two that must stay small."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scheduler, port = f"unix:{folder}/s.sock", free_port("127.0.0.1")
        model = ("--model", str(DEFAULT_MODEL))

        def start(module: str, *args: str) -> psutil.Process:
            child = stack.enter_context(ServiceProcess(module, *args, log=folder / f"{module}.log"))
            stack.callback(child.process.terminate)
            return psutil.Process(child.process.pid)

        quiet = ("--log-level", "warning")
        promise = ("--first-token-s", str(options.promise_s))
        services = {"scheduler": start("scheduler_svc", "--listen", scheduler, *promise, *quiet)}
        speed = ("--slots", str(options.slots), "--sim-step-ms", str(options.step_ms))
        where = ("--listen", f"unix:{folder}/w.sock", "--scheduler", scheduler)
        start("worker_svc", *where, "--backend", "sim", *speed, *model, *quiet)
        here = ("--listen-http", f"127.0.0.1:{port}", "--scheduler", scheduler)
        services["gateway"] = start("gateway", *here, *model, *quiet)
        yield f"http://127.0.0.1:{port}", services


async def ready(url: str) -> None:
    """Wait for the mesh."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(120):
        while True:
            try:
                async with session.get(f"{url}/ready") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


async def measure(
    url: str, services: dict[str, psutil.Process], options: argparse.Namespace
) -> tuple[list[tuple[Seen, float]], tuple[Seen, float]]:
    """The rates on the way to the peak with their goodput, then twice the peak."""
    await ready(url)
    client = Client(url, options.tokens, options.promise_s, random.Random(options.seed))
    capacity = options.slots / (options.tokens * options.step_ms / 1000)
    await client.load(capacity / 2, options.warm_s, services)  # the scheduler learns what steps and answers are like
    found = []
    for share in SHARES:
        found.append(await client.load(share * capacity, options.search_s, services))
        print(f"{found[-1][0].rate:.1f} requests/s: goodput {found[-1][1]:.1f}", file=sys.stderr, flush=True)
    peak = max(goodput for _, goodput in found)
    return found, await client.load(2 * peak, options.seconds, services)


def run(args: list[str]) -> Metrics:
    """Measure, print a table of rates."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks overload")
    parser.add_argument("--slots", type=int, default=32, help="of the worker")
    parser.add_argument("--step-ms", type=float, default=40.0, help="of the worker")
    parser.add_argument("--tokens", type=int, default=24, help="of every answer")
    parser.add_argument("--promise-s", type=float, default=3.0, help="first token within so long, else refused")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--search-s", type=float, default=15.0, help="of each rate in search of the peak")
    parser.add_argument("--warm-s", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(args)
    with simulated(options) as (url, services):
        found, (over, goodput) = asyncio.run(measure(url, services, options))
        after = {name: process.memory_info().rss / MIB for name, process in services.items()}
    show([*found, (over, goodput)])
    peak = max(good for _, good in found)
    before = {name: max(it.rss[name][-1] for it, _ in found) for name in services}
    refused = sum(over.refused.values())
    metrics: Metrics = {
        "capacity_on_paper_rps": round(options.slots / (options.tokens * options.step_ms / 1000), 2),
        "peak_goodput_rps": round(peak, 2),
        "overload_rps": round(over.asked / over.seconds, 2),
        "overload_goodput_rps": round(goodput, 2),
        "goodput_of_peak": round(goodput / peak, 3),
        "overload_seconds": over.seconds,
        "refused": refused,
        "refused_without_retry_after": over.no_retry_after,
        "refused_ms_p50": round(statistics.median(over.refused_s) * 1e3, 1) if over.refused_s else -1,
        "refused_ms_p99": round(quantile(over.refused_s, 0.99) * 1e3, 1),
        "served_late": over.late,
        "ttft_s_p50": round(quantile(over.first_s, 0.5), 3),
        "ttft_s_p99": round(quantile(over.first_s, 0.99), 3),
        "client_errors": sum(over.errors.values()),
        "load_average": os.getloadavg()[0],
    }
    for name in services:
        metrics[f"rss_mib_before_{name}"] = round(before[name], 1)
        metrics[f"rss_mib_peak_{name}"] = round(max(over.rss[name]), 1)
        metrics[f"rss_mib_after_{name}"] = round(after[name], 1)
        metrics[f"cpu_share_{name}"] = round(over.cpu_s[name] / over.seconds, 3)
    if over.errors:
        print("errors:", dict(over.errors), file=sys.stderr)
    return metrics


def quantile(values: Sequence[float], share: float) -> float:
    """-1 of none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else -1.0


def show(rows: Sequence[tuple[Seen, float]]) -> None:
    """One row per rate."""
    table = Table("asked /s", "good /s", "late", "refused", "errors", "TTFT p50 s", "p99 s", "MiB gateway", "scheduler")
    for seen, goodput in rows:
        table.add_row(
            f"{seen.rate:.1f}",
            f"{goodput:.1f}",
            str(seen.late),
            str(sum(seen.refused.values())),
            str(sum(seen.errors.values())),
            *(f"{quantile(seen.first_s, share):.2f}" for share in (0.5, 0.99)),
            *(f"{max(seen.rss[name]):.0f}" for name in ("gateway", "scheduler")),
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table)
