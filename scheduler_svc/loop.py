"""The scheduler's shell: streams and calls to events, the core's effects back. No decisions."""

import asyncio
import random
import secrets
from dataclasses import replace
from typing import Final

from meshkit.core import Called, Reply
from meshkit.errors import Draining
from meshkit.frames import Submit, SubmitReply
from meshkit.health import Health
from meshkit.obs import Metrics, Tracing
from meshkit.quiet import quiet_collector
from meshkit.shell import Context, Peer, Shell
from meshkit.wire import Link
from scheduler_svc.core.config import SchedulerLimits
from scheduler_svc.core.events import Compile, Drain, Drained, Flush
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.grammar_client import GrammarClient
from scheduler_svc.spans import RequestSpans

DOWN: Final[dict[Peer, Link]] = {"gateway": Link.GATEWAY_DOWN, "worker": Link.WORKER_DOWN}


class SchedulerLoop:
    """Owns the core; `servicer` calls in, `__main__` runs it. Make it inside the event loop."""

    def __init__(
        self,
        limits: SchedulerLimits,
        health: Health,
        metrics: Metrics,
        tracing: Tracing,
        grammar: str = "",
        *,
        hand_over: bool = False,
    ) -> None:
        """`hand_over`: another scheduler follows at this address at once, so nothing is waited for at the end."""
        limits = replace(limits, grammar=bool(grammar))
        self.core = Scheduler(limits, random.Random(secrets.randbits(128)), secrets.randbits(64) | 1)
        self.shell = Shell(RequestSpans(self.core, tracing), self._effect, metrics)
        self._health = health
        self._hand_over = hand_over
        self._calls: dict[int, asyncio.Future[SubmitReply]] = {}
        self._call = 0
        self._drained = asyncio.Event()
        self._grammar = GrammarClient(grammar, self.shell.post, metrics) if grammar else None
        self._grammar_queue = metrics.gauge(
            "sglang:num_grammar_queue_reqs", "Requests that wait for their grammar to be compiled"
        )

    async def run(self) -> None:
        """The core's life; also tells the health service whether a worker serves."""
        tasks = [asyncio.create_task(self._watch_ready())]
        if self._grammar is not None:
            tasks.append(asyncio.create_task(self._grammar.run()))
        try:
            async with quiet_collector(self._busy):
                await self.shell.run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _busy(self) -> bool:
        """A worker has frames in its hands."""
        return any(worker.inflight for worker in self.core.state.workers.values())

    async def submit(self, request: Submit) -> SubmitReply:
        self._call += 1
        call = self._call
        reply: asyncio.Future[SubmitReply] = asyncio.get_running_loop().create_future()
        self._calls[call] = reply
        self.shell.post(Called(call, request))
        try:
            return await reply
        finally:
            self._calls.pop(call, None)

    async def attach(self, peer: Peer, context: Context) -> None:
        """Serve one stream until either side ends it."""
        await self.shell.serve(peer, DOWN[peer], context)

    def drain(self) -> None:
        """Stop admitting; accepted requests go on."""
        self.shell.post(Drain())

    def flush(self) -> tuple[int, int]:
        """Empty the prefix cache unless requests are open. Returns (pages given back, open requests)."""
        load = self.core.load()
        if load["requests"]:
            return 0, load["requests"]
        self.shell.post(Flush())
        return load["pages_cached"], 0

    async def finish(self) -> None:
        """Drain, wait until nothing runs, say Bye on every stream; or the last at once, for a successor to go on."""
        try:
            if self._hand_over:
                self._give_up_calls()
            else:
                self.drain()
                await self._drained.wait()
        finally:
            self.shell.farewell("the scheduler is shutting down")

    def _give_up_calls(self) -> None:
        """Whoever waits for a grammar's verdict asks the next scheduler; it must not wait for the one to leave."""
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(Draining("another scheduler takes over"))

    def _effect(self, effect: object) -> None:
        match effect:
            case Reply(call=call, reply=reply):
                waiting = self._calls.get(call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
            case Compile():
                assert self._grammar is not None, "the core asks for grammars only where there is a service"
                self._grammar.compile(effect)
            case Drained():
                self._drained.set()
            case _:
                raise AssertionError(f"unknown effect {effect}")

    async def _watch_ready(self) -> None:
        while True:
            await self._health.set_ready(self.core.status().ready)
            self._grammar_queue.put(self.core.state.grammars.pending)
            await asyncio.sleep(0.1)
