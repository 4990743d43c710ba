"""A gateway on a real socket with a mesh made of scripts: deterministic tokens, no scheduler, no model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.app import GATEWAY, build_app
from gateway.config import GatewayConfig
from gateway.http_server import GatewayRunner
from gateway.journal.events import Emit, Ended, Refused, Start
from gateway.mesh import Instance, Sink
from gateway.service import Gateway
from gateway.text.tokenizer import Tokenizer
from meshkit.frames import SchedulerStatus, Verdict
from meshkit.models import DEFAULT_MODEL
from meshkit.types import FinishReason, ModelInfo, TokenLogprobs

VOCAB = 4096
EOS = 1


@dataclass
class Script:
    """What a choice says: ids in bursts, then how it ends. `hold` waits for `FakeMesh.release` before the first."""

    bursts: list[list[int]] = field(default_factory=list)
    finish: FinishReason = FinishReason.STOP
    error: tuple[str, str] = ("", "")
    hold: bool = False
    hold_after: int | None = None  # wait for `release` after so many bursts


class FakeMesh:
    """A `Mesh` that plays scripts. `say` makes the script of a choice from its Start."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.status: SchedulerStatus | None = SchedulerStatus(
            ready=True,
            model=ModelInfo(
                name="v4-nano", revision="r1", vocab_size=VOCAB, max_context=4096, eos_ids=(EOS,), kv_layout_id="k1"
            ),
        )
        self.say: Callable[[Start, int], Script] = lambda start, choice: self.text(f"Hello {choice} world.")
        self.refusal: tuple[Verdict, str, int] | tuple[Verdict, str, int, str] | None = None
        self.undecided = False  # no request is accepted yet
        self.starts: list[Start] = []
        self.gone: list[bytes] = []
        self.stopped: list[tuple[bytes, int, int]] = []
        self.aborted: list[bytes] = []
        self.cached = 0
        self.waited_ms = -1  # told with the first ids
        self.flushes = 0
        self.explained: list[tuple[tuple[bytes, ...], int]] = []
        self.open: dict[tuple[bytes, int], tuple[asyncio.Task[None], Sink]] = {}
        self.released = asyncio.Event()

    def text(self, text: str, *, think: str | None = None, burst: int = 1, **fields: Any) -> Script:
        """A script that says a text (after a thought), ended by EOS."""
        ids = self.tokenizer.encode(text)
        if think is not None:
            end = self.tokenizer.id_of("</think>")
            assert end is not None
            ids = [*self.tokenizer.encode(think), end, *ids]
        ids.append(EOS)
        return Script([ids[at : at + burst] for at in range(0, len(ids), burst)], **fields)

    @property
    def instances(self) -> tuple[Instance, ...]:
        return (Instance("script", self.status is not None, self.status, len(self.open)),)

    def start(self, start: Start, sink: Sink) -> None:
        self.starts.append(start)
        if self.refusal is not None:
            asyncio.get_running_loop().call_soon(sink, Refused(start.request_id, *self.refusal))
            return
        for choice in range(start.n):
            task = asyncio.get_running_loop().create_task(self._play(start, choice, sink))
            self.open[start.request_id, choice] = (task, sink)

    def accepted(self, request_id: bytes) -> bool:
        return not self.undecided

    async def _play(self, start: Start, choice: int, sink: Sink) -> None:
        script = self.say(start, choice)
        base = 0
        given = [[token] for token in start.params.given_ids]  # what the output begins with, whatever the script says
        for number, burst in enumerate([*given, *script.bursts], -len(given)):
            if (number == 0 and script.hold) or number == script.hold_after:
                await self.released.wait()
            await asyncio.sleep(0)
            left = start.params.max_tokens - base
            ids = tuple(burst[:left])
            asked = start.params.top_logprobs
            more = start.params.logprob_ids
            logprobs = tuple(self.logprobs(token, asked, more) for token in ids) if asked >= 0 else ()
            waited_ms = self.waited_ms if not base else -1
            sink(Emit(start.request_id, choice, base, ids, logprobs, self.cached, waited_ms))
            base += len(ids)
            if base >= start.params.max_tokens and ids[-1] != EOS:
                self._end(start, choice, Ended(start.request_id, choice, FinishReason.LENGTH))
                return
        self._end(start, choice, Ended(start.request_id, choice, script.finish, *script.error))

    def _end(self, start: Start, choice: int, ended: Ended) -> None:
        _, sink = self.open.pop((start.request_id, choice))
        sink(ended)

    @staticmethod
    def logprobs(token: int, asked: int, more: tuple[int, ...] = ()) -> TokenLogprobs:
        """Made up, but different for each token and rank."""
        others = [(token + rank) % VOCAB for rank in range(1, asked + 1)]
        values = (*(-0.25 * (rank + 1) for rank in range(asked + 1)), *(-float(token) for token in more))
        return TokenLogprobs((token, *others, *more), values)

    def _cancel(self, request_id: bytes, choice: int | None = None) -> list[tuple[int, Sink]]:
        found = [key for key in self.open if key[0] == request_id and choice in (None, key[1])]
        sinks = []
        for key in found:
            task, sink = self.open.pop(key)
            task.cancel()
            sinks.append((key[1], sink))
        return sinks

    def client_gone(self, request_id: bytes) -> None:
        self.gone.append(request_id)
        self._cancel(request_id)

    def stop_choice(self, request_id: bytes, choice: int, keep: int) -> None:
        self.stopped.append((request_id, choice, keep))
        self._cancel(request_id, choice)

    def abort(self, request_id: bytes) -> None:
        self.aborted.append(request_id)
        for choice, sink in self._cancel(request_id):
            sink(Ended(request_id, choice, FinishReason.ABORT))

    async def flush_cache(self) -> tuple[int, int]:
        self.flushes += 1
        return 3, len(self.open)

    async def explain(self, page_keys: tuple[bytes, ...], tokens: int) -> list[dict[str, Any]]:
        self.explained.append((page_keys, tokens))
        return [{"group": "w", "rank": 0, "why": "hit"}]


@dataclass
class Served:
    """A running gateway: its address, its insides and a client session."""

    url: str
    mesh: FakeMesh
    gateway: Gateway
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any, Any]:
        """Status, JSON, headers."""
        async with self.session.post(self.url + path, json=body, **options) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path: str, **options: Any) -> tuple[int, Any, Any]:
        async with self.session.get(self.url + path, **options) as response:
            return response.status, await response.json(), response.headers

    async def events(self, path: str, body: Any) -> list[str]:
        """The data of all events of a stream, comments left out."""
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            raw = (await response.read()).decode()
        assert raw.endswith("\n\n")
        blocks = raw.removesuffix("\n\n").split("\n\n")
        assert all(block.startswith(("data: ", ": ")) for block in blocks)
        return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEFAULT_MODEL)


@pytest.fixture
def mesh(tokenizer: Tokenizer) -> FakeMesh:
    return FakeMesh(tokenizer)


@asynccontextmanager
async def serve(mesh: FakeMesh, tokenizer: Tokenizer | None, **options: Any) -> AsyncIterator[Served]:
    app = build_app(mesh, tokenizer, GatewayConfig(model=DEFAULT_MODEL, **options))
    runner = GatewayRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession() as session:
            yield Served(url, mesh, app[GATEWAY], session)
    finally:
        for task, _ in mesh.open.values():
            task.cancel()
        await runner.cleanup()


@pytest.fixture
async def served(mesh: FakeMesh, tokenizer: Tokenizer) -> AsyncIterator[Served]:
    async with serve(mesh, tokenizer) as running:
        yield running
        assert not mesh.open, "a generation was left running"
        assert running.gateway.admission.streams == running.gateway.admission.waiting == 0


@pytest.fixture
def serve_with(mesh: FakeMesh, tokenizer: Tokenizer) -> Callable[..., Any]:
    """`async with serve_with(option=...) as served` for gateways with other options."""
    return lambda tokenizer=tokenizer, **options: serve(mesh, tokenizer, **options)
