"""The hub tells who is there where nobody accepts; whoever does not answer holds nobody up."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from gateway.siblings import hub as hub_module
from gateway.siblings.hub import Hub
from gateway.siblings.wire import LONGEST_LINE, Talk
from meshkit.testing import until


class Process:
    """A gateway's side of the connection by hand."""

    def __init__(self):
        self.orphans = None
        self.asked = []
        self.awake = asyncio.Event()
        self.awake.set()

    @classmethod
    async def join(cls, path):
        self = cls()
        reader, self._writer = await asyncio.open_unix_connection(str(path), limit=LONGEST_LINE)
        self.talk = Talk(reader, self._writer, self._answer)
        self._running = asyncio.create_task(self.talk.run())
        return self

    async def _answer(self, what, arguments):
        await self.awake.wait()
        self.asked.append(what)
        if what == "orphans":
            self.orphans = arguments["numbers"]
        elif what == "metrics":
            return "# TYPE a counter\na_total 1\n"
        return True

    async def end(self):
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


@asynccontextmanager
async def port(path, count):
    """A hub and `count` processes that serve."""
    hub = Hub(count)
    await hub.start(path)
    processes = [await Process.join(path) for _ in range(count)]
    try:
        for number, process in enumerate(processes):
            await process.talk.ask("serves", number=number, pid=100 + number)
        await until(lambda: all(process.orphans == [] for process in processes))
        yield hub, processes
    finally:
        await asyncio.gather(*(process.end() for process in processes))
        await hub.stop()
        await until(lambda: not hub._talks)


@pytest.fixture
def quick(monkeypatch):
    """Frozen after a tenth of a second."""
    monkeypatch.setattr(hub_module, "BEAT_S", 0.01)
    monkeypatch.setattr(hub_module, "FROZEN_S", 0.1)


async def test_the_end_of_a_connection_and_a_farewell_are_told_to_the_others(tmp_path, caplog):
    async with port(tmp_path / "hub.sock", 3) as (_, (first, second, third)):
        await second.end()
        await until(lambda: first.orphans == third.orphans == [1])
        await until(lambda: "gateway-1 (pid 101) is gone: its siblings accept" in caplog.text)
        successor = await Process.join(tmp_path / "hub.sock")
        await until(lambda: successor.orphans == [1])  # before it serves it knows that others do
        assert await successor.talk.ask("serves", number=1, pid=111) == []
        await until(lambda: first.orphans == third.orphans == [])
        await third.talk.ask("leaves")
        await until(lambda: first.orphans == successor.orphans == [2])
        assert "gateway-2" not in caplog.text
        await successor.end()


async def test_a_frozen_process_is_replaced_for_a_while_and_holds_nobody_up(tmp_path, quick, caplog):
    async with port(tmp_path / "hub.sock", 2) as (_, (first, second)):
        second.awake.clear()
        await until(lambda: first.orphans == [1])
        assert "gateway-1 (pid 101) has not answered for 0.1 s" in caplog.text and "kill -9 101" in caplog.text
        assert "a_total 1.0" in await first.talk.ask("metrics")
        assert await first.talk.ask("abort", tenant="", rid="far-away") == 1
        second.awake.set()
        await until(lambda: first.orphans == [])
        await until(lambda: second.orphans == [] and "abort" in second.asked)
        assert "metrics" not in second.asked
        assert "a_total 2.0" in await first.talk.ask("metrics")


async def test_who_does_not_answer_while_it_starts_is_not_worth_a_word(tmp_path, quick, caplog):
    async with port(tmp_path / "hub.sock", 1) as (hub, _):
        starting = await Process.join(tmp_path / "hub.sock")
        starting.awake.clear()
        await until(lambda: hub.attendance._frozen)
        starting.awake.set()
        await until(lambda: not hub.attendance._frozen)
        await starting.end()
        assert "answer" not in caplog.text
