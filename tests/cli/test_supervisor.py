"""The supervisor with small dummy children: order, readiness, restarts, permanent failures, stops, no orphans."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from meshkit import supervisor
from meshkit.supervisor import RestartError, ServiceEvent, ServiceSpec, Supervisor

FOREVER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


def script(code: str, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-c", textwrap.dedent(code), *args)


class Recorder:
    """Collects what the supervisor reports, and lets a test wait for it."""

    def __init__(self, *specs: ServiceSpec, on_stop: Callable[[], None] = lambda: None) -> None:
        self.events: list[ServiceEvent] = []
        self.lines: list[tuple[str, str]] = []
        self.supervisor = Supervisor(
            specs, on_event=self.events.append, on_line=lambda s, t: self.lines.append((s, t)), on_stop=on_stop
        )

    def of(self, kind: str) -> list[ServiceEvent]:
        return [e for e in self.events if e.kind == kind]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_starts_in_order_relays_lines_and_stops_in_reverse_order():
    run = Recorder(*(ServiceSpec(name=n, argv=script(FOREVER)) for n in ("scheduler", "worker", "gateway")))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: len(run.lines) == 3)
    assert run.supervisor.all_ready.is_set()
    assert [e.service for e in run.of("started")] == ["scheduler", "worker", "gateway"]
    assert sorted(run.lines) == [("gateway", "up"), ("scheduler", "up"), ("worker", "up")]
    pids = run.supervisor.pids().values()
    run.supervisor.stop()
    assert await task == 0
    assert all(gone(p) for p in pids)
    assert [e.service for e in run.of("stopped")] == ["gateway", "worker", "scheduler"]


async def test_who_stops_with_others_is_asked_at_the_same_moment(tmp_path: Path):
    """The second of a pair would have all the time to take over while the first one leaves."""
    code = """
        import signal, sys, time
        def leave(*_):
            print("asked", time.monotonic(), flush=True)
            time.sleep(0.4)
            print("left", time.monotonic(), flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("up", flush=True)
        while True:
            signal.pause()
    """
    groups = {"grammar": "", "scheduler": "scheduler", "scheduler-standby": "scheduler", "gateway": ""}
    run = Recorder(*(ServiceSpec(name=name, argv=script(code), stops_with=group) for name, group in groups.items()))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: len(run.lines) == 4)
    run.supervisor.stop()
    assert await task == 0
    asked, left = (
        {name: float(text.split()[1]) for name, text in run.lines if text.startswith(word)}
        for word in ("asked", "left")
    )
    assert asked["scheduler"] < left["scheduler-standby"]
    assert left["gateway"] < min(asked["scheduler"], asked["scheduler-standby"])
    assert max(left["scheduler"], left["scheduler-standby"]) < asked["grammar"]


async def test_whoever_holds_something_for_the_children_is_told_of_the_stop_once_and_first():
    told: list[int] = []
    run = Recorder(ServiceSpec(name="a", argv=script(FOREVER)), on_stop=lambda: told.append(len(run.supervisor.pids())))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.lines)
    run.supervisor.stop()
    with pytest.raises(RestartError, match="the mesh stops"):
        await run.supervisor.restart("a", 1.0)
    run.supervisor.stop()
    await task
    assert told == [1]


async def test_ready_only_when_the_probe_says_so(tmp_path: Path):
    flag = tmp_path / "ready"

    async def probe() -> bool:
        return flag.exists()

    run = Recorder(ServiceSpec(name="a", argv=script(FOREVER), probe=probe))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.lines)
    assert not run.of("ready")
    assert not run.supervisor.all_ready.is_set()
    flag.touch()
    await run.until(lambda: run.of("ready"))
    run.supervisor.stop()
    assert await task == 0


async def test_a_killed_child_is_restarted_at_once():
    run = Recorder(ServiceSpec(name="a", argv=script(FOREVER)))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.lines)
    first = run.supervisor.pids()["a"]
    os.kill(first, signal.SIGKILL)
    await run.until(lambda: len(run.lines) == 2)
    (death,) = run.of("exited")
    assert (death.status, death.pid, death.restart_in_s) == (-signal.SIGKILL, first, 0.0)
    assert run.of("started")[1].at_s - death.at_s < 0.3
    assert run.supervisor.pids()["a"] != first
    run.supervisor.stop()
    assert await task == 0


@pytest.mark.parametrize("status", [2, 3, 4, 5, 6, 7])
async def test_a_permanent_exit_code_ends_everything_with_that_code(status: int):
    failing = script("import sys; print('no such model'); sys.exit(int(sys.argv[1]))", str(status))
    run = Recorder(ServiceSpec(name="a", argv=script(FOREVER)), ServiceSpec(name="b", argv=failing))
    assert await asyncio.wait_for(run.supervisor.run(), 10) == status
    (end,) = run.of("gave_up")
    assert end.service == "b"
    assert end.last_lines == ("no such model",)
    assert all(gone(e.pid) for e in run.of("started"))


async def test_a_child_that_never_gets_ready_is_given_up_with_growing_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "BACKOFF_S", (0.0, 0.01, 0.02, 0.03))

    async def never() -> bool:
        return False

    run = Recorder(ServiceSpec(name="a", argv=script("raise SystemExit(8)"), probe=never))
    assert await asyncio.wait_for(run.supervisor.run(), 10) == 8
    assert [e.restart_in_s for e in run.of("exited")] == [0.0, 0.01, 0.02, 0.03, 0.03]
    assert len(run.of("gave_up")) == 1


async def test_a_child_deaf_to_sigterm_is_killed_with_its_own_children(tmp_path: Path):
    code = """
        import signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])
        print(child.pid, flush=True)
        signal.pause()
    """
    run = Recorder(ServiceSpec(name="a", argv=script(code), drain_s=0.2))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.lines)
    grandchild = int(run.lines[0][1])
    run.supervisor.stop()
    assert await asyncio.wait_for(task, 3) == 0
    await run.until(lambda: gone(grandchild))


async def test_what_a_killed_child_leaves_behind_delays_no_restart():
    """A grandchild has the pipe that we read, and lives on."""
    code = f"""
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", {FOREVER!r}])
        {FOREVER}
        """
    run = Recorder(ServiceSpec(name="grammar", argv=script(code)))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: len(run.lines) == 2)
    (pid,) = run.supervisor.pids().values()
    (grandchild,) = psutil.Process(pid).children()
    os.kill(pid, signal.SIGKILL)
    await run.until(lambda: len(run.of("started")) == 2 and gone(grandchild.pid))
    run.supervisor.stop()
    assert await task == 0


async def test_the_second_stop_does_not_wait():
    run = Recorder(ServiceSpec(name="a", argv=script(STUBBORN), drain_s=60))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.lines)
    run.supervisor.stop()
    await asyncio.sleep(0.05)
    assert not task.done()
    run.supervisor.stop()
    assert await asyncio.wait_for(task, 2) == 0


async def test_a_line_without_end_arrives_in_pieces():
    size = supervisor.LONGEST_LINE * 3
    run = Recorder(
        ServiceSpec(name="a", argv=script(f"print('x' * {size}, end='', flush=True); import signal; signal.pause()"))
    )
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: sum(len(t) for _, t in run.lines) > supervisor.LONGEST_LINE)
    run.supervisor.stop()
    await task
    assert sum(len(t) for _, t in run.lines) == size


async def test_a_missing_program_is_reported():
    run = Recorder(ServiceSpec(name="a", argv=(str(Path("/nonexistent/program")),)))
    with pytest.raises(FileNotFoundError):
        await asyncio.wait_for(run.supervisor.run(), 5)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prctl")
def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path):
    code = f"""
        import asyncio, sys
        from meshkit.supervisor import ServiceSpec, Supervisor
        spec = ServiceSpec(name="a", argv=(sys.executable, "-c", {FOREVER!r}))
        sup = Supervisor([spec], on_event=lambda e: print(e.pid, flush=True), on_line=lambda s, t: None)
        asyncio.run(sup.run())
    """
    parent = subprocess.Popen(script(code), stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not gone(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(pid)


LEAVES = """
import signal, sys, time
def leave(number, frame):
    print('asked', number, flush=True)
    time.sleep({busy})
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, leave)
print('up', flush=True)
while True:
    signal.pause()
"""
BESIDE = "import os, sys\nif '--ready-fd' in sys.argv:\n    os.write(int(sys.argv[-1]), b'ready')\n"


async def test_a_restart_starts_the_next_process_after_the_first_has_left_and_is_no_death():
    run = Recorder(ServiceSpec(name="a", argv=script(LEAVES.format(busy=0.3))))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.lines)
    first = run.supervisor.pids()["a"]
    await run.supervisor.restart("a", 5.0)
    assert gone(first) and run.supervisor.pids()["a"] != first
    assert [e.kind for e in run.events] == ["started", "ready", "leaving", "left", "started", "ready"]
    assert run.of("left")[0].status == 0
    run.supervisor.stop()
    assert await task == 0


async def test_a_successor_starts_beside_and_only_a_ready_one_makes_the_first_leave():
    spec = ServiceSpec(
        name="a", argv=script(BESIDE + LEAVES.format(busy=0.3)), beside=True, retire=signal.SIGUSR1, drain_s=5.0
    )
    run = Recorder(spec)
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.lines)
    first = run.supervisor.pids()["a"]
    await run.supervisor.restart("a", 5.0)
    assert gone(first) and not gone(run.supervisor.pids()["a"])
    assert [e.kind for e in run.events][:4] == ["started", "ready", "started", "leaving"]
    assert ("a", f"asked {int(signal.SIGUSR1)}") in run.lines
    second = run.supervisor.pids()["a"]
    os.kill(second, signal.SIGKILL)  # it is watched like the first
    await run.until(lambda: run.supervisor.pids().get("a", second) != second)
    run.supervisor.stop()
    assert await task == 0
    assert not run.supervisor.pids()


async def test_who_takes_longer_beside_its_successor_is_left_to_it():
    spec = ServiceSpec(name="a", argv=script(BESIDE + LEAVES.format(busy=1.0)), beside=True, retire=signal.SIGUSR1)
    run = Recorder(spec)
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.lines)
    first = run.supervisor.pids()["a"]
    assert not await run.supervisor.restart("a", 0.1)
    assert not gone(first) and run.supervisor.pids()["a"] != first
    await run.until(lambda: run.of("left"))
    assert run.of("left")[0].pid == first and run.of("left")[0].status == 0
    run.supervisor.stop()
    assert await task == 0


async def test_a_successor_that_fails_changes_nothing():
    code = "import sys\nif '--ready-fd' in sys.argv:\n    sys.exit(3)\n" + FOREVER
    run = Recorder(ServiceSpec(name="a", argv=script(code), beside=True))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.lines)
    first = run.supervisor.pids()["a"]
    with pytest.raises(RestartError, match="the former process goes on"):
        await run.supervisor.restart("a", 5.0)
    assert run.supervisor.pids()["a"] == first and not gone(first)
    run.supervisor.stop()
    assert await task == 0


async def test_who_does_not_leave_in_time_is_pressed_and_then_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "FAREWELL_S", 0.2)
    run = Recorder(ServiceSpec(name="a", argv=script(STUBBORN)))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.lines)
    await run.supervisor.restart("a", 0.2)
    assert run.of("left")[0].status == -signal.SIGKILL
    run.supervisor.stop()
    assert await task == 0


async def test_a_stop_during_a_restart_ends_both_processes():
    spec = ServiceSpec(name="a", argv=script(BESIDE + LEAVES.format(busy=30)), beside=True, drain_s=0.2)
    run = Recorder(spec)
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.lines)
    restarting = asyncio.create_task(run.supervisor.restart("a", 60.0))
    await run.until(lambda: run.of("leaving"))
    pids = [e.pid for e in run.of("started")]
    run.supervisor.stop()
    assert await task == 0
    await asyncio.gather(restarting, return_exceptions=True)
    assert len(pids) == 2 and all(gone(pid) for pid in pids)
