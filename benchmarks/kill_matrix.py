"""What clients notice when processes of the mesh die, freeze, lose their links or are restarted one after the other.

Real processes on the shipped model in deterministic mode: two gateways, a scheduler with its standby, two worker groups
and a grammar service with its standby, under streams of six kinds. Every answer is compared with that of an undisturbed
run: nothing may be lost, doubled or different, and no client may see an error, except those of a killed gateway.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks._kill_load import KINDS, Asked, Load, Run, catalogue
from benchmarks._kill_mesh import KillMesh, MeshShape
from benchmarks._kill_parts import Hurt, Part, Tormentor, Verdict, in_flight, judge, quantile
from benchmarks._relay import Mode, Relay
from meshkit.cli.preflight import free_port

TITLE = "clients under SIGKILL, SIGSTOP, broken links and rolling restarts of every service"

SERVICES: Final = ("gateway", "scheduler", "worker", "grammar")
PARTS: Final = ("kills", "freezes", "links", "rolling")
FREEZES_S: Final = (3.0, 10.0)
CUT_S: Final = 3.0
LEAST: Final = 16
CALM_S: Final = 8.0
QUICK_STREAMS: Final = 8
QUICK_TOKENS: Final = 20

Metrics = dict[str, float | int | str]
Steps = list[Callable[[], Awaitable[Hurt]]]


def kills(tormentor: Tormentor, services: Sequence[str], count: int, rng: random.Random) -> Steps:
    """`count` kills, the services in rounds of random order."""
    order: list[str] = []
    while len(order) < count:
        order += rng.sample(services, len(services))
    return [partial(tormentor.kill, service) for service in order[:count]]


def freezes(tormentor: Tormentor, services: Sequence[str]) -> Steps:
    return [partial(tormentor.freeze, service, seconds) for seconds in FREEZES_S for service in services]


def cuts(tormentor: Tormentor, relays: Mapping[str, Relay]) -> Steps:
    modes = [mode for mode in Mode if mode is not Mode.PASS]
    return [partial(tormentor.cut, name, relay, mode, CUT_S) for mode in modes for name, relay in relays.items()]


def quick(tormentor: Tormentor) -> Steps:
    """A kill or two of every service and a restart of those that start fast, on the smallest mesh."""
    deaths = ("scheduler", "gateway", "grammar", "worker", "scheduler")
    leaves = ("scheduler", "gateway-0")
    return [*(partial(tormentor.kill, it) for it in deaths), *(partial(tormentor.restart, it) for it in leaves)]


def restarts(tormentor: Tormentor) -> Steps:
    """Every process once, gateways first."""
    names = sorted(tormentor.mesh.supervisor.pids(), key=lambda name: (not name.startswith("gateway"), name))
    return [partial(tormentor.restart, name) for name in names]


def progress(text: str) -> None:
    """A run takes long: say where it is."""
    print(text, file=sys.stderr, flush=True)


async def run_part(
    name: str, asked: Sequence[Asked], options: argparse.Namespace, reference: dict[str, Run]
) -> tuple[Part, KillMesh]:
    """One part on a mesh of its own. Fills `reference` where it is empty."""
    rng = random.Random(f"{options.seed}/{name}")
    relays: dict[str, Relay] = {}
    shape = MeshShape(workers=options.workers)
    if name == "quick":
        shape = MeshShape(workers=1, gateways=1, compilers=1)
    if name == "links":
        port = free_port("127.0.0.1")
        relays = {"gateway": Relay(port), "worker": Relay(port)}
        dial = {f"{service}-0": f"127.0.0.1:{await relay.start()}" for service, relay in relays.items()}
        shape = MeshShape(workers=options.workers, scheduler_port=port, dial=dial)
    streams = {"rolling": 2 * LEAST, "quick": QUICK_STREAMS}.get(name, options.streams)
    least = min(LEAST, streams - 2)
    with tempfile.TemporaryDirectory() as folder:
        async with KillMesh(Path(folder), shape) as mesh:
            ports = [mesh.ports[f"gateway-{n}"] for n in range(shape.gateways)]
            async with Load(ports, asked, rng) as load:
                if not reference:
                    progress("asking for the reference")
                    reference |= await load.each(asked, LEAST)
                tormentor = Tormentor(mesh, load, rng, least=least, say=progress)
                steps = {
                    "kills": lambda: kills(tormentor, options.services, options.kills, rng),
                    "freezes": lambda: freezes(tormentor, options.services),
                    "links": lambda: cuts(tormentor, relays),
                    "rolling": lambda: restarts(tormentor),
                    "quick": lambda: quick(tormentor),
                }[name]()
                limit_s = options.minutes * 60
                calm_s = 0.0 if name == "quick" else CALM_S
                part = await tormentor.part(name, streams, steps, calm_s=calm_s, limit_s=limit_s)
        for relay in relays.values():
            await relay.stop()
    return part, mesh


def run(args: list[str]) -> Metrics:
    """Measure, print a table for each part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kill_matrix")
    parser.add_argument("--kills", type=int, default=40, help="SIGKILLs, spread evenly over the services")
    parser.add_argument("--services", default=",".join(SERVICES), help="comma separated")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma separated")
    parser.add_argument("--streams", type=int, default=20, help=f"requests in flight, at least {LEAST}")
    parser.add_argument("--tokens", type=int, default=64, help="of an ordinary answer")
    parser.add_argument("--workers", type=int, default=2, help="worker groups")
    parser.add_argument("--minutes", type=float, default=60.0, help="no new fault in a part after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a handful of everything on a small mesh, for CI")
    options = parser.parse_args(args)
    if options.quick:
        options.parts, options.tokens = "quick", QUICK_TOKENS
    options.services, options.parts = options.services.split(","), options.parts.split(",")
    for name, given, there in (("services", options.services, SERVICES), ("parts", options.parts, (*PARTS, "quick"))):
        if wrong := set(given) - set(there):
            parser.error(f"--{name}: {', '.join(wrong)} is not one of {', '.join(there)}")
    if options.streams < LEAST:
        parser.error(f"--streams: at least {LEAST}")
    asked, reference = catalogue(1 if options.quick else 2, options.tokens), dict[str, Run]()
    console = Console(width=None if sys.stdout.isatty() else 150)
    metrics: Metrics = {}
    total, faults, tracebacks = Verdict(), Counter[str](), 0
    for name in options.parts:
        part, mesh = asyncio.run(run_part(name, asked, options, reference))
        verdict = judge(part, reference)
        show(console, part, verdict)
        metrics |= figures(part)
        total.requests += verdict.requests
        total.tokens += verdict.tokens
        total.clients_of_killed_gateways += verdict.clients_of_killed_gateways
        total.errors += verdict.errors
        total.refused += verdict.refused
        total.difference.add(verdict.difference)
        faults.update(mesh.faults)
        tracebacks += mesh.tracebacks
    if faults:
        console.print("[red]what cannot happen:", dict(faults))
    return metrics | closing(total, faults, tracebacks)


def closing(total: Verdict, faults: Mapping[str, int], tracebacks: int) -> Metrics:
    """The totals of all parts."""
    return {
        "requests": total.requests,
        "tokens": total.tokens,
        "tokens_lost": total.difference.lost,
        "tokens_doubled": total.difference.doubled,
        "ids_different": total.difference.other,
        "logprobs_different": total.difference.logprobs,
        "texts_different": total.difference.text,
        "client_errors": len(total.errors),
        "refused_with_retry_after": len(total.refused),
        "clients_of_killed_gateways": total.clients_of_killed_gateways,
        "cannot_happen": sum(faults.values()),
        "tracebacks": tracebacks,
        "load_average": os.getloadavg()[0],
    }


def figures(part: Part) -> Metrics:
    """Figures of one part, named after it."""
    found: Metrics = {
        f"{part.name}_faults": len(part.hurts),
        f"{part.name}_in_flight_median": in_flight(part.hurts),
        f"{part.name}_in_flight_least": min((len(hurt.runs) for hurt in part.hurts), default=0),
        f"{part.name}_invalid": int(not any(hurt.runs for hurt in part.hurts)),
        f"{part.name}_pause_p99_s_undisturbed": round(quantile(part.calm, 0.99), 3),
    }
    for what in dict.fromkeys(hurt.what for hurt in part.hurts):
        name = what.replace(" ", "_").replace("-", "_")
        hurts = [hurt for hurt in part.hurts if hurt.what == what]
        pauses = part.pauses(what)
        if what in SERVICES:
            found[f"kills_{name}"] = len(hurts)
            phases = Counter(phase for hurt in hurts for phase in hurt.phases)
            found[f"kills_{name}_least_phase"] = min(phases[kind] for kind in KINDS)
            for share, label in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
                found[f"resume_{label}_s_{name}"] = round(quantile(pauses, share), 3)
        else:
            found[f"pause_max_s_{name}"] = round(max(pauses, default=-1.0), 3)
        if part.name == "freezes":
            found[f"detected_s_{name}"] = round(max(hurt.detected_s for hurt in hurts), 3)
        if any(hurt.took_s >= 0 for hurt in hurts):
            found[f"left_after_s_{name}"] = round(max(hurt.took_s for hurt in hurts), 2)
    return found


def show(console: Console, part: Part, verdict: Verdict) -> None:
    """One row per kind of fault, and what went wrong in words."""
    phases = KINDS if part.name in ("kills", "quick") else ()
    table = Table("fault", "times", "in flight", *phases, "pause p50 s", "p99", "max", "seen / left after s")
    table.title = f"{part.name}: phases are the number of faults that met at least one request in it"
    for what in dict.fromkeys(hurt.what for hurt in part.hurts):
        hurts = [hurt for hurt in part.hurts if hurt.what == what]
        pauses = part.pauses(what)
        met = Counter(phase for hurt in hurts for phase in hurt.phases)
        seen = max(max(hurt.detected_s, hurt.took_s) for hurt in hurts)
        table.add_row(
            what,
            str(len(hurts)),
            f"{in_flight(hurts):.0f}",
            *(str(met[kind]) for kind in phases),
            *(f"{quantile(pauses, share):.2f}" for share in (0.5, 0.99, 1.0)),
            f"{seen:.2f}" if seen >= 0 else "",
        )
    console.print(table)
    gone = verdict.difference
    console.print(
        f"{verdict.requests} requests, {verdict.tokens} tokens: {gone.lost} lost, {gone.doubled} doubled, "
        f"{gone.other} different, {gone.logprobs} log-probabilities and {gone.text} texts differ, "
        f"{len(verdict.errors)} errors, {len(verdict.refused)} refused with Retry-After, "
        f"{verdict.clients_of_killed_gateways} clients of a killed gateway"
    )
    for line in [*verdict.errors[:8], *verdict.refused[:3], *verdict.different[:8]]:
        console.print(f"[red]  {line}", markup=True, highlight=False)
