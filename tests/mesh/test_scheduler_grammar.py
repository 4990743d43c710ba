"""The scheduler's shell against a grammar service over real gRPC: compiles, refusals, absence, restarts, numbers."""

import asyncio
import contextlib

import pytest
from meshpb.v1 import grammar_pb2 as pb
from meshpb.v1 import grammar_pb2_grpc

from meshkit.errors import Draining
from meshkit.frames import Verdict
from meshkit.health import Health
from meshkit.obs import Metrics, start_tracing
from meshkit.testing import GatewayProbe, serving, until
from meshkit.types import GrammarKind, GrammarSource
from scheduler_svc.core.config import SchedulerLimits
from scheduler_svc.loop import SchedulerLoop
from scheduler_svc.servicer import SchedulerServicer

SOURCE = GrammarSource(kind=GrammarKind.JSON_SCHEMA, text='{"type": "object"}')
BAD = GrammarSource(kind=GrammarKind.REGEX, text="(")


class GrammarService(grammar_pb2_grpc.GrammarServicer):
    """Answers by the text: "(" is invalid; `slow` compiles wait for `go`."""

    def __init__(self, boot):
        self.boot, self.asked, self.slow, self.draining = boot, [], False, False
        self.go = asyncio.Event()

    def add_to(self, server):
        grammar_pb2_grpc.add_GrammarServicer_to_server(self, server)

    async def Compile(self, request, context):
        self.asked.append(request)
        if self.draining:
            raise Draining("going away")
        if self.slow:
            await self.go.wait()
        if request.text == "(":
            return pb.CompileReply(verdict=pb.GRAMMAR_INVALID, place="1", message="unbalanced")
        return pb.CompileReply(verdict=pb.GRAMMAR_OK, grammar_id=b"g" * 16, grammar_rev="r1", compile_us=1500)

    async def Watch(self, request, context):
        yield pb.GrammarProcess(boot=self.boot, build="test", grammar_rev="r1")
        await asyncio.Event().wait()


@pytest.fixture(params=[10_000])
async def scheduler(tmp_path, request):
    metrics, limits = Metrics(), SchedulerLimits(compile_ms=request.param)
    address = f"unix:{tmp_path / 'grammar'}.sock"
    loop = SchedulerLoop(limits, Health(), metrics, start_tracing("scheduler"), address)
    async with serving(tmp_path, "scheduler", SchedulerServicer(loop).add_to) as listening:
        task = asyncio.create_task(loop.run())
        loop.address, loop.rendered = listening, lambda: metrics.render().decode()
        yield loop
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert loop.core.faults == {}
        loop.core.check()


@contextlib.asynccontextmanager
async def grammar_service(folder, boot=1):
    service = GrammarService(boot)
    async with serving(folder, "grammar", service.add_to):
        yield service


async def test_verdicts_come_with_the_answer_to_submit(scheduler, tmp_path):
    async with grammar_service(tmp_path) as service, GatewayProbe(scheduler.address) as gateway:
        await until(lambda: scheduler.core.state.grammars.boot == 1)
        _, good = await gateway.submit([5], grammar=SOURCE)
        assert (good.verdict, good.grammar_rev) == (Verdict.ACCEPTED, "r1")
        _, bad = await gateway.submit([5], grammar=BAD)
        assert (bad.verdict, bad.place, bad.message) == (Verdict.BAD_GRAMMAR, "1", "unbalanced")
        asked = [(r.kind, r.text) for r in service.asked]
        assert asked == [(SOURCE.kind.value, SOURCE.text), (BAD.kind.value, BAD.text)]
    numbers = scheduler.rendered()
    assert "sglang:grammar_compilation_time_seconds_count 1.0" in numbers
    assert 'v4mesh_grammar_compiles_total{kind="regex",verdict="INVALID"} 1.0' in numbers


async def test_a_service_that_comes_late_is_found(scheduler, tmp_path):
    async with GatewayProbe(scheduler.address) as gateway:
        waiting = asyncio.create_task(gateway.submit([5], grammar=SOURCE))
        await until(lambda: "sglang:num_grammar_queue_reqs 1.0" in scheduler.rendered())
        async with grammar_service(tmp_path):
            _, reply = await waiting
            assert reply.verdict is Verdict.ACCEPTED
    assert 'verdict="AWAY"' in scheduler.rendered()


@pytest.mark.parametrize("scheduler", [200], indirect=True)
async def test_a_compile_that_takes_too_long_is_refused_for_now(scheduler, tmp_path):
    async with grammar_service(tmp_path) as service, GatewayProbe(scheduler.address) as gateway:
        service.slow = True
        _, reply = await gateway.submit([5], grammar=SOURCE)
        assert reply.verdict is Verdict.GRAMMAR_LATER and reply.retry_after_ms and len(service.asked) == 1


async def test_a_new_process_gets_the_live_grammars_again(scheduler, tmp_path):
    async with GatewayProbe(scheduler.address) as gateway:
        async with grammar_service(tmp_path) as first:
            await gateway.submit([5], grammar=SOURCE)
            await until(lambda: scheduler.core.counters.get("grammar_boots") == 1)  # a compile may overtake the watch
            first.draining = True
            await gateway.submit([6], grammar=SOURCE)
            assert len(first.asked) == 1
        async with grammar_service(tmp_path, boot=2) as second:
            await until(lambda: second.asked)
            assert (second.asked[0].text, second.asked[0].grammar_rev) == (SOURCE.text, "r1")
            await until(lambda: scheduler.core.counters["grammar_boots"] == 2)


async def test_a_gateway_that_gives_up_finds_its_verdict_later(scheduler, tmp_path):
    async with grammar_service(tmp_path) as service, GatewayProbe(scheduler.address) as gateway:
        service.slow = True
        key = {"request_id": b"k" * 16, "grammar": SOURCE}
        first = asyncio.create_task(gateway.submit([5], **key))
        await until(lambda: service.asked)
        first.cancel()
        second = asyncio.create_task(gateway.submit([5], **key))
        await until(lambda: scheduler.core.counters.get("submits_repeated"))
        service.go.set()
        _, reply = await second
        assert reply.verdict is Verdict.ACCEPTED and len(service.asked) == 1


async def test_a_hand_over_waits_for_no_verdict(tmp_path):
    address = f"unix:{tmp_path / 'grammar'}.sock"
    loop = SchedulerLoop(SchedulerLimits(), Health(), Metrics(), start_tracing("scheduler"), address, hand_over=True)
    async with (
        grammar_service(tmp_path) as service,
        serving(tmp_path, "s", SchedulerServicer(loop).add_to) as listening,
    ):
        service.slow = True
        task = asyncio.create_task(loop.run())
        async with GatewayProbe(listening) as gateway:
            asking = asyncio.create_task(gateway.submit([1, 2], grammar=SOURCE))
            await until(lambda: service.asked)
            await asyncio.wait_for(loop.finish(), 1)
            with pytest.raises(Draining, match="takes over"):
                await asyncio.wait_for(asking, 1)
            await until(lambda: gateway.closed == "EOF")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
