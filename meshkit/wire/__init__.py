"""Frames of `meshkit.frames` to the protobuf messages of protos/meshpb/v1 and back: pure, without I/O.

`encode`/`decode` work on messages (what a gRPC servicer holds), `dumps`/`loads` on bytes. Every column is checked on
the way in: dtype, length against its partners, sums, sign, size. What breaks a rule raises `WireError` naming the
field: its stream is closed and no state has changed. Arbitrary bytes never raise anything else.
Decoded columns are read-only views into the message's bytes. Semantics (is this slot known?) belong to the cores.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, EncodeError, Message
from meshpb.v1 import scheduler_pb2, worker_pb2

from meshkit.errors import WireError
from meshkit.frames import Envelope, Submit, SubmitReply
from meshkit.wire import gateway_link, worker_link
from meshkit.wire.gateway_link import get_status, put_status

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Link",
    "decode",
    "decode_explain",
    "decode_submit",
    "decode_submit_reply",
    "dumps",
    "encode",
    "encode_submit",
    "encode_submit_reply",
    "get_status",
    "loads",
    "put_status",
]

MAX_MESSAGE_BYTES: Final = 16 << 20

T = TypeVar("T")
M = TypeVar("M")

StreamMessage = scheduler_pb2.GatewayUp | scheduler_pb2.GatewayDown | worker_pb2.WorkerUp | worker_pb2.WorkerDown


class Link(Enum):
    """The four directions of the two attach streams; the value is the message that travels there."""

    GATEWAY_UP = scheduler_pb2.GatewayUp
    GATEWAY_DOWN = scheduler_pb2.GatewayDown
    WORKER_UP = worker_pb2.WorkerUp
    WORKER_DOWN = worker_pb2.WorkerDown


_PUT: Final[Mapping[Link, Callable[[Envelope], StreamMessage]]] = {
    Link.GATEWAY_UP: gateway_link.put_up,
    Link.GATEWAY_DOWN: gateway_link.put_down,
    Link.WORKER_UP: worker_link.put_up,
    Link.WORKER_DOWN: worker_link.put_down,
}

_GET: Final[Mapping[type[Message], Callable[[Any], Envelope]]] = {  # Any: each function takes its own message type
    scheduler_pb2.GatewayUp: gateway_link.get_up,
    scheduler_pb2.GatewayDown: gateway_link.get_down,
    worker_pb2.WorkerUp: worker_link.get_up,
    worker_pb2.WorkerDown: worker_link.get_down,
}


def encode(envelope: Envelope, link: Link) -> StreamMessage:
    """Frame to message. A frame that this link does not carry, or a number beyond its field, is a WireError."""
    return _checked(_PUT[link], envelope)


def decode(message: StreamMessage) -> Envelope:
    """Message to frame, every column checked."""
    return _GET[type(message)](message)


def encode_submit(submit: Submit) -> scheduler_pb2.SubmitRequest:
    return _checked(gateway_link.put_submit, submit)


def decode_explain(message: scheduler_pb2.ExplainRequest) -> tuple[bytes, ...]:
    """Page keys of the prompt asked about."""
    return gateway_link.get_explain(message)


def decode_submit(message: scheduler_pb2.SubmitRequest) -> Submit:
    return gateway_link.get_submit(message)


def encode_submit_reply(reply: SubmitReply) -> scheduler_pb2.SubmitReply:
    return _checked(gateway_link.put_submit_reply, reply)


def decode_submit_reply(message: scheduler_pb2.SubmitReply) -> SubmitReply:
    return gateway_link.get_submit_reply(message)


def dumps(envelope: Envelope, link: Link) -> bytes:
    """Frame to bytes; more than 16 MiB is a WireError, since no peer would take it."""
    message = encode(envelope, link)
    try:
        data = message.SerializeToString()
    except EncodeError as error:
        raise WireError(f"{link.name}: {error}") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"{link.name}: {len(data)} bytes, at most {MAX_MESSAGE_BYTES} travel")
    return data


def loads(data: bytes, link: Link) -> Envelope:
    """Bytes to frame; whatever the bytes are, the only error is WireError."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"{link.name}: {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are taken")
    try:
        message = link.value.FromString(data)
    except DecodeError as error:
        raise WireError(f"{link.name}: not a {link.value.DESCRIPTOR.name}: {error}") from error
    return decode(message)


def _checked(put: Callable[[T], M], value: T) -> M:
    try:
        return put(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise WireError(f"{type(value).__name__}: {error}") from error
