"""For tests and benchmarks: a clock turned by hand, real servicers in one process, a gateway made by hand, processes.

Servers listen on unix sockets in a folder that pytest gives; nothing here is imported by a service.
"""

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from meshpb.v1 import scheduler_pb2_grpc

from meshkit import wire
from meshkit.channel import open_channel
from meshkit.config import environment
from meshkit.frames import (
    Envelope,
    Frame,
    GatewayHello,
    GatewayHelloAck,
    Heartbeat,
    MovedRows,
    SchedulerStatus,
    Submit,
    SubmitChoice,
    SubmitReply,
    TokenFrame,
    Verdict,
)
from meshkit.health import READY, Health
from meshkit.server import Serving, start_server
from meshkit.types import PROTO_REV, FinishReason, GrammarSource, RequestId, SamplingParams


class FakeClock:
    """A clock that stands still until told otherwise."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, *, ms: int = 0, ns: int = 0) -> None:
        self._now_ns += ms * 1_000_000 + ns


@contextlib.asynccontextmanager
async def serving(
    folder: Path, name: str, add_services: Callable[[grpc.aio.Server], None], health: Health | None = None
) -> AsyncIterator[str]:
    """A started server for these services; yields its address. Stops at once on leaving."""
    spec = Serving(listen=f"unix:{folder / name}.sock")
    server, address = await start_server(spec, health or Health(), add_services)
    try:
        yield str(address)
    finally:
        await server.stop(None)


async def until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Return as soon as `condition()` holds; AssertionError after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not so within {timeout_s} s: {condition}"
        await asyncio.sleep(0.005)


class GatewayProbe:
    """The gateway's side of a scheduler by hand: attaches, beats, submits, collects tokens by row and checks them.

    A gap, an overlap or a second end in a row raises AssertionError in the reader, shown by `closed`.
    """

    def __init__(self, address: str, name: str = "probe") -> None:
        self._address, self._name = address, name
        self._rows = itertools.count()
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason] = {}
        self.errors: dict[int, str] = {}
        self.moved: list[MovedRows] = []
        self.status: SchedulerStatus | None = None
        self.attach_id = 0
        self.closed: str | None = None  # how the stream ended, None while it is open

    async def __aenter__(self) -> "GatewayProbe":
        self._channel = open_channel(self._address)
        self.stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self.call: Any = self.stub.AttachGateway()
        await self.send(GatewayHello(self._name, 7, "test", PROTO_REV))
        self.reader = asyncio.create_task(self._read())
        self.beats = asyncio.create_task(self._beat())
        await until(lambda: self.attach_id or self.closed)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (self.reader, self.beats):
            task.cancel()
        await asyncio.gather(self.reader, self.beats, return_exceptions=True)
        self.call.cancel()
        await self._channel.close()

    async def send(self, frame: Frame) -> None:
        await self.call.write(wire.encode(Envelope(self.attach_id, frame), wire.Link.GATEWAY_UP))

    async def submit(
        self,
        prompt: Iterable[int],
        *,
        n: int = 1,
        attempt: int = 1,
        attach_id: int | None = None,
        request_id: bytes | None = None,
        grammar: GrammarSource | None = None,
        **params: Any,
    ) -> tuple[list[int], SubmitReply]:
        """Rows of the choices and the scheduler's answer; `params` are those of SamplingParams."""
        rows = [next(self._rows) for _ in range(n)]
        submit = Submit(
            attach_id=self.attach_id if attach_id is None else attach_id,
            request_id=RequestId(request_id or os.urandom(16)),
            attempt=attempt,
            choices=tuple(SubmitChoice(choice, row, 1) for choice, row in enumerate(rows)),
            params=SamplingParams(**params),
            seed=1,
            remaining_ms=60_000,
            prompt=np.array(list(prompt), np.int32),
            grammar=grammar,
        )
        return rows, wire.decode_submit_reply(await self.stub.Submit(wire.encode_submit(submit), timeout=5))

    async def accepted(self, prompt: Iterable[int], **options: Any) -> list[int]:
        """Rows of a request that must be accepted."""
        rows, reply = await self.submit(prompt, **options)
        assert reply.verdict is Verdict.ACCEPTED, reply
        return rows

    async def _read(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self._take(wire.decode(message))
            self.closed = "EOF"
        except grpc.aio.AioRpcError as error:
            self.closed = error.code().name
        except AssertionError as error:
            self.closed = f"wrong tokens: {error}"
            raise

    def _take(self, envelope: Envelope) -> None:
        match envelope.frame:
            case GatewayHelloAck():
                self.attach_id = envelope.attach_id
            case SchedulerStatus() as status:
                self.status = status
            case MovedRows() as moved:
                self.moved.append(moved)
            case TokenFrame() as frame:
                self._take_tokens(frame)

    def _take_tokens(self, frame: TokenFrame) -> None:
        at = 0
        for index, row in enumerate(frame.rows.tolist()):
            count = int(frame.counts[index])
            have = self.tokens.setdefault(row, [])
            assert frame.bases[index] == len(have), f"row {row} has {len(have)} ids, base is {frame.bases[index]}"
            have += frame.ids[at : at + count].tolist()
            at += count
            if frame.finishes[index]:
                assert row not in self.finished, f"row {row} ended twice"
                self.finished[row] = FinishReason(int(frame.finishes[index]))
        for error in frame.errors:
            self.errors[int(frame.rows[error.row_index])] = error.code

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            await self.send(Heartbeat())


class ServiceProcess:
    """A service started as `python -m MODULE ARGS`; stderr goes to `log`. Killed on leaving if it still runs."""

    def __init__(self, module: str, *args: str, log: Path, pass_fds: Sequence[int] = ()) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self.log = log
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *args],
                stderr=stderr,
                env={**environment(), "PYTHONPATH": path},
                pass_fds=pass_fds,
            )

    def __enter__(self) -> "ServiceProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def end(self, number: int, timeout_s: float = 15.0) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def mapped_files(self) -> list[str]:
        """Shared objects in the process's memory."""
        lines = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        return sorted({line.split()[-1] for line in lines if ".so" in line})

    async def ready(self, address: str, timeout_s: float = 60.0, service: str = READY) -> None:
        """Wait until the process answers SERVING at `address`."""
        end = time.monotonic() + timeout_s
        async with open_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < end:
                assert self.process.poll() is None, f"exit {self.process.returncode}: {self.log.read_text()}"
                with contextlib.suppress(Exception):  # not listening yet
                    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0)
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await asyncio.sleep(0.05)
        raise AssertionError(f"not ready within {timeout_s} s: {self.log.read_text()}")
