"""RPCs that a worker calls."""

from typing import Any, cast

import grpc
from meshpb.v1 import grammar_pb2_grpc, scheduler_pb2_grpc


def attach_worker(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[Any, Any]:
    """Start Scheduler.AttachWorker: one stream for life, so it alone has no deadline."""
    stub = scheduler_pb2_grpc.SchedulerStub(channel)
    return cast("grpc.aio.StreamStreamCall[Any, Any]", stub.AttachWorker())


def attach_masks(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[Any, Any]:
    """Start Grammar.AttachWorker: one stream for life, as above."""
    stub = grammar_pb2_grpc.GrammarStub(channel)
    return cast("grpc.aio.StreamStreamCall[Any, Any]", stub.AttachWorker())
