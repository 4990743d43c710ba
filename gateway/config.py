"""The [gateway] section: what one gateway process is told at start.

Options here are what operators choose; the fixed bounds of the protocol stand in `gateway.limits`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gateway.limits import MIB, Limits
from meshkit.address import parse_address
from meshkit.command import option
from meshkit.config import FieldError

MOST_SCHEDULERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Serve HTTP for a mesh whose scheduler listens elsewhere."""

    model: Path = field(
        metadata={"help": "folder, hub id in a local cache, or name; config.json and tokenizer.json are read"}
    )
    listen_http: str = option("127.0.0.1:8000", "host:port or unix:PATH; port 0 picks a free one")
    listen_grpc: str = option("", "host:port or unix:PATH of the public gRPC service; empty: none")
    grpc_reflection: bool = option(True, "describe the public gRPC services to grpcurl and the like")
    scheduler: tuple[str, ...] = option(
        ("unix:/run/v4mesh/scheduler.sock",), "where the scheduler listens; of several model instances, comma separated"
    )
    served_model_name: tuple[str, ...] = option(
        (), "names, comma separated: the first is shown, the others are aliases"
    )
    dsv4_effort_revision: Literal["preview", "ga"] | None = option(
        None, "which efforts have a text; else the model says"
    )
    max_output_tokens: int | None = option(None, "upper bound of max_tokens; else what the context leaves")
    processes: int = option(1, "gateways that share the port, each with a loop of its own")
    hub: str = option("", "set by a parent with several processes: where they talk to each other")
    listen_fds: tuple[int, ...] = option(
        (), "set by a supervisor: listening sockets of listen_http that outlive this process, one per process"
    )
    sibling_fds: tuple[int, ...] = option(
        (), "set by a parent with several processes: the listening sockets of all, for when one of them is gone"
    )
    ready_fd: int = option(0, "set by a supervisor: listen when requests can be served, and say so there; 0: none")
    admin_api_key_file: Path | None = field(
        default=None, metadata={"help": "like api_key_file, of operators: flush, explain, server info need one of them"}
    )
    api_key_file: Path | None = field(
        default=None, metadata={"help": "lines `key` or `tenant key`; without it everybody is one tenant"}
    )
    api_profile: Literal["open", "deepseek"] = option(
        "open", "deepseek repeats the hosted service's refusals and ignored fields"
    )
    incremental_streaming_output: bool = option(False, "/generate streams deltas instead of the whole text so far")
    cors_origins: tuple[str, ...] = option((), "web pages that may ask, as https://host, comma separated; * is any")
    insecure: bool = option(False, "listen beyond loopback without keys")
    listen_admin: str = option(
        "", "host:port or unix:PATH for operators alone: probes, /metrics, /server_info, flush, explain; empty: none"
    )
    public_metrics: bool = option(False, "show /metrics and /server_info beyond loopback too")
    deterministic: bool = option(False, "repeated ids must be equal: a difference is counted as a fault")
    encode_threads: int = option(2, "threads that encode long prompts")
    drain_seconds: float = option(30.0, "how long open requests may go on after SIGTERM")
    max_body_bytes: int = option(16 * MIB, "largest request body")
    max_choices: int = option(8, "largest n")
    max_streams: int = option(4_096, "open generations of this process")
    max_waiting: int = option(1_024, "of them, those without a token yet")
    max_key_streams: int = option(64, "open generations of one API key, where keys are set")
    stored_responses: int = option(1_024, "responses with store: true kept in memory, the oldest go first; 0: none")
    stored_response_bytes: int = option(64 * MIB, "of all of them together")
    stored_response_seconds: float = option(86_400.0, "how long one is kept")
    request_seconds: float = option(3_600.0, "deadline of a request")
    stream_stall_seconds: float = option(30.0, "a client that reads nothing for so long is cut off")
    log_format: Literal["text", "json"] = option("text", "text or json")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "debug, info, warning or error")

    def __post_init__(self) -> None:
        ranges = {
            "max_output_tokens": (1, 1 << 30),
            "encode_threads": (1, 64),
            "processes": (1, 64),
            "drain_seconds": (0, 3_600),
            "max_body_bytes": (1_024, 64 * MIB),
            "max_choices": (1, 128),
            "max_streams": (1, 1 << 20),
            "max_waiting": (1, 1 << 20),
            "max_key_streams": (1, 1 << 20),
            "stored_responses": (0, 1 << 20),
            "stored_response_bytes": (1_024, 1 << 36),
            "stored_response_seconds": (1, 30 * 86_400),
            "request_seconds": (1, 14_400),
            "stream_stall_seconds": (0.01, 3_600),
        }
        if self.listen_fds and len(self.listen_fds) != self.processes:
            raise FieldError("listen_fds", f"{len(self.listen_fds)} sockets for {self.processes} processes")
        if self.sibling_fds and not (self.hub and set(self.listen_fds) <= set(self.sibling_fds)):
            raise FieldError("sibling_fds", "are the parent's to set, with hub, and listen_fds is one of them")
        if not 1 <= len(set(self.scheduler)) == len(self.scheduler) <= MOST_SCHEDULERS:
            raise FieldError("scheduler", f"must be 1 to {MOST_SCHEDULERS} different addresses")
        for address in (*self.scheduler, *((self.listen_admin,) if self.listen_admin else ())):
            parse_address(address)  # now, not at the first dial
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise FieldError(name, f"must be {low} to {high}")

    @property
    def limits(self) -> Limits:
        """The bounds of requests that follow from these options."""
        return Limits(
            body=self.max_body_bytes,
            choices=self.max_choices,
            choices_in_flight=max(64, self.max_choices),
            streams=self.max_streams,
            queue=self.max_waiting,
            tenant_streams=self.max_key_streams,
            deadline_seconds=self.request_seconds,
            stream_stall_seconds=self.stream_stall_seconds,
        )
