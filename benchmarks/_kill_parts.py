"""What is done to the mesh under load: kills, freezes, broken links, a rolling restart; and what it cost.

Every part runs a steady number of streams, hurts one process or link at a time, waits until each stream that was under
way has gone on, and compares every answer with its reference afterwards.
"""

import asyncio
import itertools
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks._kill_load import Difference, Load, Run, compare
from benchmarks._kill_mesh import KillMesh
from benchmarks._relay import Mode, Relay

AT_ONCE_S: Final = 1.0  # tokens were on their way when something was hurt: a stream has gone on that has some later
DYING_S: Final = 0.5  # a killed process's socket takes connections for a moment
STREAMING: Final = 4  # requests past their first token at every fault
ON_S: Final = 120.0  # a stream that has not gone on by then hangs
EVENTS: Final = "v4mesh_core_events_total"
MASKS: Final = "v4mesh_mask_events_total"


@dataclass(slots=True)
class Hurt:
    """One fault and the streams it met."""

    what: str  # the service, or the kind of fault
    name: str  # the process
    at: float
    runs: list[Run]
    phases: Counter[str]
    over: float = 0.0  # when all streams had gone on and the mesh was whole
    detected_s: float = -1.0
    took_s: float = -1.0  # until a process that was told to leave had left
    deadly_for: int = -1  # the gateway whose clients cannot survive this


@dataclass(slots=True)
class Part:
    """All faults of one part and every request that ran meanwhile."""

    name: str
    hurts: list[Hurt] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)  # longest pause of each stream before the first fault

    def pauses(self, what: str) -> list[float]:
        """Longest pause in seconds of each stream that was past its first token when it was hurt so."""
        return [
            length
            for hurt in self.hurts
            if hurt.what == what
            for run in hurt.runs
            if run.gateway != hurt.deadly_for and run.marks and run.marks[0] < hurt.at
            if (length := pause(run, hurt.at, hurt.over)) is not None
        ]

    def own_gateway(self, run: Run) -> bool:
        """Whether the gateway that carried it was killed under it."""
        return any(h.deadly_for == run.gateway and run.started - DYING_S <= h.at <= run.ended for h in self.hurts)


@dataclass(slots=True)
class Verdict:
    """What a part showed."""

    requests: int = 0
    tokens: int = 0
    clients_of_killed_gateways: int = 0
    refused: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    difference: Difference = field(default_factory=Difference)
    different: list[str] = field(default_factory=list)

    def metrics(self) -> dict[str, int]:
        """Its counts under the names that results are kept by."""
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "tokens_lost": self.difference.lost,
            "tokens_doubled": self.difference.doubled,
            "ids_different": self.difference.other,
            "logprobs_different": self.difference.logprobs,
            "texts_different": self.difference.text,
            "client_errors": len(self.errors),
            "refused_with_retry_after": len(self.refused),
        }


def judge(part: Part, reference: Mapping[str, Run]) -> Verdict:
    """Compare every answer of a part."""
    verdict = Verdict(len(part.runs))
    for run in part.runs:
        verdict.tokens += run.ids
        if run.error and part.own_gateway(run):
            verdict.clients_of_killed_gateways += 1
        elif run.refused:
            verdict.refused.append(f"{run.asked.name}: {run.error}")
        elif run.error:
            verdict.errors.append(f"{run.asked.name}: {run.error}")
        else:
            found = compare(run, reference[run.asked.name])
            verdict.difference.add(found)
            if found != Difference():
                verdict.different.append(f"{run.asked.name}: {found}")
    return verdict


def pause(run: Run, since: float, until: float) -> float | None:
    """The longest time without a token between two moments; None if the run brought none after the first."""
    marks = [since, *(mark for mark in run.marks if since < mark < until)]
    if len(marks) == 1:
        return None
    return max(b - a for a, b in itertools.pairwise(marks))


def quantile(values: Sequence[float], share: float) -> float:
    """Of values in any order; -1 of none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else -1.0


class Tormentor:
    """Hurts one mesh under one load."""

    def __init__(
        self, mesh: KillMesh, load: Load, rng: random.Random, *, least: int, say: Callable[[str], None]
    ) -> None:
        """`least`: requests in flight at every fault. `say` is told of each."""
        self.mesh, self.load, self.rng, self.least, self.say = mesh, load, rng, least, say

    async def part(
        self,
        name: str,
        streams: int,
        hurts: Iterable[Callable[[], Awaitable[Hurt]]],
        *,
        calm_s: float,
        limit_s: float = 3600.0,
        part: Part | None = None,
    ) -> Part:
        """Run the load, the faults one after the other for at most `limit_s`, and let the load end.

        `part` is filled as it goes, for whoever wants what there is when this raises.
        """
        part, first = part or Part(name), len(self.load.done)
        self.load.start(streams)
        began = time.monotonic()
        await asyncio.sleep(calm_s)
        watched = [*self.load.done[first:], *self.load.open]
        now = time.monotonic()
        found = (pause(run, max(began, run.marks[0]), now) for run in watched if len(run.marks) > 1)
        part.calm = [length for length in found if length is not None]
        for hurt in hurts:
            if time.monotonic() - began > limit_s:
                break
            done = await hurt()
            part.hurts.append(done)
            self.say(
                f"{done.at - began:6.1f} s  {done.what}: {len(done.runs)} in flight, whole {done.over - done.at:.1f} s"
            )
        await self.load.stop()
        part.runs = self.load.done[first:]
        return part

    async def _ready(self, what: str) -> None:
        """Enough is in flight, some of it past the first token; the grammar service is at work where it is hurt.

        Nobody has met a worker's death already where this is one: two would be poison.
        """
        end = time.monotonic() + ON_S
        while True:
            open_runs = list(self.load.open)
            streaming = [run for run in open_runs if run.marks]
            enough = len(open_runs) >= self.least and len(streaming) >= min(self.least // 2, STREAMING)
            masked = what != "grammar" or any(run.phase in ("constrained", "tool") for run in streaming)
            if enough and masked and not (what == "worker" and any(run.worker_kills for run in open_runs)):
                return
            if time.monotonic() > end:
                text = f"{len(open_runs)} requests in flight, {len(streaming)} past their first token: too few"
                raise RuntimeError(f"{text} for {what} in {ON_S:.0f} s; {self.least} are needed")
            await asyncio.sleep(0.02)

    async def _strike(self, what: str, name: str, act: Callable[[], float]) -> Hurt:
        await asyncio.sleep(self.rng.uniform(0.0, 1.0))
        await self._ready(what)
        runs = list(self.load.open)
        phases = Counter(run.phase for run in runs)
        hurt = Hurt(what, name, act(), runs, phases)
        if what == "worker":
            for run in runs:
                run.worker_kills += 1
        return hurt

    async def _goes_on(self, hurt: Hurt, since: float) -> Hurt:
        """Wait until every stream that it met past the first token has brought more or ended, and the mesh is whole.

        Prompts go on at their own pace beside the streams: the load waits for them, with a limit of its own.
        """
        end = time.monotonic() + ON_S
        waiting = [run for run in hurt.runs if run.gateway != hurt.deadly_for and run.marks and run.marks[0] < hurt.at]
        while waiting and time.monotonic() < end:
            waiting = [run for run in waiting if not run.ended and run.marks[-1] <= since + AT_ONCE_S]
            await asyncio.sleep(0.02)
        if waiting:
            names = ", ".join(run.asked.name for run in waiting)
            raise RuntimeError(f"{hurt.what} {hurt.name}: did not go on within {ON_S:.0f} s: {names}")
        await self.mesh.whole(())
        self.load.avoid.clear()
        hurt.over = time.monotonic()
        return hurt

    def victim(self, service: str) -> str:
        """A process of a service."""
        counts = {"worker": self.mesh.shape.workers, "gateway": self.mesh.shape.gateways}
        return f"{service}-{self.rng.randrange(counts[service])}" if service in counts else service

    async def kill(self, service: str) -> Hurt:
        """SIGKILL whoever serves."""
        name = self.victim(service)
        await self.mesh.whole((service,))
        hurt = await self._strike(service, name, lambda: self.mesh.signal(self.mesh.pid(name), signal.SIGKILL))
        if service == "gateway":
            hurt.deadly_for = int(name.rpartition("-")[2])
            self.load.avoid.add(hurt.deadly_for)
        return await self._goes_on(hurt, hurt.at)

    async def freeze(self, service: str, seconds: float) -> Hurt:
        """SIGSTOP, later SIGCONT."""
        name = self.victim(service)
        await self.mesh.whole((service,))
        pid, before = self.mesh.pid(name), await self._silences(service)
        hurt = await self._strike(service, name, lambda: self.mesh.signal(pid, signal.SIGSTOP))
        hurt.what = f"{service} frozen {seconds:.0f} s"
        thawed = hurt.at
        while (left := hurt.at + seconds - time.monotonic()) > 0:
            if hurt.detected_s < 0 and (pid not in self.mesh.living() or await self._silences(service) > before):
                hurt.detected_s = time.monotonic() - hurt.at
            await asyncio.sleep(min(left, 0.05))
        if pid in self.mesh.living():  # else its standby has ended it
            thawed = self.mesh.signal(pid, signal.SIGCONT)
        return await self._goes_on(hurt, thawed)

    async def _silences(self, service: str) -> float:
        """How often the peers of a service have given up on it."""
        mesh = self.mesh
        if service == "scheduler":
            return min([await mesh.count(f"gateway-{n}", EVENTS, "peer_silent") for n in range(mesh.shape.gateways)])
        if service == "grammar":
            return min([await mesh.count(f"worker-{n}", MASKS, "silent") for n in range(mesh.shape.workers)])
        return sum([await mesh.count("scheduler", EVENTS, event) for event in ("peers_silent", "steps_overdue")])

    async def cut(self, what: str, relay: Relay, mode: Mode, seconds: float) -> Hurt:
        """Break a link, mend it later."""
        await self.mesh.whole(())

        def act() -> float:
            relay.behave(mode)
            return time.monotonic()

        hurt = await self._strike(what, mode.value, act)
        hurt.what = f"{what} link {mode.value}"
        for run in hurt.runs:
            run.worker_kills += 1
        await asyncio.sleep(seconds)
        relay.behave(Mode.PASS)
        return await self._goes_on(hurt, time.monotonic())

    async def restart(self, name: str) -> Hurt:
        """SIGTERM; the supervisor starts the next one."""
        await self.mesh.whole()
        gone = len(self.mesh.exits)
        pid = self.mesh.supervisor.pids()[name]
        hurt = await self._strike(f"{name} restarted", name, lambda: self.mesh.signal(pid, signal.SIGTERM))
        if name.startswith("gateway"):
            self.load.avoid.add(int(name.rpartition("-")[2]))
        while not any(event.service == name for event in self.mesh.exits[gone:]):  # noqa: ASYNC110 - a child's state
            await asyncio.sleep(0.02)
        hurt.took_s = time.monotonic() - hurt.at
        status = next(event.status for event in self.mesh.exits[gone:] if event.service == name)
        if status:
            raise RuntimeError(f"{name} left with status {status}")
        return await self._goes_on(hurt, hurt.at)


def in_flight(hurts: Sequence[Hurt]) -> float:
    """Median requests in flight at a fault."""
    return statistics.median(len(hurt.runs) for hurt in hurts) if hurts else 0.0
