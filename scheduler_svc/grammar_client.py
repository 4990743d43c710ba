"""The scheduler's side of the grammar service: Compile calls as the core asks for them, and one Watch stream for life.

No decisions: an answer or its absence becomes a `Compiled` event, the first word of a watched process a
`GrammarStarted`. When to try again is the core's.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, Final

import grpc
from meshpb.v1 import common_pb2, grammar_pb2_grpc
from meshpb.v1 import grammar_pb2 as pb

from meshkit.channel import open_channel
from meshkit.errors import BadRequest, DeadlineShort, MeshError
from meshkit.obs import Metrics, kv
from meshkit.shell import reason_of
from meshkit.types import GrammarKind
from scheduler_svc.core.events import Compile, CompileAnswer, Compiled, GrammarStarted, Outcome

REDIAL_S: Final = (0.05, 1.0)
"""Pause before Watch is opened again: at first, at most."""
_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_OUTCOMES: Final = {int(outcome): outcome for outcome in Outcome if outcome is not Outcome.UNSPECIFIED}
KINDS: Final = tuple(kind.name.lower() for kind in GrammarKind)

log = logging.getLogger(__name__)


class GrammarClient:
    """`post(event)` hands events to the core. Make it inside the event loop."""

    def __init__(self, address: str, post: Callable[[Any], None], metrics: Metrics) -> None:
        self._channel = open_channel(address)
        self._stub = grammar_pb2_grpc.GrammarStub(self._channel)
        self._post = post
        self._calls: set[asyncio.Task[None]] = set()
        self._took = metrics.histogram(
            "sglang:grammar_compilation_time_seconds", "Time to compile a grammar that was not cached", _BUCKETS
        )
        self._answered = metrics.counter(
            "v4mesh_grammar_compiles_total",
            "Answers of the grammar service by kind and verdict; AWAY: there was none",
            kind=KINDS,
            verdict=[*(outcome.name for outcome in Outcome), "AWAY"],
        )

    async def run(self) -> None:
        """Watch until cancelled, then give up what is under way."""
        try:
            await self._watch()
        finally:
            for task in self._calls:
                task.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
            await self._channel.close()

    def compile(self, effect: Compile) -> None:
        """Start a call; it ends in one `Compiled`."""
        task = asyncio.create_task(self._compile(effect))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _compile(self, effect: Compile) -> None:
        answer: CompileAnswer | None = None
        try:
            request = pb.CompileRequest(
                kind=common_pb2.GrammarKind.ValueType(effect.kind.value),
                text=effect.text,
                tenant=effect.tenant,
                grammar_rev=effect.grammar_rev,
                traceparent=effect.traceparent,
            )
            reply = await self._stub.Compile(request, timeout=effect.timeout_ms / 1000)
            answer = decode_answer(reply)
            if answer.outcome is Outcome.OK and not reply.cached:
                self._took.observe(reply.compile_us / 1e6)
        except DeadlineShort:
            answer = CompileAnswer(Outcome.TIMEOUT)
        except BadRequest as error:  # it cannot even be asked; asking again would not help
            answer = CompileAnswer(Outcome.INVALID, message=error.message)
        except (MeshError, grpc.aio.AioRpcError) as error:
            log.warning("compile failed", extra=kv(reason=reason_of(error)))
        self._answered.add(kind=effect.kind.name.lower(), verdict=answer.outcome.name if answer is not None else "AWAY")
        self._post(Compiled(effect.ticket, answer))

    async def _watch(self) -> None:
        """Open Watch again and again; each first word is told."""
        pause = REDIAL_S[0]
        while True:
            try:
                async for process in self._stub.Watch(pb.WatchRequest()):
                    log.info("grammar service", extra=kv(boot=process.boot, build=process.build))
                    self._post(GrammarStarted(process.boot))
                    pause = REDIAL_S[0]
            except grpc.aio.AioRpcError as error:
                log.debug("grammar service lost", extra=kv(reason=reason_of(error)))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(REDIAL_S[1], pause * 2)


def decode_answer(reply: pb.CompileReply) -> CompileAnswer:
    """A verdict that this build does not know, or an id of the wrong size, counts as a crash: it is asked for again."""
    outcome = _OUTCOMES.get(int(reply.verdict), Outcome.CRASHED)
    if outcome is Outcome.OK and len(reply.grammar_id) != 16:
        outcome = Outcome.CRASHED
    return CompileAnswer(outcome, reply.grammar_id, reply.grammar_rev, reply.message, reply.place, reply.retry_after_ms)
