"""Vanished clients of a real mesh: how soon their slots and pages are free, and that nothing is lost at the end.

The scheduler is asked over its own socket, so what is measured is the whole way: socket, gateway, scheduler, worker.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
from meshpb.v1 import scheduler_pb2 as pb
from meshpb.v1.scheduler_pb2_grpc import SchedulerStub

from benchmarks._mesh import running_mesh
from meshkit.channel import open_channel
from meshkit.testing import until

STREAMS, LEAVING = 16, 8
TOKENS = 100  # with its prompt less than a page of 256: what a request owns stays the same while it runs
POOLS = ("pages", "slots", "tails")
PROMISE_S = 0.25  # beside two steps
SLACK = 3.0  # a machine that runs other tests at the same time


class _Stream:
    """One streamed completion, read in a task; `times` are the arrivals of its tokens."""

    def __init__(self, session: aiohttp.ClientSession, url: str, index: int, prompt: str = "Tale number") -> None:
        self._session, self._url = session, url
        self._body = {"prompt": f"{prompt} {index}:", "max_tokens": TOKENS, "seed": index, "stream": True,
                      "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        self.times: list[float] = []
        self.tokens = 0
        self.finish: str | None = None
        self.response: aiohttp.ClientResponse | None = None

    async def read(self) -> None:
        async with self._session.post(f"{self._url}/v1/completions", json=self._body) as self.response:
            assert self.response.status == 200
            async for line in self.response.content:
                if not line.startswith(b"data: {"):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                self.times.append(time.monotonic())
                self.tokens += len(choice["token_ids"])
                self.finish = choice["finish_reason"] or self.finish

    def vanish(self) -> None:
        assert self.response is not None and self.finish is None
        self.response.close()


def _step_s(streams: list[_Stream]) -> float:
    """Seconds per step: the median gap between two tokens of a stream."""
    return statistics.median(b - a for s in streams for a, b in zip(s.times, s.times[1:]))


async def _load(stub: SchedulerStub) -> dict[str, int]:
    reply = await stub.GetLoad(pb.GetLoadRequest(), timeout=5)
    return dict(reply.counters)


def _totals(load: dict[str, int]) -> dict[str, int]:
    states = ("free", "owned", "cached", "quarantined")
    return {pool: sum(load[f"{pool}_{state}"] for state in states) for pool in POOLS}


async def _load_when(stub: SchedulerStub, condition: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """The first load for which the condition holds."""
    async with asyncio.timeout(20):
        while True:
            load = await _load(stub)
            if condition(load):
                return load
            await asyncio.sleep(0.002)


async def _settled(stub: SchedulerStub) -> dict[str, int]:
    """The load once no request is left; all of every pool is free or cached then."""
    load = await _load_when(stub, lambda load: not (load["requests"] or any(load[f"{p}_owned"] for p in POOLS)))
    for pool in POOLS:
        assert load[f"{pool}_free"] + load[f"{pool}_cached"] == _totals(load)[pool]
    return load


async def _vanish(url: str, socket: str) -> None:
    async with open_channel(socket) as channel, aiohttp.ClientSession() as session:
        stub = SchedulerStub(channel)
        await _Stream(session, url, 99, "many words " * 300).read()  # of several pages, which may stay cached
        before = await _settled(stub)

        streams = [_Stream(session, url, index) for index in range(STREAMS)]
        leaving, staying = streams[:LEAVING], streams[LEAVING:]
        tasks = {stream: asyncio.create_task(stream.read()) for stream in streams}
        await until(lambda: min(len(stream.times) for stream in streams) >= 10, 60)
        full = await _load(stub)
        assert full["requests"] == full["slots_owned"] == STREAMS and full["pages_owned"] and full["tails_owned"]
        step = _step_s(streams)

        def left_alone(load: dict[str, int]) -> bool:
            """Half of what was owned is given back."""
            return load["requests"] == STREAMS - LEAVING and all(
                2 * load[f"{pool}_owned"] <= full[f"{pool}_owned"] and not load[f"{pool}_quarantined"] for pool in POOLS
            )

        start = time.monotonic()
        for stream in leaving:
            stream.vanish()
        await _load_when(stub, left_alone)
        seconds = time.monotonic() - start
        assert seconds <= SLACK * (2 * step + PROMISE_S), f"{seconds:.3f} s with steps of {step:.3f} s"

        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert [(stream.finish, stream.tokens) for stream in staying] == [("length", TOKENS)] * len(staying)
        assert all(stream.finish is None for stream in leaving)
        after = await _settled(stub)
        assert _totals(after) == _totals(before) == _totals(full)


def test_slots_and_pages_of_vanished_clients_are_soon_free():
    with (
        tempfile.TemporaryDirectory(prefix="v4m-") as folder,  # short: a socket's path has little room
        running_mesh("--run-dir", folder) as url,
    ):
        asyncio.run(_vanish(url, f"unix:{Path(folder) / 'scheduler.sock'}"))
