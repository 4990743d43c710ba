"""RPCs of the scheduler: decode, hand to the loop, encode. Policies and state live in the core."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from meshpb.v1 import scheduler_pb2 as pb
from meshpb.v1 import scheduler_pb2_grpc, worker_pb2

from meshkit import wire
from scheduler_svc.core.explain import Explanation
from scheduler_svc.core.reuse import Decision
from scheduler_svc.loop import SchedulerLoop

NAME = pb.DESCRIPTOR.services_by_name["Scheduler"].full_name

# The stubs know attach methods as async generators only; ours read and write the context, which grpc.aio offers too.
Context = grpc.aio.ServicerContext[Any, Any]  # Any: each RPC has its own message types


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Registered by `add_to`."""

    def __init__(self, loop: SchedulerLoop) -> None:
        self._loop = loop

    def add_to(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, server)

    async def Submit(self, request: pb.SubmitRequest, context: Context) -> pb.SubmitReply:
        return wire.encode_submit_reply(await self._loop.submit(wire.decode_submit(request)))

    async def AttachGateway(self, requests: AsyncIterator[pb.GatewayUp], context: Context) -> None:  # type: ignore[override]
        await self._loop.attach("gateway", context)

    async def AttachWorker(self, requests: AsyncIterator[worker_pb2.WorkerUp], context: Context) -> None:  # type: ignore[override]
        await self._loop.attach("worker", context)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadReply:
        core = self._loop.core
        return pb.GetLoadReply(status=wire.put_status(core.status()), counters=core.load())

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        self._loop.drain()
        return pb.DrainReply()

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheReply:
        pages, open_requests = self._loop.flush()
        return pb.FlushCacheReply(pages=pages, open=open_requests)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainReply:
        keys = wire.decode_explain(request)
        told = self._loop.core.explain(keys, request.tokens)
        return pb.ExplainReply(ranks=[_put_explanation(*it) for it in told])


def _put_explanation(told: Explanation, decision: Decision) -> pb.Explanation:
    return pb.Explanation(
        group=told.pool[0],
        rank=told.pool[1],
        asked=told.asked,
        present=told.present,
        servable=told.servable,
        why=told.why,
        first_missing=told.first_missing,
        missing_key=told.missing_key,
        missing_classes=told.missing_classes,
        tier=told.tier,
        idle=told.idle,
        action=decision.action.name.lower(),
        start=decision.start,
    )
