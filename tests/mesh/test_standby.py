"""A warm scheduler: takes over the socket when the serving one is killed or leaves, and goes when it is told to."""

import asyncio
import os
import signal
import time

import pytest

from meshkit import standby
from meshkit.cli.preflight import free_port
from meshkit.standby import Place, Watch, until_taken
from meshkit.testing import GatewayProbe, ServiceProcess, until
from scheduler_svc.__main__ import main


@pytest.fixture
def start(tmp_path):
    tmp_path.chmod(0o700)
    started, port = [], free_port("127.0.0.1")

    def one(name):
        args = ("--listen", f"unix:{tmp_path}/s.sock", "--standby", "--metrics-port", str(port))
        started.append(ServiceProcess("scheduler_svc", *args, log=tmp_path / name))
        return started[-1]

    yield one
    for process in started:
        process.__exit__()


async def logged(service, word):
    await until(lambda: word in service.log.read_text(), 30)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_standby_serves_when_the_first_one_ends(tmp_path, start, number):
    address = f"unix:{tmp_path}/s.sock"
    first = start("first")
    await first.ready(address, service="")
    second = start("second")
    await logged(second, "standing by")
    async with GatewayProbe(address) as gateway:
        first.process.send_signal(number)
        await until(lambda: gateway.closed is not None, 5)
    ended = time.monotonic()
    await second.ready(address, service="")
    assert time.monotonic() - ended < 2.0, "it was there already"  # some 50 ms on an idle machine
    assert first.process.wait(10) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    async with GatewayProbe(address) as gateway:
        assert gateway.attach_id
    third = start("third")
    await logged(third, "standing by")
    assert third.end(signal.SIGINT) == 130
    assert second.end(signal.SIGTERM) == 0


async def test_a_frozen_scheduler_is_ended_by_its_standby(tmp_path, start):
    address = f"unix:{tmp_path}/s.sock"
    first = start("first")
    await first.ready(address, service="")
    second = start("second")
    await logged(second, "standing by")
    for seconds, frozen in ((0.7, False), (10.0, True)):  # thawed before it is fenced; fenced before it is thawed
        first.process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        while time.monotonic() - stopped < seconds and first.process.poll() is None:  # noqa: ASYNC110 - a child's state
            await asyncio.sleep(0.05)
        assert (first.process.poll() is not None) == frozen
        first.process.send_signal(signal.SIGCONT)
        await (second if frozen else first).ready(address, service="")
    assert time.monotonic() - stopped < 8.0, "2.0 s on an idle machine"
    assert first.process.wait(1) == -signal.SIGKILL and "is frozen: nothing for 2." in second.log.read_text()
    assert second.end(signal.SIGTERM) == 0


async def test_who_cannot_be_ended_is_shut_out(tmp_path, monkeypatch):
    monkeypatch.setattr(standby, "HUNG_S", 0.3)
    monkeypatch.setattr(standby, "_is_stopped", lambda pid: pytest.fail("another container's processes are not seen"))
    old, new = Place(tmp_path / "s.sock"), Place(tmp_path / "s.sock")
    assert old.take() and old.owner() == (0, os.getpid()) and old.beat()
    old.announce()
    assert new.owner() == (1, os.getpid()) and not new.take()
    monkeypatch.setattr(Place, "owner", lambda _: (1, 0))
    (tmp_path / "s.sock").touch()
    await asyncio.wait_for(until_taken(new), 5)
    assert not (tmp_path / "s.sock").exists() and not new.announced
    assert not old.beat() and new.beat()
    third = Place(tmp_path / "s.sock")
    assert not third.take()
    old.leave()
    assert not third.take(), "the old lock means nothing any more"
    (tmp_path / "s.sock.lock").unlink()
    assert new.beat() and not third.take(), "whoever waits waits for the same file"
    new.leave()
    assert third.take()
    third.leave()


def test_silence_counts_only_while_one_listens():
    watch, asked = Watch(), []

    def look(beats, now, stopped=True):
        return watch.is_dead(beats, now, lambda: asked.append(now) or stopped)

    assert not any(look(0, now) for now in range(100)), "it is starting"
    assert not look(1, 100.0)
    assert not look(1, 1000.0), "we slept ourselves"
    assert not any(look(1, 1000 + i / 10) for i in range(1, 15)) and not asked
    assert not any(look(n, 1010 + n) for n in range(2, 30)), "it beats"
    assert not any(look(29, 1039 + i / 10, stopped=False) for i in range(1, 48)), "it may be slow"
    assert look(29, 1044.0) and look(29, 1045.0, stopped=False)


def test_there_is_no_standby_without_a_lock(capsys):
    assert main(["--listen", "127.0.0.1:0", "--standby"]) == 3
    assert "standby = 'true'" in capsys.readouterr().err.replace("True", "'true'")
