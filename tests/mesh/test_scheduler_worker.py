"""Scheduler and worker over real gRPC on unix sockets, in one process, with an executor whose tokens are arithmetic.

The executor's next id depends on the id and the position fed last, so a lost, doubled or misplaced token shows at once.
"""

import asyncio
import contextlib
import os
import time

import grpc
import numpy as np
import pytest
from meshpb.v1 import scheduler_pb2 as pb
from meshpb.v1 import scheduler_pb2_grpc, worker_pb2

from meshkit import wire
from meshkit.channel import open_channel
from meshkit.errors import BadRequest
from meshkit.frames import (
    CancelRows,
    Verdict,
)
from meshkit.health import Health
from meshkit.obs import Metrics, start_tracing
from meshkit.testing import GatewayProbe, serving, until
from meshkit.types import FinishReason, ModelInfo
from scheduler_svc.core.config import SchedulerLimits
from scheduler_svc.loop import SchedulerLoop
from scheduler_svc.servicer import SchedulerServicer
from worker_svc.compute import ComputeThread
from worker_svc.core.resident import ResidentSlots
from worker_svc.core.table import PoolConfig
from worker_svc.core.work import RowOutcome, StepOutcome
from worker_svc.loop import WorkerLoop

VOCAB = 1000
MODEL = ModelInfo(
    name="arithmetic", revision="r1", vocab_size=VOCAB, max_context=4096, eos_ids=(0,), kv_layout_id="none"
)
POOLS = PoolConfig(slots=8, pages=64, tails=16, max_step_tokens=256)


def next_id(token, position):
    return 1 + (token * 31 + position * 7) % (VOCAB - 1)


def expected(prompt, count):
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_id(ids[-1], len(ids) - 1))
    return ids[len(prompt) :]


class ArithmeticExecutor:
    """Implements `worker_svc.core.work.Executor`. `fail_at` makes that step raise once."""

    def __init__(self, step_s=0.0, fail_at=None):
        self.step_s, self.fail_at, self.steps = step_s, fail_at, 0
        self.resident = ResidentSlots()

    def launch(self, work):
        self.steps += 1
        time.sleep(self.step_s)
        if self.steps == self.fail_at:
            raise RuntimeError("the device fell off the bus")
        for init in work.inits:
            self.resident.init(init)
        for copy in work.copies:
            self.resident.copy(copy.src, copy.dst)
        return StepOutcome(rows=tuple(RowOutcome(self.tokens(self.resident.resolve(row))) for row in work.rows))

    def tokens(self, row):
        if row is None:
            return ()
        tokens = (next_id(row.ids[-1], row.start + len(row.ids) - 1),) if row.sample_last else ()
        self.resident.advance(row, tokens)
        return tokens

    def collect(self, handle):
        return handle


class Worker:
    """A WorkerLoop that can be stopped like a crash: no Bye."""

    def __init__(self, address, executor, group="w0"):
        self.compute = ComputeThread()
        self.loop = WorkerLoop(
            executor, self.compute, group=group, model=MODEL, pools=POOLS, scheduler=address, metrics=Metrics()
        )
        self.task = asyncio.create_task(self.loop.run())

    async def crash(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.compute.stop()


@pytest.fixture(params=[2])
async def scheduler(tmp_path, request):
    loop = SchedulerLoop(SchedulerLimits(depth=request.param), Health(), Metrics(), start_tracing("scheduler"))
    async with serving(tmp_path, "scheduler", SchedulerServicer(loop).add_to) as address:
        task = asyncio.create_task(loop.run())
        loop.address = address
        yield loop
        assert not task.done(), task.exception()
        task.cancel()
        assert loop.core.faults == {}
        loop.core.check()


@pytest.fixture
async def start_worker(scheduler):
    workers = []

    async def start(executor=None, group="w0"):
        worker = Worker(scheduler.address, executor or ArithmeticExecutor(), group)
        workers.append(worker)
        await until(lambda: worker.loop.machine.attached and scheduler.core.status().ready)
        return worker

    yield start
    for worker in workers:
        await worker.crash()


def idle(scheduler):
    status = scheduler.core.status()
    load = scheduler.core.load()
    return status.running == status.waiting == load["requests"] == load["slots_owned"] == load["pages_owned"] == 0


@pytest.mark.parametrize("scheduler", [1, 2, 3], indirect=True)
async def test_tokens_stream_to_the_end(scheduler, start_worker):
    await start_worker()
    async with GatewayProbe(scheduler.address) as gateway:
        await until(lambda: gateway.status is not None and gateway.status.ready)
        assert gateway.status.model == MODEL
        prompts = [range(5, 5 + length) for length in (1, 3, 255, 256, 700)]
        rows = [(await gateway.accepted(prompt, max_tokens=30))[0] for prompt in prompts]
        await until(lambda: len(gateway.finished) == len(rows))
        for row, prompt in zip(rows, prompts, strict=True):
            assert gateway.tokens[row] == expected(prompt, 30)
            assert gateway.finished[row] is FinishReason.LENGTH
    await until(lambda: idle(scheduler))


async def test_many_at_once_and_half_of_them_cancelled(scheduler, start_worker):
    await start_worker(ArithmeticExecutor(step_s=0.002))
    async with GatewayProbe(scheduler.address) as gateway:
        rows = [(await gateway.accepted([row + 1, 2], max_tokens=60))[0] for row in range(16)]
        await until(lambda: len(gateway.tokens) >= 4)
        gone = np.array(rows[::2], np.int32)
        await gateway.send(CancelRows(gone, np.ones(8, np.int32)))
        await until(lambda: set(gateway.finished) >= set(rows[1::2]), 20)
        for row in rows[1::2]:
            assert gateway.tokens[row] == expected([row + 1, 2], 60)
    await until(lambda: idle(scheduler))


async def test_two_choices_share_a_prompt(scheduler, start_worker):
    await start_worker()
    async with GatewayProbe(scheduler.address) as gateway:
        first, second = await gateway.accepted(range(1, 400), n=2, max_tokens=10)
        await until(lambda: len(gateway.finished) == 2)
        assert gateway.tokens[first] == gateway.tokens[second] == expected(range(1, 400), 10)


async def test_worker_crash_and_restart_loses_and_doubles_nothing(scheduler, start_worker):
    worker = await start_worker(ArithmeticExecutor(step_s=0.005))
    async with GatewayProbe(scheduler.address) as gateway:
        rows = [(await gateway.accepted([row + 3], max_tokens=150))[0] for row in range(3)]
        await until(lambda: all(len(gateway.tokens.get(row, ())) > 20 for row in rows))
        await worker.crash()
        assert not gateway.finished
        await start_worker()
        await until(lambda: len(gateway.finished) == 3, 15)
        for row in rows:
            assert gateway.tokens[row] == expected([row + 3], 150)
    await until(lambda: idle(scheduler))


async def test_a_failed_step_starts_over_on_the_same_worker(scheduler, start_worker, caplog):
    await start_worker(ArithmeticExecutor(fail_at=10))
    async with GatewayProbe(scheduler.address) as gateway:
        (row,) = await gateway.accepted([9], max_tokens=40)
        await until(lambda: row in gateway.finished, 15)
        assert gateway.tokens[row] == expected([9], 40)
    assert "the device fell off the bus" in caplog.text


async def test_work_moves_to_another_worker_at_a_planned_leave(scheduler, start_worker):
    first = await start_worker(ArithmeticExecutor(step_s=0.005), "w0")
    async with GatewayProbe(scheduler.address) as gateway:
        (row,) = await gateway.accepted([4], max_tokens=200)
        await until(lambda: len(gateway.tokens.get(row, ())) > 10)
        await start_worker(group="w1")
        await first.loop.finish()
        await asyncio.sleep(0.4)  # it does not dial again while the rest of its process ends
        assert list(scheduler.core.state.workers) == ["w1"] and not scheduler.core.state.lost
        first.task.cancel()
        await until(lambda: row in gateway.finished, 15)
        assert gateway.tokens[row] == expected([4], 200)


async def test_submit_is_idempotent_and_fenced(scheduler, start_worker):
    await start_worker()
    async with GatewayProbe(scheduler.address) as gateway:
        name = os.urandom(16)
        (row,), reply = await gateway.submit([5], request_id=name, max_tokens=20)
        assert reply.verdict is Verdict.ACCEPTED
        _, again = await gateway.submit([5], request_id=name, max_tokens=20)
        assert again.verdict is Verdict.ACCEPTED
        _, stale = await gateway.submit([5], attach_id=12345)
        assert stale.verdict is Verdict.STALE_ATTACH
        _, too_long = await gateway.submit([5] * 4096, max_tokens=100)
        assert too_long.verdict is Verdict.NEVER_FITS
        await until(lambda: row in gateway.finished)
        assert gateway.tokens == {row: expected([5], 20)}


async def test_bad_submits_are_refused_with_the_field(scheduler):
    async with GatewayProbe(scheduler.address) as gateway:
        with pytest.raises(BadRequest, match="request_id: 3 bytes"):
            await gateway.stub.Submit(pb.SubmitRequest(request_id=b"abc", attempt=1, choices=[{}]), timeout=2)
        with pytest.raises(BadRequest, match="prompt: 3 bytes are no whole number"):
            await gateway.stub.Submit(pb.SubmitRequest(prompt=b"abc"), timeout=2)


@pytest.mark.parametrize("message", [pb.GatewayUp(), pb.GatewayUp(attach_id=1, cancel={"rows": b"abc"})])
async def test_a_bad_frame_ends_one_stream_and_nothing_else(scheduler, message):
    async with GatewayProbe(scheduler.address, "good") as good, GatewayProbe(scheduler.address, "bad") as bad:
        await bad.call.write(message)
        await until(lambda: bad.closed is not None)
        assert bad.closed == "INVALID_ARGUMENT"
        await asyncio.sleep(0.05)
        assert good.closed is None
        assert set(scheduler.core.state.gateways) == {"good"}


async def test_a_worker_frame_with_unequal_columns_ends_its_stream(scheduler):
    async with open_channel(scheduler.address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).AttachWorker()
        await call.write(worker_pb2.WorkerUp(attach_id=1, result={"step": 1, "states": b"\1\1", "counts": b"\1"}))
        with pytest.raises(grpc.aio.AioRpcError, match="counts: 1 items"):
            await call.read()


async def test_a_newer_stream_of_the_same_gateway_replaces_the_older(scheduler):
    async with GatewayProbe(scheduler.address) as old, GatewayProbe(scheduler.address) as new:
        await until(lambda: old.closed is not None)
        assert old.closed == "EOF"
        assert new.closed is None
        assert new.attach_id != old.attach_id


async def test_silent_peers_are_dropped(scheduler):
    async with GatewayProbe(scheduler.address) as gateway:
        gateway.beats.cancel()
        await until(lambda: gateway.closed is not None)
        assert scheduler.core.state.gateways == {}


async def test_drain_refuses_new_work_finishes_old_and_says_bye(scheduler, start_worker):
    await start_worker(ArithmeticExecutor(step_s=0.005))
    async with GatewayProbe(scheduler.address) as gateway:
        (row,) = await gateway.accepted([5], max_tokens=100)
        await gateway.stub.Drain(pb.DrainRequest(), timeout=2)
        _, reply = await gateway.submit([5])
        assert reply.verdict is Verdict.DRAINING
        load = await gateway.stub.GetLoad(pb.GetLoadRequest(), timeout=2)
        assert wire.get_status(load.status).draining
        assert load.counters["requests"] == 1
        await scheduler.finish()
        await until(lambda: gateway.closed == "EOF")
        assert gateway.tokens[row] == expected([5], 100)


async def test_what_the_core_counts_is_exported(scheduler):
    async with GatewayProbe(scheduler.address):
        pass
    await until(lambda: not scheduler.core.state.conns)
    async with GatewayProbe(scheduler.address), GatewayProbe(scheduler.address) as again:
        await until(lambda: again.attach_id)
    text = scheduler.shell.metrics.render().decode()
    assert 'v4mesh_core_events_total{event="attachments_superseded",fault="0"} 1.0' in text


async def test_a_core_that_raises_ends_the_loop(scheduler, monkeypatch):
    loop = SchedulerLoop(SchedulerLimits(), Health(), Metrics(), start_tracing("scheduler"))
    task = asyncio.create_task(loop.run())
    await asyncio.sleep(0)

    def broken(event, now_ns):
        raise KeyError("a bug")

    monkeypatch.setattr(loop.shell.core, "handle", broken)
    loop.drain()
    with pytest.raises(KeyError, match="a bug"):
        await task


async def test_worker_without_a_scheduler_redials_until_there_is_one(tmp_path):
    address = f"unix:{tmp_path}/scheduler.sock"
    worker = Worker(address, ArithmeticExecutor())
    await asyncio.sleep(0.3)
    assert not worker.loop.machine.attached
    loop = SchedulerLoop(SchedulerLimits(), Health(), Metrics(), start_tracing("scheduler"))
    async with serving(tmp_path, "scheduler", SchedulerServicer(loop).add_to):
        task = asyncio.create_task(loop.run())
        start = time.monotonic()
        await until(lambda: loop.core.status().ready)
        assert time.monotonic() - start < 5
        await worker.crash()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
