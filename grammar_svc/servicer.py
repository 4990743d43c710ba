"""RPCs of the grammar service: decode, hand on, encode."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from meshpb.v1 import grammar_pb2 as pb
from meshpb.v1 import grammar_pb2_grpc

from grammar_svc.attach import Attachments
from grammar_svc.grammars import Grammars
from grammar_svc.verdict import Outcome, Verdict
from meshkit.errors import Draining, WireError
from meshkit.interceptors import abort_with
from meshkit.obs import Attribute, Metrics, Tracing

NAME = pb.DESCRIPTOR.services_by_name["Grammar"].full_name
MESSAGE_CHARS = 1000

# The stub knows attach methods as async generators only; ours read and write the context, which grpc.aio offers too.
Context = grpc.aio.ServicerContext[Any, Any]  # Any: each RPC has its own message types


class GrammarServicer(grammar_pb2_grpc.GrammarServicer):
    """Registered by `add_to`."""

    def __init__(
        self, grammars: Grammars, attachments: Attachments, metrics: Metrics, tracing: Tracing | None = None
    ) -> None:
        self._grammars, self._attachments = grammars, attachments
        self._tracing = tracing or Tracing()
        self._verdicts = metrics.counter(
            "v4mesh_grammar_verdicts_total", "Compile answers", verdict=[outcome.name for outcome in Outcome]
        )
        self._going = asyncio.Event()

    def drain(self) -> None:
        """Refuse new compiles; watchers are told by the end of their stream."""
        self._going.set()

    def add_to(self, server: grpc.aio.Server) -> None:
        grammar_pb2_grpc.add_GrammarServicer_to_server(self, server)

    async def Compile(self, request: pb.CompileRequest, context: Context) -> pb.CompileReply:
        if self._going.is_set():
            raise Draining("this grammar service is going away", retry_after_ms=500)
        mine, begin_ns = self._grammars.grammar_rev, time.monotonic_ns()
        if request.grammar_rev and request.grammar_rev != mine:
            message = f"this service compiles under {mine}; the output so far was made under another revision"
            verdict = Verdict(outcome=Outcome.INVALID, message=message, place="grammar_rev")
        else:
            verdict = await self._grammars.compile(request.kind, request.text, request.tenant[:256])
        self._verdicts.add(verdict=verdict.outcome.name)
        told: dict[str, Attribute] = {"v4mesh.verdict": verdict.outcome.name, "v4mesh.cached": verdict.cached}
        self._tracing.record("grammar.compile", request.traceparent, begin_ns, time.monotonic_ns(), told)
        return _reply(verdict, mine)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.GrammarProcess]:
        host = self._attachments.host
        yield pb.GrammarProcess(boot=host.boot, build=host.build, grammar_rev=self._grammars.grammar_rev)
        await self._going.wait()

    async def AttachWorker(self, requests: AsyncIterator[pb.MaskUp], context: Context) -> None:  # type: ignore[override]
        await context.send_initial_metadata(())  # tells the dialling side that the stream is open
        try:
            await self._attachments.serve(context)
        except WireError as error:
            await abort_with(context, error)


def _reply(verdict: Verdict, grammar_rev: str) -> pb.CompileReply:
    return pb.CompileReply(
        verdict=pb.GrammarVerdict.ValueType(int(verdict.outcome)),
        grammar_id=verdict.grammar_id,
        message=verdict.message[:MESSAGE_CHARS],
        place=verdict.place[:MESSAGE_CHARS],
        retry_after_ms=verdict.retry_after_ms,
        cached=verdict.cached,
        compile_us=verdict.compile_us,
        compiled_bytes=verdict.compiled_bytes,
        grammar_rev=grammar_rev,
    )
