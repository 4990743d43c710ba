"""The journal's shell over real gRPC against a scheduler played by hand: attach, submit, tokens, stop, cancel, loss."""

import asyncio
import signal
import socket
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import aiohttp
import grpc
import numpy as np
import pytest
from meshpb.v1 import scheduler_pb2_grpc

from gateway.journal.events import Emit, Ended, Refused, Start
from gateway.journal.journal import Journal, JournalConfig
from gateway.mesh_client import MeshClient
from meshkit import wire
from meshkit.frames import (
    Bye,
    CancelRows,
    Envelope,
    GatewayHello,
    GatewayHelloAck,
    Heartbeat,
    SchedulerStatus,
    StopRows,
    SubmitReply,
    TokenFrame,
    Verdict,
)
from meshkit.models import DEFAULT_MODEL
from meshkit.testing import ServiceProcess, serving, until
from meshkit.types import FinishReason, GrammarKind, GrammarSource, ModelInfo, RequestId, SamplingParams

MODEL = ModelInfo(name="m", revision="r", vocab_size=100, max_context=64, eos_ids=(1,), kv_layout_id="k")


class Scheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Answers Hello and Submit, keeps what it was told, sends tokens when the test says so."""

    def __init__(self, attach_id=7, verdict=Verdict.ACCEPTED, model=MODEL):
        self.attach_id, self.model = attach_id, model
        self.reply = SubmitReply(verdict, "no room" if verdict else "", 1500)
        self.submits, self.frames = [], []
        self.context = None

    async def Submit(self, request, context):
        self.submits.append(wire.decode_submit(request))
        return wire.encode_submit_reply(self.reply)

    async def AttachGateway(self, requests, context):
        await context.send_initial_metadata(())
        while (message := await context.read()) is not grpc.aio.EOF:
            frame = wire.decode(message).frame
            if isinstance(frame, GatewayHello):
                self.context = context
                await self.send(GatewayHelloAck(1, "test"))
                await self.send(SchedulerStatus(ready=True, model=self.model, running=3))
            elif isinstance(frame, Heartbeat):
                await self.send(Heartbeat())
            else:
                self.frames.append(frame)

    async def send(self, frame):
        await self.context.write(wire.encode(Envelope(self.attach_id, frame), wire.Link.GATEWAY_DOWN))

    async def tokens(self, choice, base, ids, finish=0):
        i32 = lambda *values: np.array(values, np.int32)  # noqa: E731
        await self.send(
            TokenFrame(
                step=1, rows=i32(choice.row), row_gens=i32(choice.row_gen), bases=i32(base), counts=i32(len(ids)),
                ids=i32(*ids), finishes=np.array([finish], np.uint8), cached=i32(0),
            )
        )  # fmt: skip


def start_of(n=1):
    return Start(
        request_id=RequestId(bytes(range(16))), prompt=np.array([5, 6], np.int32), page_keys=(),
        params=SamplingParams(max_tokens=10), seed=3, n=n, tenant="t", priority=0, deadline_ms=20_000,
    )  # fmt: skip


@asynccontextmanager
async def linked(address, **options):
    client = MeshClient(Journal(JournalConfig(name="g", boot=1, build="test"), Random(1)), address, **options)
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@asynccontextmanager
async def played(folder, scheduler):
    add = lambda server: scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, server)  # noqa: E731
    async with serving(folder, "s", add) as address:
        yield address


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


async def test_attach_submit_tokens_and_end(folder):
    scheduler = Scheduler()
    async with played(folder, scheduler) as address, linked(address) as client:
        assert client.status is None
        await until(lambda: client.status is not None and client.status.ready)
        assert client.status.model == MODEL and client.status.running == 3
        answers = []
        client.start(start_of(n=2), answers.append)
        await until(lambda: bool(scheduler.submits))
        submit = scheduler.submits[0]
        assert (submit.seed, submit.tenant, submit.prompt.tolist(), len(submit.choices)) == (3, "t", [5, 6], 2)
        for choice in submit.choices:
            await scheduler.tokens(choice, 0, [10, 11])
            await scheduler.tokens(choice, 2, [1], FinishReason.STOP)
        await until(lambda: sum(isinstance(a, Ended) for a in answers) == 2)
        for number in (0, 1):
            mine = [a for a in answers if a.choice == number]
            assert [token for a in mine[:-1] for token in a.ids] == [10, 11, 1]
            assert mine[-1] == Ended(submit.request_id, number, FinishReason.STOP)


async def test_choices_that_end_in_one_frame(folder):
    scheduler = Scheduler()
    async with played(folder, scheduler) as address, linked(address) as client:
        await until(lambda: client.status is not None)
        answers = []
        client.start(start_of(n=3), answers.append)
        await until(lambda: bool(scheduler.submits))
        choices = scheduler.submits[0].choices
        column = lambda values: np.array(list(values), np.int32)  # noqa: E731
        await scheduler.send(
            TokenFrame(
                step=1, rows=column(c.row for c in choices), row_gens=column(c.row_gen for c in choices),
                bases=column([0, 0, 0]), counts=column([1, 2, 0]), ids=column([4, 5, 1]), cached=column([2, 2, 2]),
                finishes=np.array([FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH], np.uint8),
            )
        )  # fmt: skip
        await until(lambda: sum(isinstance(a, Ended) for a in answers) == 3)
        assert [(a.choice, a.ids, a.cached_tokens) for a in answers if isinstance(a, Emit)] == [
            (0, (4,), 2),
            (1, (5, 1), 2),
        ]


async def test_stop_and_leave_tell_the_scheduler(folder):
    scheduler = Scheduler()
    async with played(folder, scheduler) as address, linked(address) as client:
        await until(lambda: client.status is not None)
        answers = []
        client.start(start_of(n=2), answers.append)
        await until(lambda: bool(scheduler.submits))
        first, second = scheduler.submits[0].choices
        await scheduler.tokens(first, 0, [10, 11, 12])
        await until(lambda: bool(answers))
        client.stop_choice(start_of().request_id, 0, 2)
        await until(lambda: bool(scheduler.frames))
        (stop,) = scheduler.frames
        assert isinstance(stop, StopRows) and (stop.rows.tolist(), stop.keeps.tolist()) == ([first.row], [2])
        client.client_gone(start_of().request_id)
        await until(lambda: len(scheduler.frames) == 2)
        cancel = scheduler.frames[1]
        assert isinstance(cancel, CancelRows) and cancel.rows.tolist() == [second.row]
        await scheduler.tokens(second, 0, [9])
        await scheduler.send(SchedulerStatus(ready=True, model=MODEL, running=9))
        await until(lambda: client.status.running == 9)
        assert len(answers) == 1, "nothing reaches a client that left"


async def test_a_refusal_reaches_the_sink(folder):
    scheduler = Scheduler(verdict=Verdict.QUEUE_FULL)
    async with played(folder, scheduler) as address, linked(address) as client:
        await until(lambda: client.status is not None)
        answers = []
        client.start(start_of(), answers.append)
        await until(lambda: bool(answers))
        assert answers == [Refused(start_of().request_id, Verdict.QUEUE_FULL, "no room", 1500)]


async def test_how_long_a_verdict_on_a_grammar_took_is_told(folder):
    scheduler, heard = Scheduler(), []
    async with played(folder, scheduler) as address, linked(address, on_grammar=heard.append) as client:
        await until(lambda: client.status is not None)
        answers = []
        client.start(start_of(), answers.append)
        await until(lambda: bool(scheduler.submits))
        grammar = GrammarSource(kind=GrammarKind.REGEX, text="a+")
        client.start(replace(start_of(), request_id=RequestId(b"g" * 16), grammar=grammar), answers.append)
        await until(lambda: bool(heard))
        assert len(scheduler.submits) == 2 and len(heard) == 1 and 0 < heard[0] < 5


async def test_before_the_first_attachment_requests_are_refused(folder):
    async with linked(f"unix:{folder}/s.sock") as client:
        answers = []
        client.start(start_of(), answers.append)
        assert client.status is None
        assert [a.verdict for a in answers] == [Verdict.NO_WORKER]


async def test_a_lost_scheduler_is_dialled_again_and_the_request_goes_on(folder):
    first, second = Scheduler(), Scheduler(attach_id=8)
    answers = []
    async with linked(f"unix:{folder}/s.sock") as client:
        async with played(folder, first):
            await until(lambda: client.status is not None)
            client.start(start_of(), answers.append)
            await until(lambda: bool(first.submits))
            await first.tokens(first.submits[0].choices[0], 0, [10, 11])
            await until(lambda: bool(answers))
        await until(lambda: not client.status.ready)
        async with played(folder, second):
            await until(lambda: bool(second.submits))
            again = second.submits[0]
            assert (again.attempt, again.attach_id, again.choices[0].emitted) == (2, 8, (10, 11))
            await second.tokens(again.choices[0], 1, [11, 12], FinishReason.LENGTH)
            await until(lambda: any(isinstance(a, Ended) for a in answers))
    assert [token for a in answers if isinstance(a, Emit) for token in a.ids] == [10, 11, 12]


async def test_leaving_says_bye(folder):
    scheduler = Scheduler()
    async with played(folder, scheduler) as address:
        async with linked(address) as client:
            await until(lambda: client.status is not None)
        await until(lambda: bool(scheduler.frames))
        assert isinstance(scheduler.frames[-1], Bye)


async def test_a_broken_frame_costs_the_stream_only(folder):
    scheduler = Scheduler()
    async with played(folder, scheduler) as address, linked(address) as client:
        await until(lambda: client.status is not None)
        before = scheduler.context
        message = wire.encode(Envelope(7, GatewayHelloAck(1, "x")), wire.Link.GATEWAY_DOWN)
        message.tokens.rows = b"\x01\x02\x03"
        await before.write(message)
        await until(lambda: scheduler.context is not before and client.status.ready)


@asynccontextmanager
async def gateway_process(folder, address, *flags):
    """A gateway process that serves the played scheduler; yields process and URL once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / "gateway.log"
    args = ("--listen-http", f"127.0.0.1:{port}", "--scheduler", address, "--model", str(DEFAULT_MODEL), *flags)
    with ServiceProcess("gateway", *args, log=log) as process:
        await until(lambda: "tokenizer loaded" in log.read_text(), 20)
        async with aiohttp.ClientSession() as session:
            for _ in range(200):
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.05)
            yield process, url, session


async def open_stream(scheduler, session, url):
    """A stream that has got one token, and the choice to send it more."""
    answering = asyncio.create_task(session.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True}))
    await until(lambda: bool(scheduler.submits))
    choice = scheduler.submits[0].choices[0]
    await scheduler.tokens(choice, 0, [70])
    return await answering, choice


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_open_streams_finish_before_the_process_leaves(folder, number):
    scheduler = Scheduler(model=replace(MODEL, vocab_size=4096))
    async with played(folder, scheduler) as address, gateway_process(folder, address) as (process, url, session):
        response, choice = await open_stream(scheduler, session, url)
        process.process.send_signal(number)
        await until(lambda: "draining" in process.log.read_text())
        async with aiohttp.ClientSession() as other:
            with pytest.raises(aiohttp.ClientConnectorError):
                await other.get(f"{url}/health")
        await scheduler.tokens(choice, 1, [71, 1], FinishReason.STOP)
        raw = (await response.read()).decode()
        assert '"finish_reason":"stop"' in raw and raw.endswith("data: [DONE]\n\n")
        assert await asyncio.to_thread(process.process.wait, 10) == (130 if number == signal.SIGINT else 0)
        assert isinstance(scheduler.frames[-1], Bye)


async def test_streams_that_outlast_the_grace_end_with_abort(folder):
    scheduler = Scheduler(model=replace(MODEL, vocab_size=4096))
    flags = ("--drain-seconds", "0.2")
    async with (
        played(folder, scheduler) as address,
        gateway_process(folder, address, *flags) as (process, url, session),
    ):
        response, _ = await open_stream(scheduler, session, url)
        process.process.send_signal(signal.SIGTERM)
        raw = (await response.read()).decode()
        assert '"finish_reason":"abort"' in raw and raw.endswith("data: [DONE]\n\n")
        assert await asyncio.to_thread(process.process.wait, 10) == 0
        assert any(isinstance(frame, CancelRows) for frame in scheduler.frames)
