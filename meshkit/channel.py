"""gRPC channel and server options, measured and set in this one place; `open_channel` for clients.

`grpc.keepalive_timeout_ms` alone does nothing in this grpcio: `grpc.http2.ping_timeout_ms` is what notices a dead
host (7 s with these values). It notices hosts, not loops: a blocked Python process still acks pings, so every stream
has an application heartbeat beside it. Without `max_pending_requests` a burst of new RPCs is shed as CANCELLED.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

import grpc

from meshkit.address import Address, parse_address
from meshkit.interceptors import DeadlineClient

Options = tuple[tuple[str, int | str], ...]

MAX_MESSAGE_BYTES: Final = 16 << 20

_BOTH: Final[Options] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
)

CLIENT_OPTIONS: Final[Options] = (
    *_BOTH,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

SERVER_OPTIONS: Final[Options] = (
    *_BOTH,
    # Must be below the client's keepalive time, else clients are killed for "too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 2000),
    ("grpc.server.max_pending_requests", 16384),
    ("grpc.server.max_pending_requests_hard_limit", 32768),
    ("grpc.so_reuseport", 0),  # two servers on one port would split the calls silently
)

# Several replicas behind one name: spread calls and leave out those whose health says NOT_SERVING.
REPLICA_CONFIG: Final = json.dumps(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": "v4mesh.ready"}}
)


def open_channel(target: str | Address, *, replicas: bool = False, pool: str = "") -> grpc.aio.Channel:
    """A lazily connecting channel. Channels with different `pool` names never share a connection.

    Unary calls need a deadline and raise `MeshError` classes instead of AioRpcError; streams are untouched.
    """
    address = parse_address(target) if isinstance(target, str) else target
    options: list[tuple[str, Any]] = list(CLIENT_OPTIONS)  # Any: grpc's own type for option values
    if replicas:
        options.append(("grpc.service_config", REPLICA_CONFIG))
    if pool:
        options.append(("v4mesh.pool", pool))
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (DeadlineClient(),)
    if address.path is not None:
        credentials = grpc.local_channel_credentials(grpc.LocalConnectionType.UDS)
        return grpc.aio.secure_channel(str(address), credentials, options, interceptors=interceptors)
    return grpc.aio.insecure_channel(str(address), options, interceptors=interceptors)
