"""Section [scheduler] of the config file, and the core's limits that follow from it."""

from dataclasses import dataclass
from typing import Literal

from meshkit.address import parse_address
from meshkit.command import option
from meshkit.config import FieldError
from scheduler_svc.core.config import SchedulerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Run the scheduler of one model instance: gateways and workers dial it."""

    listen: str = option("unix:/run/v4mesh/scheduler.sock", "Address: unix:PATH or HOST:PORT.")
    insecure: bool = option(False, "Allow plain TCP beyond loopback.")
    reflection: bool = option(False, "Describe the services to grpcurl and the like.")
    standby: bool = option(False, "Stand by for the scheduler that serves at this socket; take over when it ends.")
    hand_over: bool = option(False, "On SIGTERM leave at once: whoever serves here next goes on with what runs.")
    workers: tuple[str, ...] = option((), "Names of the worker groups to expect, comma separated.")
    grammar: str = option("", "Address of the grammar service; empty: constrained requests are refused.")
    depth: int = option(2, "Step frames in a worker's hands at once, 1 to 3.")
    chunk_tokens: int = option(2048, "Most tokens in one step; the worker's own limit also binds.")
    queue_requests: int = option(4096, "Waiting choices before new ones are refused.")
    queue_bytes: int = option(1 << 30, "Bytes of waiting prompts before new ones are refused.")
    policy: Literal["fcfs", "lpm", "priority"] = option(
        "fcfs", "Who is next: by arrival, longest cached prefix first, or urgent ones preempting others."
    )
    conservativeness: float = option(0.0, "Share of expected output that admission keeps room for, 0 to 1.")
    itl_factor: float = option(2.0, "Prefill may make a decode step so many times longer.")
    first_token_s: float = option(600.0, "Requests that would wait longer for their first token are refused.")
    tenant_choices: int = option(0, "Choices one key may have waiting and running, 0 for no limit.")
    tenant_queue_bytes: int = option(0, "Bytes of prompts one key may have waiting, 0 for no limit.")
    prefix_cache: bool = option(True, "Requests share the KV pages of their common prefixes, within tenant and salt.")
    tail_windows: int = option(0, "Resume points inside a prompt beside its end and branches; 0: one per 32k.")
    evict_policy: Literal["lru"] = option("lru", "What the prefix cache drops first.")
    drain_s: float = option(30.0, "Seconds that running requests get on SIGTERM.")
    metrics_port: int = option(0, "Port of /metrics on loopback, 0 for none.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least severe lines to log.")
    log_format: Literal["text", "json"] = option("text", "Form of the log lines.")

    def __post_init__(self) -> None:
        if self.grammar:
            parse_address(self.grammar)
        if self.standby and parse_address(self.listen).path is None:
            raise FieldError("standby", "needs a unix socket: there is no lock for TCP addresses")
        if not 1 <= self.depth <= 3:
            raise FieldError("depth", "must be 1, 2 or 3")
        for name in ("chunk_tokens", "queue_requests", "queue_bytes"):
            if getattr(self, name) < 1:
                raise FieldError(name, "must be positive")
        for name in ("conservativeness", "tenant_choices", "tenant_queue_bytes"):
            if getattr(self, name) < 0:
                raise FieldError(name, "must be 0 or more")
        if not self.itl_factor > 1:
            raise FieldError("itl_factor", "must be above 1: at 1 there is no time for prefill")
        if not self.first_token_s > 0:
            raise FieldError("first_token_s", "must be positive")
        if self.tail_windows < 0:
            raise FieldError("tail_windows", "must be 0 (automatic) or positive")
        if not 0 <= self.metrics_port < 65536:
            raise FieldError("metrics_port", "must be 0 to 65535")

    def limits(self, build: str) -> SchedulerLimits:
        """What the core gets to know of these options."""
        return SchedulerLimits(
            depth=self.depth,
            chunk_tokens=self.chunk_tokens,
            workers=self.workers,
            build=build,
            queue_requests=self.queue_requests,
            queue_bytes=self.queue_bytes,
            policy=self.policy,
            conservativeness=self.conservativeness,
            itl_factor=self.itl_factor,
            first_token_ms=int(self.first_token_s * 1000),
            tenant_choices=self.tenant_choices,
            tenant_queue_bytes=self.tenant_queue_bytes,
            prefix_cache=self.prefix_cache,
            tail_windows=self.tail_windows,
        )
