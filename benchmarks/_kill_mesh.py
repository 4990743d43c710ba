"""A whole mesh of real processes that a benchmark may hurt: start, find, kill, stop, thaw, and know when it is whole.

The processes are those of `v4mesh up`, watched by the same supervisor, but with two worker groups and two gateways, all
in deterministic mode. Workers can be simulated ones: their tokens follow from all ids before, and cost no arithmetic.
Speaks HTTP only: the supervisor forks, and a process that forks must not hold gRPC.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp

from meshkit.cli.mesh import REST_S, SELF, STANDBY
from meshkit.cli.preflight import free_port
from meshkit.models import DEFAULT_MODEL
from meshkit.supervisor import ServiceEvent, ServiceSpec, Supervisor

WHOLE_S: Final = 180.0
WARM: Final = {"grammar": "warm", "scheduler": "standing by"}  # what a standby logs once it could take over
CANNOT: Final = re.compile(r"this cannot happen: (\S+)")
BROKEN: Final = re.compile(r"Traceback|the core failed|this is a bug")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """How many of what. `dial`: where a process finds the scheduler, by its name, if not at the scheduler's address."""

    workers: int = 2
    gateways: int = 2
    standby: bool = True
    slots: int = 32
    pages: int = 640
    scheduler_port: int = 0  # the scheduler listens there on loopback, without a standby; 0: a unix socket
    dial: dict[str, str] = field(default_factory=dict)
    drain_s: float = 30.0
    compilers: int = 2
    grammar_standby: bool = True
    sim_step_ms: float = 0.0  # above 0: simulated workers with steps of that length, and no model's arithmetic


class KillMesh:
    """Use as `async with KillMesh(folder, shape) as mesh`; whole on entering."""

    def __init__(self, folder: Path, shape: MeshShape) -> None:
        self.folder, self.shape = folder, shape
        self.ports = {name: free_port("127.0.0.1") for name in self._metric_names()}
        self.faults: Counter[str] = Counter()  # what cannot happen, as the services' logs have it
        self.tracebacks = 0
        self.exits: list[ServiceEvent] = []
        self._said: dict[str, list[str]] = {}  # since its start, by process
        self._log = (folder / "mesh.log").open("w")
        self.supervisor = Supervisor(
            self._specs(), on_event=self._event, on_line=self._line, together=True, stop_s=10.0, steady_s=0.0
        )

    def _metric_names(self) -> list[str]:
        gateways = [f"gateway-{n}" for n in range(self.shape.gateways)]
        return ["scheduler", *(f"worker-{n}" for n in range(self.shape.workers)), *gateways]

    @property
    def scheduler(self) -> str:
        """Its address."""
        port = self.shape.scheduler_port
        return f"127.0.0.1:{port}" if port else f"unix:{self.folder}/scheduler.sock"

    def _lines(self) -> dict[str, tuple[str, ...]]:
        shape, ports = self.shape, {name: str(port) for name, port in self.ports.items()}
        model, masks = ("--model", str(DEFAULT_MODEL)), f"unix:{self.folder}/grammar.sock"
        groups = ",".join(f"worker-{n}" for n in range(shape.workers))
        steers = ("--standby",) if shape.standby and not shape.scheduler_port else ("--hand-over",)
        expects = ("--workers", groups, "--grammar", masks, "--metrics-port", ports["scheduler"])
        scheduler = ("scheduler", "--listen", self.scheduler, *expects, *steers)
        rings = ("--ring-dir", str(self.folder), "--ring-bytes", "64MiB", "--compilers", str(shape.compilers))
        grammar = ("grammar", "--listen", masks, *model, *rings, "--spares", "0")
        lines: dict[str, tuple[str, ...]] = {"scheduler": scheduler, "grammar": grammar}
        if "--standby" in steers:
            lines[f"scheduler{STANDBY}"] = scheduler
        if shape.grammar_standby:
            lines[f"grammar{STANDBY}"] = grammar
        for name in (f"worker-{n}" for n in range(shape.workers)):
            place = ("--scheduler", shape.dial.get(name, self.scheduler), "--group", name, "--grammar", masks)
            pools = ("--slots", str(shape.slots), "--pages", str(shape.pages))
            sizes = (*pools, "--threads", "1", "--max-step-tokens", "256")
            here = ("--listen", f"unix:{self.folder}/{name}.sock", "--metrics-port", ports[name])
            how: tuple[str, ...] = ("--deterministic",)
            if shape.sim_step_ms:
                how = ("--backend", "sim", "--sim-step-ms", str(shape.sim_step_ms))
            lines[name] = ("worker", *place, *model, *sizes, *here, *how)
        for name in (f"gateway-{n}" for n in range(shape.gateways)):
            here = ("--listen-http", f"127.0.0.1:{ports[name]}", "--drain-seconds", str(shape.drain_s))
            asks = ("--scheduler", shape.dial.get(name, self.scheduler))
            lines[name] = ("gateway", *asks, *here, *model, "--deterministic")
        return lines

    def _specs(self) -> list[ServiceSpec]:
        lines = self._lines()
        return [
            ServiceSpec(
                name=name,
                argv=(*SELF, *line),
                drain_s=5.0,
                rest_s=REST_S if f"{name.removesuffix(STANDBY)}{STANDBY}" in lines else 0.0,
            )
            for name, line in lines.items()
        ]

    # ---- life -------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> "KillMesh":
        self._running = asyncio.create_task(self.supervisor.run())
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))
        try:
            await self.whole()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for pid in self.supervisor.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.supervisor.stop()
        await self._running
        await self.http.close()
        self._log.close()

    def _event(self, event: ServiceEvent) -> None:
        if event.kind == "started":
            self._said[event.service] = []
        elif event.kind in ("exited", "gave_up"):
            self.exits.append(event)
        self._log.write(f"{time.monotonic():.3f} == {event.service} {event.kind} {event.status}\n")

    def _line(self, service: str, text: str) -> None:
        self._said[service].append(text)
        self._log.write(f"{time.monotonic():.3f} {service}: {text}\n")
        self._log.flush()
        if found := CANNOT.search(text):
            self.faults[f"{service.split('-')[0]}:{found[1]}"] += 1
        self.tracebacks += bool(BROKEN.search(text))

    # ---- who is there -----------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        """A process by its name; 0 while it is not there. `scheduler` and `grammar` name whoever serves."""
        if name in ("scheduler", "grammar") and not (name == "scheduler" and self.shape.scheduler_port):
            return _listener(f"{self.folder}/{name}.sock")
        return self.supervisor.pids().get(name, 0)

    def living(self) -> set[int]:
        """All pids."""
        return set(self.supervisor.pids().values())

    def said(self, name: str, word: str) -> bool:
        """Whether a process has logged this since its start."""
        return any(word in line for line in self._said.get(name, ()))

    async def fetch(self, name: str, path: str) -> str:
        """A page of a process's HTTP port; empty while it does not answer."""
        try:
            async with self.http.get(f"http://127.0.0.1:{self.ports[name]}{path}") as reply:
                return await reply.text() if reply.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ""

    async def count(self, name: str, family: str, event: str) -> float:
        """A counter of a process, summed over its other labels; 0 while it does not answer."""
        page = await self.fetch(name, "/metrics")
        found = re.findall(rf'^{family}{{[^}}]*event="{event}"[^}}]*}} (\S+)$', page, re.MULTILINE)
        return sum(map(float, found))

    async def is_whole(self, standbys: Sequence[str]) -> bool:
        """Every service is served, every worker is attached, the standbys of these services are warm."""
        shape = self.shape
        if not all(self.said(f"worker-{n}", "worker ready") for n in range(shape.workers)):
            return False
        pids, names = self.supervisor.pids(), self._lines()
        for name in ("scheduler", "grammar"):
            if not (serving := self.pid(name)):
                return False
            owner = next((n for n, pid in pids.items() if pid == serving), "")
            if name == "grammar" and not self.said(owner, "grammar ready"):
                return False
            spares = [n for n in (name, f"{name}{STANDBY}") if n in names and pids.get(n) != serving]
            if name in standbys and not all(n in pids and self.said(n, WARM[name]) for n in spares):
                return False
        for number in range(shape.gateways):
            state = await self.fetch(f"gateway-{number}", "/server_info")
            told = json.loads(state) if state else {}
            if not told.get("ready") or told["scheduler"]["workers"] != shape.workers:
                return False
        return True

    async def whole(self, standbys: Sequence[str] = ("scheduler", "grammar"), limit_s: float = WHOLE_S) -> None:
        """Wait for that. RuntimeError with the end of the log if it does not come."""
        end = time.monotonic() + limit_s
        while not await self.is_whole(standbys):
            if time.monotonic() > end or self._running.done():
                self._log.flush()
                raise RuntimeError(f"the mesh is not whole:\n{(self.folder / 'mesh.log').read_text()[-6000:]}")
            await asyncio.sleep(0.1)

    def signal(self, pid: int, number: int) -> float:
        """Send it; the time it was sent."""
        at = time.monotonic()
        os.kill(pid, number)
        return at


def _listener(path: str) -> int:
    """The process that listens at a unix socket, 0 for none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return 0
        return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
