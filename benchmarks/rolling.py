"""What clients notice when `v4mesh restart` replaces every process of a mesh under their streams.

`v4mesh up` on the shipped model in deterministic mode, with standbys of scheduler and grammar service; six kinds of
requests on one port. Every answer is compared with that of an undisturbed run. `kill_matrix --parts rolling` does the
same with SIGTERM to single processes of a larger mesh.
"""

import argparse
import asyncio
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks._kill_load import Load, Run, catalogue
from benchmarks._kill_parts import Part, Verdict, judge, pause, quantile
from meshkit.cli.preflight import free_port
from meshkit.standing import stands_by

TITLE = "clients under a rolling restart of every process by `v4mesh restart`"

READY_S: Final = 240.0
STREAMING: Final = 4  # requests past their first token when it begins
CALM_S: Final = 8.0
REFERENCE_AT_ONCE: Final = 12
CLI: Final = (sys.executable, "-m", "meshkit.cli")
SECTIONS: Final = """
[worker]
slots = {slots}
threads = 1
pages = 640
max_step_tokens = 256
"""

Metrics = dict[str, float | int | str]


async def start(folder: Path, options: argparse.Namespace, port: int) -> asyncio.subprocess.Process:
    """A mesh whose log lies in the folder, once it is ready."""
    (folder / "mesh.toml").write_text(SECTIONS.format(slots=options.streams + options.streams // 2))
    flags = ["--port", str(port), "--run-dir", str(folder), "--standby", "--deterministic"]
    flags += ["--gateway-processes", str(options.gateways)]
    with (folder / "mesh.log").open("w") as log:
        mesh = await asyncio.create_subprocess_exec(
            *(*CLI, "--config", str(folder / "mesh.toml"), "up", *flags), stdout=log, stderr=log
        )
    end = time.monotonic() + READY_S
    while not re.search("^ready in ", text := (folder / "mesh.log").read_text(), re.MULTILINE):
        if mesh.returncode is not None or time.monotonic() > end:
            raise RuntimeError(f"the mesh did not get ready:\n{text[-4000:]}")
        await asyncio.sleep(0.2)
    return mesh


async def warm(folder: Path) -> None:
    """Until standbys could take over, so that the first restart does not meet a mesh that is still starting."""
    end = time.monotonic() + READY_S
    while not all(stands_by(folder / f"{name}.sock") for name in ("scheduler", "grammar")):
        if time.monotonic() > end:
            raise RuntimeError(f"no standby got warm:\n{(folder / 'mesh.log').read_text()[-4000:]}")
        await asyncio.sleep(0.5)


async def restart(folder: Path, drain_s: float) -> tuple[float, list[str]]:
    """`v4mesh restart`: how long it took and what it said."""
    began = time.monotonic()
    asking = await asyncio.create_subprocess_exec(
        *(*CLI, "restart", "--run-dir", str(folder), "--drain-timeout", str(drain_s)),
        stderr=asyncio.subprocess.PIPE,
    )
    said = []
    assert asking.stderr is not None
    async for line in asking.stderr:
        said.append(line.decode().rstrip())
        print(said[-1], file=sys.stderr, flush=True)
    if await asking.wait():
        raise RuntimeError(f"v4mesh restart ended with {asking.returncode}: {said[-3:]}")
    return time.monotonic() - began, said


async def measure(options: argparse.Namespace) -> tuple[Metrics, Verdict, list[str]]:
    """Reference, load, restart, judgement."""
    asked = catalogue(options.per_kind, options.tokens)
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port("127.0.0.1")
        folder.chmod(0o700)
        mesh = await start(folder, options, port)
        try:
            async with Load([port], asked, random.Random(options.seed)) as load:
                print("asking for the reference", file=sys.stderr, flush=True)
                reference = await load.each(asked, REFERENCE_AT_ONCE)
                await warm(folder)
                metrics, runs = await under_load(load, folder, options)
                await all_left(folder)
            log = (folder / "mesh.log").read_text()
        finally:
            mesh.terminate()
            await mesh.wait()
    if "Traceback" in log:
        raise RuntimeError(f"a service failed:\n{log[-4000:]}")
    verdict = judge(Part("rolling", runs=runs), reference)
    left = dict(re.findall(r"^(\S+) +left after ([\d.]+) s", log, re.MULTILINE))
    for service, seconds in left.items():
        metrics[f"left_after_s_{service.replace('-', '_')}"] = float(seconds)
    unclean = re.findall(r"^\S+ +left after .*(?:killed|exited).*$", log, re.MULTILINE)
    return metrics | {"processes": len(left), "left_unclean": len(unclean)}, verdict, unclean


async def all_left(folder: Path) -> None:
    """Until former gateways have ended with their last streams."""
    end = time.monotonic() + READY_S
    while (log := (folder / "mesh.log").read_text()).count("finishes what it does") > log.count("left after"):
        if time.monotonic() > end:
            raise RuntimeError(f"a process does not leave:\n{log[-4000:]}")
        await asyncio.sleep(0.2)


async def under_load(load: Load, folder: Path, options: argparse.Namespace) -> tuple[Metrics, list[Run]]:
    """The restart while `streams` clients ask one thing after the other; and every request of that time."""
    load.start(options.streams)
    await asyncio.sleep(CALM_S)
    end = time.monotonic() + READY_S
    while len(load.open) < options.streams - 2 or sum(bool(run.marks) for run in load.open) < STREAMING:
        if time.monotonic() > end:
            raise RuntimeError(f"only {len(load.open)} of {options.streams} streams are open")
        await asyncio.sleep(0.05)
    began, in_flight = time.monotonic(), len(load.open)
    took, said = await restart(folder, options.drain_timeout)
    over = time.monotonic()
    await load.stop()
    told = [run for run in load.done if run.marks and run.marks[0] < over and run.marks[-1] > began]
    pauses = [length for run in told if (length := pause(run, max(began, run.marks[0]), over)) is not None]
    metrics: Metrics = {
        "streams": options.streams,
        "in_flight_at_start": in_flight,
        "restart_s": round(took, 1),
        "pause_s_p50": round(quantile(pauses, 0.5), 2),
        "pause_s_p99": round(quantile(pauses, 0.99), 2),
    }
    for line in said:
        if found := re.match(r"(\S+) +restarted in ([\d.]+) s", line):
            metrics[f"restart_s_{found[1].replace('-', '_')}"] = float(found[2])
    return metrics, load.done


def run(args: list[str]) -> Metrics:
    """Measure, print a table of processes and what went wrong in words."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks rolling")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of an ordinary answer")
    parser.add_argument("--per-kind", type=int, default=2, help="different requests of each kind")
    parser.add_argument("--gateways", type=int, default=1, help="processes on the port")
    parser.add_argument(
        "--drain-timeout", type=float, default=30.0, help="of `v4mesh restart`: the grace period in seconds"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(args)
    metrics, verdict, unclean = asyncio.run(measure(options))
    table = Table("process", "left after s", "restarted in s", title=f"{options.streams} streams")
    for name, left in metrics.items():
        if name.startswith("left_after_s_"):
            service = name.removeprefix("left_after_s_")
            table.add_row(service, str(left), str(metrics.get(f"restart_s_{service}", "")))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for line in [*unclean, *verdict.errors[:8], *verdict.refused[:4], *verdict.different[:8]]:
        console.print(f"  {line}", markup=False, highlight=False)
    return (
        metrics
        | verdict.metrics()
        | {
            "drain_timeout_s": options.drain_timeout,
            "load_average": os.getloadavg()[0],
        }
    )
