"""What clients notice when processes of the mesh die, freeze, lose their links or are restarted one after the other.

Real processes on the shipped model in deterministic mode: two gateways, a scheduler with its standby, two worker groups
and a grammar service with its standby, under streams of six kinds. Every answer is compared with that of an undisturbed
run: nothing may be lost, doubled or different, and no client may see an error, except those of a killed gateway.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks._kill_load import Asked, Load, Run, catalogue
from benchmarks._kill_mesh import KillMesh, MeshShape
from benchmarks._kill_outcome import Metrics, Outcome, figures, show
from benchmarks._kill_parts import Hurt, Part, Tormentor, judge
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
PIECE: Final = 20  # kills of one mesh; after them what was found is kept
MOST_BROKEN: Final = 3  # meshes that did not come back: something is wrong for good

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


def append(file: Path, more: Path) -> None:
    with file.open("a") as log:
        log.write(more.read_text())


async def run_part(
    name: str, asked: Sequence[Asked], options: argparse.Namespace, reference: dict[str, Run], outcome: Outcome
) -> None:
    """One part, or `PIECE` kills of it, on a mesh of its own. Fills `reference` where it is empty, and `outcome`."""
    done = len(outcome.of(name))
    rng = random.Random(f"{options.seed}/{name}/{done}")
    relays: dict[str, Relay] = {}
    standby = not options.no_standby
    sim = {"sim_step_ms": options.sim_step_ms}
    shape = MeshShape(workers=options.workers, standby=standby, grammar_standby=standby, **sim)
    if name == "quick":
        shape = MeshShape(workers=1, gateways=1, compilers=1, **sim)
    if name == "links":
        port = free_port("127.0.0.1")
        relays = {"gateway": Relay(port), "worker": Relay(port)}
        dial = {f"{service}-0": f"127.0.0.1:{await relay.start()}" for service, relay in relays.items()}
        shape = MeshShape(workers=options.workers, scheduler_port=port, dial=dial, **sim)
    streams = {"rolling": 2 * LEAST, "quick": QUICK_STREAMS}.get(name, options.streams)
    least = min(LEAST, streams - 2)
    part, began = Part(name), time.monotonic()

    def say(text: str) -> None:
        count = f"{done + len(part.hurts)}/{options.kills} " if name == "kills" else ""
        progress(f"{name} {count}{text}")

    with tempfile.TemporaryDirectory() as folder:
        async with KillMesh(Path(folder), shape) as mesh:
            ports = [mesh.ports[f"gateway-{n}"] for n in range(shape.gateways)]
            async with Load(ports, asked, rng) as load:
                if not reference:
                    progress("asking for the reference")
                    reference |= await load.each(asked, LEAST)
                tormentor = Tormentor(mesh, load, rng, least=least, say=say)
                steps = {
                    "kills": lambda: kills(tormentor, options.services, min(PIECE, options.kills - done), rng),
                    "freezes": lambda: freezes(tormentor, options.services),
                    "links": lambda: cuts(tormentor, relays),
                    "rolling": lambda: restarts(tormentor),
                    "quick": lambda: quick(tormentor),
                }[name]()
                limit_s = options.minutes * 60 - outcome.seconds.get(name, 0.0)
                calm_s = 0.0 if name == "quick" or done else CALM_S
                try:
                    await tormentor.part(name, streams, steps, calm_s=calm_s, limit_s=limit_s, part=part)
                except (RuntimeError, OSError) as error:  # what was hurt before counts all the same
                    progress(f"{name}: {error}")
                    outcome.broken.append(f"{name}: {str(error)[:300]}")
                    part.runs = load.done
        for relay in relays.values():
            await relay.stop()
        if options.log:
            append(Path(options.log), Path(folder) / "mesh.log")
    outcome.add(part, judge(part, reference))
    outcome.blame(mesh.faults, mesh.tracebacks)
    outcome.seconds[name] = outcome.seconds.get(name, 0.0) + time.monotonic() - began
    through = name != "kills" or len(outcome.of(name)) >= options.kills
    if through or outcome.seconds[name] >= options.minutes * 60:
        outcome.ended.append(name)


def run(args: list[str]) -> Metrics:
    """Measure, print a table for each part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kill_matrix")
    parser.add_argument("--kills", type=int, default=40, help="SIGKILLs, spread evenly over the services")
    parser.add_argument("--services", default=",".join(SERVICES), help="comma separated")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma separated")
    parser.add_argument("--streams", type=int, default=20, help=f"requests in flight, at least {LEAST}")
    parser.add_argument("--tokens", type=int, default=64, help="of an ordinary answer")
    parser.add_argument("--workers", type=int, default=2, help="worker groups")
    parser.add_argument("--no-standby", action="store_true", help="neither scheduler nor grammar service has one")
    parser.add_argument(
        "--sim-step-ms", type=float, default=0.0, help="simulated workers with such steps: what the mesh itself takes"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="no new fault in a part after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a handful of everything on a small mesh, for CI")
    parser.add_argument("--keep", metavar="FILE", help="what was found so far, after every few faults")
    parser.add_argument("--log", metavar="FILE", help="the processes' logs are added to it")
    parser.add_argument("--resume", action="store_true", help="go on from what --keep names")
    options = parser.parse_args(args)
    if options.quick:
        options.parts, options.tokens = "quick", QUICK_TOKENS
    options.services, options.parts = options.services.split(","), options.parts.split(",")
    for name, given, there in (("services", options.services, SERVICES), ("parts", options.parts, (*PARTS, "quick"))):
        if wrong := set(given) - set(there):
            parser.error(f"--{name}: {', '.join(wrong)} is not one of {', '.join(there)}")
    if options.streams < LEAST:
        parser.error(f"--streams: at least {LEAST}")
    if options.resume and not options.keep:
        parser.error("--resume: name the file with --keep")
    outcome = Outcome.load(Path(options.keep)) if options.resume and Path(options.keep).exists() else Outcome()
    asked, reference = catalogue(1 if options.quick else 2, options.tokens), dict[str, Run]()
    for name in options.parts:
        while name not in outcome.ended and len(outcome.broken) < MOST_BROKEN:
            try:
                asyncio.run(run_part(name, asked, options, reference, outcome))
            except (RuntimeError, OSError) as error:  # a mesh that did not even start
                progress(f"{name}: {error}")
                outcome.broken.append(f"{name}: {str(error)[:300]}")
            if options.keep:
                outcome.save(Path(options.keep))
    show(Console(width=None if sys.stdout.isatty() else 170), outcome)
    return figures(outcome, SERVICES)
