"""A whole mesh under mixed load for a long time, one fault a minute: what it holds afterwards and how its memory went.

The mesh of `kill_matrix` under chat, completions, constrained output, tools, several choices and log-probabilities,
and clients that vanish in the middle. Until the baseline every service is hurt; after it those processes whose memory
is compared are left alive. At the end nothing may be owned: slots, pages, tails, journal, masks; and no client of a
living gateway may have seen an error or another token than in the undisturbed run.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks._kill_load import Asked, Load, catalogue
from benchmarks._kill_mesh import KillMesh, MeshShape
from benchmarks._kill_parts import Hurt, Part, Tormentor, Verdict, judge

TITLE = "hours of mixed load with one fault a minute: pools at the end, memory of each service"

BASELINE_MIN: Final = 20.0
PAGES: Final = 160  # of each group, so few that their index has its full size long before the baseline
FREEZE_S: Final = 3.0
SAMPLE_S: Final = 5.0
WINDOW_S: Final = 60.0  # over which memory is a median
IDLE_S: Final = 30.0
MIB: Final = 1 << 20
OWNED: Final = ("requests", "running", "waiting", "waiting_bytes", "grammar_queue") + tuple(
    f"{pool}_{state}" for pool in ("slots", "pages", "tails") for state in ("owned", "cached", "quarantined")
)
LOOK: Final = """
import asyncio, json, sys
from meshpb.v1 import scheduler_pb2 as pb, scheduler_pb2_grpc
from meshkit.channel import open_channel
async def main():
    async with open_channel(sys.argv[1]) as channel:
        reply = await scheduler_pb2_grpc.SchedulerStub(channel).GetLoad(pb.GetLoadRequest(), timeout=10)
        print(json.dumps({name: int(value) for name, value in reply.counters.items()}))
asyncio.run(main())
"""

Metrics = dict[str, float | int | str]
Hit = Callable[[], Awaitable[Hurt]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one time."""

    at: float
    name: str
    pid: int
    rss: float  # MiB
    fds: int
    threads: int


class Watch:
    """Samples every process of a mesh until cancelled."""

    def __init__(self, mesh: KillMesh) -> None:
        self._mesh = mesh
        self.samples: list[Sample] = []

    def look(self) -> None:
        now = time.monotonic()
        for name, pid in self._mesh.supervisor.pids().items():
            with suppress(psutil.Error):
                it = psutil.Process(pid)
                with it.oneshot():
                    self.samples.append(
                        Sample(now, name, pid, it.memory_info().rss / MIB, it.num_fds(), it.num_threads())
                    )

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(SAMPLE_S)

    def median(self, name: str, pid: int, begin: float, end: float) -> float:
        """MiB of a process in a span; -1 where it was not there."""
        found = [it.rss for it in self.samples if (it.name, it.pid) == (name, pid) and begin <= it.at <= end]
        return statistics.median(found) if found else -1.0

    def fds(self, name: str, pid: int, begin: float, end: float) -> int:
        """The fewest descriptors of a process in a span: more of them are open while more is asked."""
        return min(it.fds for it in self.samples if (it.name, it.pid) == (name, pid) and begin <= it.at <= end)


class Aimed(Tormentor):
    """Hurts the processes it is pointed at."""

    aim: dict[str, str]

    def victim(self, service: str) -> str:
        return self.aim.get(service, service)


class Vanishing:
    """Clients that leave in the middle of an answer, also before its first token."""

    def __init__(self, ports: Sequence[int], asked: Sequence[Asked], rng: random.Random) -> None:
        self._ports, self._asked, self._rng = ports, asked, rng
        self.left = 0

    async def run(self, avoid: set[int]) -> None:
        """One after the other, until cancelled."""
        async with aiohttp.ClientSession() as http:
            for number in itertools.count():
                await asyncio.sleep(self._rng.uniform(0.5, 3.0))
                gateways = [n for n in range(len(self._ports)) if n not in avoid]
                if not gateways:
                    continue
                it = self._asked[number % len(self._asked)]
                url = f"http://127.0.0.1:{self._ports[self._rng.choice(gateways)]}{it.path}"
                with suppress(TimeoutError, aiohttp.ClientError, OSError):
                    async with asyncio.timeout(self._rng.uniform(0.05, 4.0)), http.post(url, json=it.body) as reply:
                        await reply.read()
                self.left += 1


def faults(tormentor: Aimed, shape: MeshShape, settled: Callable[[], bool]) -> Iterator[Hit]:
    """Without end. Once `settled`, nothing happens to what was there before but stops and cuts that it survives."""

    def aimed(number: int) -> Aimed:
        """Once settled at the last of each kind alone: the others' memory is compared."""
        worker, gateway = (-1, -1) if settled() else (number, number)
        tormentor.aim = {
            "worker": f"worker-{worker % shape.workers}",
            "gateway": f"gateway-{gateway % shape.gateways}",
        }
        return tormentor

    for number in itertools.count():
        yield partial(aimed(number).kill, "worker")
        if shape.gateways > 1:
            yield partial(aimed(number).kill, "gateway")
        yield partial(aimed(number).freeze, "worker", FREEZE_S)
        if not settled():
            yield partial(aimed(number).kill, "grammar")
            yield partial(aimed(number).kill, "scheduler")
            yield partial(aimed(number).freeze, "scheduler", FREEZE_S)
        yield partial(aimed(number).freeze, "gateway", FREEZE_S)
        yield partial(aimed(number).restart, tormentor.aim["worker"])


async def torment(tormentor: Aimed, hits: Iterator[Hit], part: Part, options: argparse.Namespace, end: float) -> None:
    """A fault every so often until it is over."""
    began = time.monotonic()
    for number in itertools.count(1):
        at = began + number * options.every_s
        if at > end - options.every_s / 2:
            return
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        hurt = await next(hits)()
        part.hurts.append(hurt)
        whole = hurt.over - hurt.at
        tormentor.say(f"{hurt.at - began:6.0f} s  {hurt.what}: {len(hurt.runs)} in flight, whole {whole:.1f} s")


async def holds(mesh: KillMesh) -> dict[str, int]:
    """What the mesh owns now that nobody asks anything, after its prefix cache was emptied; zeros are left out."""
    shape, found = mesh.shape, dict[str, int]()
    end = time.monotonic() + IDLE_S
    while True:
        async with mesh.http.post(f"http://127.0.0.1:{mesh.ports['gateway-0']}/flush_cache") as reply:
            await reply.read()
        looking = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LOOK, mesh.scheduler, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await looking.communicate()
        load = json.loads(said or b"{}")
        found = {name: load.get(name, -1) for name in OWNED if load.get(name, -1)}
        if load.get("slots_free") != shape.workers * shape.slots:
            found["slots_free"] = load.get("slots_free", -1)
        for name in mesh.ports:
            family = "v4mesh_journal" if name.startswith("gateway") else "v4mesh_mask_slots"
            page = await mesh.fetch(name, "/metrics")
            for what, value in re.findall(rf"^({family}\w*)(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE):
                if float(value):
                    found[f"{name}:{what}"] = int(float(value))
        rings = len(list(mesh.folder.glob("*ring*")))
        if rings > shape.workers:
            found["rings"] = rings
        if not found or time.monotonic() > end:
            return found
        await asyncio.sleep(0.5)


async def measure(options: argparse.Namespace) -> tuple[Metrics, Verdict, list[tuple[str, float, float]]]:
    """Reference, load and faults, then a look at what is left."""
    rng = random.Random(options.seed)
    shape = MeshShape(sim_step_ms=options.sim_step_ms, pages=PAGES)
    if options.small:
        shape = replace(shape, workers=1, standby=False, grammar_standby=False, compilers=1)
    asked = catalogue(options.per_kind, options.tokens)
    part = Part("soak")
    with tempfile.TemporaryDirectory() as name:
        async with KillMesh(Path(name), shape) as mesh:
            ports = [mesh.ports[f"gateway-{n}"] for n in range(shape.gateways)]
            async with Load(ports, asked, rng) as load:
                say("asking for the reference")
                reference = await load.each(asked, options.streams)
                watch, vanishing = Watch(mesh), Vanishing(ports, asked, rng)
                await mesh.whole()
                watch.look()
                began, first = time.monotonic(), len(load.done)
                end = began + options.minutes * 60
                half = min(BASELINE_MIN, options.minutes / 2)
                baseline = began + 60 * (half if options.baseline_min is None else options.baseline_min)
                tormentor = Aimed(mesh, load, rng, least=max(2, options.streams // 2), say=say)
                side = [asyncio.create_task(watch.run()), asyncio.create_task(vanishing.run(load.avoid))]
                load.start(options.streams)
                hits = faults(tormentor, shape, lambda: time.monotonic() > baseline - options.every_s)
                await torment(tormentor, hits, part, options, end)
                await asyncio.sleep(max(0.0, end - time.monotonic()))
                ended = time.monotonic()
                for task in side:
                    task.cancel()
                await asyncio.gather(*side, return_exceptions=True)
                await load.stop()
                part.runs = load.done[first:]
            left = await holds(mesh)
            watch.look()
            alive = mesh.supervisor.pids()
            memory, fds = [], 0
            for name_, pid in alive.items():
                spans = (baseline, baseline + WINDOW_S), (ended - WINDOW_S, ended)
                before, after = (watch.median(name_, pid, *span) for span in spans)
                if before > 0 < after:
                    memory.append((name_, before, after))
                    first_fds, last_fds = (watch.fds(name_, pid, *span) for span in spans)
                    fds = max(fds, last_fds - first_fds)
                    if last_fds > first_fds:
                        say(f"{name_}: at least {first_fds} descriptors at the baseline, {last_fds} at the end")
            metrics: Metrics = {
                "minutes": round((ended - began) / 60, 1),
                "baseline_minute": round((baseline - began) / 60, 1),
                "faults": len(part.hurts),
                "kinds_of_faults": len({hurt.what for hurt in part.hurts}),
                "clients_that_vanished": vanishing.left,
                "still_owned": sum(abs(value) for value in left.values()),
                "fds_more": fds,
                "cannot_happen": sum(mesh.faults.values()),
                "tracebacks": mesh.tracebacks,
            }
            if left or mesh.faults:
                say(f"still owned: {left}; what cannot happen: {dict(mesh.faults)}")
    return metrics, judge(part, reference), memory


def say(text: str) -> None:
    """A run takes long: say where it is."""
    print(text, file=sys.stderr, flush=True)


def run(args: list[str]) -> Metrics:
    """Measure, print a table of processes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--baseline-min",
        type=float,
        help=f"memory is compared with this minute's; until then everything is hurt (default: half, at most "
        f"{BASELINE_MIN:.0f})",
    )
    parser.add_argument("--every-s", type=float, default=60.0, help="a fault")
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48, help="of an ordinary answer")
    parser.add_argument("--per-kind", type=int, default=2, help="different requests of each kind")
    parser.add_argument("--small", action="store_true", help="one worker, no standbys")
    parser.add_argument(
        "--sim-step-ms", type=float, default=0.0, help="simulated workers with such steps: what the mesh itself owns"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(args)
    metrics, verdict, memory = asyncio.run(measure(options))
    table = Table("process", "MiB at baseline", "at the end", "more", title=f"{metrics['minutes']} minutes")
    for name, before, after in memory:
        table.add_row(name, f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}")
        metrics[f"rss_mib_more_{name.replace('-', '_')}"] = round(after - before, 2)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for line in [*verdict.errors[:8], *verdict.refused[:4], *verdict.different[:8]]:
        console.print(f"  {line}", markup=False, highlight=False)
    return (
        metrics
        | verdict.metrics()
        | {
            "rss_mib_most_more": round(max((after - before for _, before, after in memory), default=0.0), 2),
            "clients_of_killed_gateways": verdict.clients_of_killed_gateways,
            "load_average": os.getloadavg()[0],
        }
    )
