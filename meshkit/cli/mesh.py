"""A mesh on this machine: which command lines it takes, and running them until somebody says stop.

`MeshPlan` is plain data; `run_mesh` checks everything that can fail, prints all failures at once and starts nothing, or
starts the services and reports each change. The command lines are those of compose and of people: `v4mesh scheduler
--listen ...`; only the way to call `v4mesh` differs (this very Python, so that a PATH cannot mislead).
"""

import asyncio
import contextlib
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from meshkit.cli.http_client import Endpoint, get_answer
from meshkit.cli.model_folder import check_model_folder
from meshkit.cli.preflight import (
    check_extras,
    check_gpu_memory,
    check_memory,
    check_port,
    check_run_folder,
    free_port,
    make_run_folder,
)
from meshkit.cli.progress import Progress, open_progress
from meshkit.cli.restart import Control
from meshkit.cli.screen import Screen
from meshkit.cli.stopped import Stopped
from meshkit.config import environment
from meshkit.exit_codes import Exit, Problem, ProblemsError
from meshkit.standing import stands_by
from meshkit.supervisor import Probe, ServiceSpec, Supervisor

DEFAULT_PORT = 8000
SELF = (sys.executable, "-m", "meshkit.cli")
Work = Callable[["MeshPlan", Callable[[], dict[str, int]]], int]  # (what runs, pids of the services) -> exit status
DRAIN_S = {"gateway": 2.0, "worker": 3.0, "scheduler": 2.0, "grammar": 1.5}  # at most; the supervisor bounds their sum
GROUP = "worker"  # the scheduler knows whom to wait for
STANDBY = "-standby"  # a second process of a service, which takes over when the first one dies
BACKLOG = 1024  # connections that wait while no gateway is there
TICK_S = 0.25
LOOK_TICKS = 8  # between two looks whether a service is stopped
REST_S = 1.0  # before the next standby of a service starts, so as not to slow the one that takes over


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """What to run. Flags are passed on to the service as they stand."""

    model: Path
    name: str
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    run_dir: str | None = None
    gateway_flags: tuple[str, ...] = ()
    gateways: int = 1  # processes that share the port
    scheduler_flags: tuple[str, ...] = ()
    standby: bool = False  # a second scheduler that takes over when the first one dies
    worker_flags: tuple[str, ...] = ()
    grammar: bool = False  # a grammar service with its standby; without, constrained requests are refused
    grammar_flags: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """True if the worker computes on a GPU, as far as the flags say; `auto` is the worker's to decide."""
        return ("--device", "cuda") in zip(self.worker_flags, self.worker_flags[1:])

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{self.port}"

    def command_lines(self, run_dir: Path) -> dict[str, tuple[str, ...]]:
        """Arguments after `v4mesh`, in start order."""
        steering = f"unix:{run_dir / 'scheduler.sock'}"
        model = ("--model", str(self.model))
        processes = ("--processes", str(self.gateways)) if self.gateways > 1 else ()
        listen = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        masks = f"unix:{run_dir / 'grammar.sock'}"
        asks = ("--grammar", masks) if self.grammar else ()
        grammar = ("grammar", "--listen", masks, *model, *self.grammar_flags)
        # Whoever comes in a scheduler's place goes on with what runs once this worker has said what it holds.
        steers = ("--standby",) if self.standby else ("--hand-over",)
        scheduler = ("scheduler", "--listen", steering, "--workers", GROUP, *steers, *asks, *self.scheduler_flags)
        return {
            "scheduler": scheduler,
            **({f"scheduler{STANDBY}": scheduler} if self.standby else {}),
            **({"grammar": grammar, f"grammar{STANDBY}": grammar} if self.grammar else {}),
            "worker": ("worker", "--scheduler", steering, "--group", GROUP, *asks, *model, *self.worker_flags),
            "gateway": (
                *("gateway", "--listen-http", listen, "--scheduler", steering, *model),
                *(*processes, *self.gateway_flags),
            ),
        }


def preflight(plan: MeshPlan) -> list[Problem]:
    """Everything that would fail, in the order people fix it."""
    problems = check_model_folder(plan.model)
    if not problems:
        problems = check_gpu_memory(plan.model) if plan.on_gpu else check_memory(plan.model)
    return [*check_extras(grammar=plan.grammar), *problems, *(check_port(plan.host, plan.port) if plan.port else [])]


def run_mesh(
    plan: MeshPlan,
    screen: Screen,
    *,
    problems: tuple[Problem, ...] = (),
    show_log: bool = True,
    on_ready: Callable[[MeshPlan, float], None] = lambda plan, seconds: None,
    work: Work | None = None,
) -> int:
    """Run until Ctrl-C or SIGTERM, or until `work` (called in a thread once all is ready) has returned.

    Returns the exit status: 0 after a clean stop (130 when Ctrl-C asked for it) or `work`'s result. A service that
    cannot run here raises ProblemsError with its cause and its status, so that the cause is the last thing said.
    """
    found = [*problems, *preflight(plan)]
    if found:
        raise ProblemsError(found)
    run_dir = make_run_folder(plan.run_dir, environment().get("XDG_RUNTIME_DIR"))
    try:
        if trouble := check_run_folder(run_dir):
            raise ProblemsError(trouble)
        if plan.port == 0:
            plan = replace(plan, port=free_port(plan.host))
        with open_progress(screen, list(plan.command_lines(run_dir)), show_log=show_log) as progress:
            status = asyncio.run(_run(plan, run_dir, progress, on_ready, work))
        if progress.cause is not None:
            raise ProblemsError(progress.cause)
        return status
    finally:
        if plan.run_dir is None:
            shutil.rmtree(run_dir, ignore_errors=True)


async def _run(
    plan: MeshPlan,
    run_dir: Path,
    progress: Progress,
    on_ready: Callable[[MeshPlan, float], None],
    work: Work | None,
) -> int:
    started = time.monotonic()
    # Sockets that outlive every gateway: whoever connects while one is replaced waits for the next.
    # With the first step of a stop nobody waits any more: connections are refused as soon as the gateway accepts none.
    with contextlib.ExitStack() as held:
        fds = tuple(held.enter_context(it).fileno() for it in listening(plan.host, plan.port, plan.gateways))
        specs = _specs(plan, run_dir, progress, fds)
        supervisor = Supervisor(specs, on_event=progress.event, on_line=progress.line, on_stop=held.close)
        async with Control(supervisor, run_dir):
            return await _supervise(plan, supervisor, progress, on_ready, work, started)


async def _supervise(
    plan: MeshPlan,
    supervisor: Supervisor,
    progress: Progress,
    on_ready: Callable[[MeshPlan, float], None],
    work: Work | None,
    started: float,
) -> int:
    loop = asyncio.get_running_loop()
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        supervisor.stop()

    def ended(status: int) -> int:
        return int(Exit.INTERRUPTED) if interrupted and status == 0 else status

    loop.add_signal_handler(signal.SIGINT, interrupt)
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.stop)
    running = asyncio.create_task(supervisor.run())
    ticking = asyncio.create_task(_tick(progress, supervisor))
    ready = asyncio.create_task(supervisor.all_ready.wait())
    try:
        await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return ended(running.result())
        progress.finish_start()
        with contextlib.suppress(BrokenPipeError):  # nobody reads any more (`| head`): the mesh goes on
            on_ready(plan, time.monotonic() - started)
        if work is None:
            return ended(await running)
        working = asyncio.create_task(asyncio.to_thread(work, plan, supervisor.pids))
        await asyncio.wait([running, working], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result() or int(Exit.INTERRUPTED)
        supervisor.stop()
        return working.result() or ended(await running)
    finally:
        ticking.cancel()
        ready.cancel()
        if not running.done():
            supervisor.stop()
            await running


async def _tick(progress: Progress, supervisor: Supervisor) -> None:
    stopped = Stopped()
    while True:
        for _ in range(LOOK_TICKS):
            await asyncio.sleep(TICK_S)
            progress.tick()
        for name, text in stopped.look(supervisor.pids()):
            progress.note(name, text)


def listening(host: str, port: int, count: int) -> Iterator[socket.socket]:
    """`count` sockets at one port, between which the kernel spreads connections. Raises ProblemsError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(count):
        it = socket.socket(family, socket.SOCK_STREAM)
        it.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else its closed connections keep the port a minute
        if count > 1:
            it.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            it.bind((host.strip("[]"), port))
        except OSError as e:
            it.close()
            fact = f"cannot listen on {host}:{port}: {e.strerror}"
            raise ProblemsError(Problem("PORT", Exit.PORT, fact, "--port 0 picks a free one")) from e
        it.listen(BACKLOG)
        yield it


def _specs(plan: MeshPlan, run_dir: Path, progress: Progress, fds: tuple[int, ...]) -> list[ServiceSpec]:
    here, lines = Endpoint.parse(plan.url), plan.command_lines(run_dir)

    async def listens(name: str) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(str(run_dir / f"{name}.sock"))
        except OSError:
            return False
        writer.close()
        return True

    async def gateway_serves() -> bool:
        return (await get_answer(here, "/health"))[0] == 200

    async def worker_serves() -> bool:
        status, why = await get_answer(here, "/ready")
        progress.why["worker"] = why
        return status == 200

    probes: dict[str, Probe] = {
        "scheduler": partial(listens, "scheduler"),
        "grammar": partial(listens, "grammar"),
        "worker": worker_serves,
        "gateway": gateway_serves,
    }

    async def has_standby(name: str) -> bool:
        return await listens(name) and stands_by(run_dir / f"{name}.sock")

    settled = {name: partial(has_standby, name) for name in ("scheduler", "grammar") if f"{name}{STANDBY}" in lines}
    handed = ("--listen-fds", ",".join(map(str, fds)))
    return [
        ServiceSpec(
            name=name,
            argv=(*SELF, *line, *(handed if name == "gateway" else ())),
            probe=probes.get(name),  # a standby has nothing to show
            probe_every_s=0.3
            if name == "worker"
            else 0.1,  # a worker takes seconds, and the gateway logs each question
            drain_s=DRAIN_S[name.removesuffix(STANDBY)],
            rest_s=REST_S if f"{name.removesuffix(STANDBY)}{STANDBY}" in lines else 0.0,
            settled=settled.get(name.removesuffix(STANDBY)),
            stops_with=name.removesuffix(STANDBY),
            beside=name == "gateway",
            retire=signal.SIGUSR1 if name == "gateway" else signal.SIGTERM,
            passed=fds if name == "gateway" else (),
        )
        for name, line in lines.items()
    ]
