"""Section [grammar] of the config file."""

from dataclasses import dataclass
from typing import Literal

from grammar_svc.children import ChildLimits
from grammar_svc.limits import SourceLimits
from meshkit.command import option
from meshkit.config import FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """Run the grammar service of one worker host: compiles grammars, computes token masks."""

    listen: str = option("unix:/run/v4mesh/grammar.sock", "Address: unix:PATH or HOST:PORT.")
    model: str = option("/models/DeepSeek-V4-Flash", "Model folder with tokenizer.json and config.json.")
    vocab_size: int = option(0, "Rows of the model's output layer, 0 to read config.json.")
    insecure: bool = option(False, "Allow plain TCP beyond loopback.")
    reflection: bool = option(False, "Describe the services to grpcurl and the like.")
    cache_bytes: int = option(512 << 20, "Bytes of compiled grammars to keep.")
    compilers: int = option(2, "Compiles at once, each in a process of its own.")
    spares: int = option(1, "Further compile processes that stand by for one that is killed.")
    soft_s: float = option(2.0, "Seconds a compile may take while others wait.")
    hard_s: float = option(10.0, "Seconds after which a compile is killed.")
    memory_bytes: int = option(1 << 30, "Memory of one compile.")
    queue: int = option(64, "Compiles under way and waiting before new ones are refused.")
    queue_tenant: int = option(4, "The same per tenant.")
    schema_bytes: int = option(64 << 10, "Largest JSON schema.")
    regex_bytes: int = option(4 << 10, "Longest regular expression.")
    ebnf_bytes: int = option(64 << 10, "Largest EBNF grammar.")
    json_whitespace: int = option(1, "White space between two JSON tokens at most, in characters; part of grammar_rev.")
    tools: int = option(128, "Most tools of one request.")
    ring_dir: str = option("/dev/shm", "Folder of the mask rings; a tmpfs.")
    ring_bytes: int = option(1 << 30, "Largest ring of one worker group.")
    drain_s: float = option(5.0, "Seconds that compiles under way get on SIGTERM.")
    metrics_port: int = option(0, "Port of /metrics on loopback, 0 for none.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least severe lines to log.")
    log_format: Literal["text", "json"] = option("text", "Form of the log lines.")

    def __post_init__(self) -> None:
        for name in ("cache_bytes", "compilers", "memory_bytes", "queue", "queue_tenant", "ring_bytes", "tools"):
            if getattr(self, name) < 1:
                raise FieldError(name, "must be positive")
        if self.spares < 0:
            raise FieldError("spares", "must be 0 or more")
        if not 0 <= self.json_whitespace <= 16:
            raise FieldError("json_whitespace", "must be 0 to 16")
        if not 0 < self.soft_s <= self.hard_s:
            raise FieldError("soft_s", "must be above 0 and at most hard_s")
        if not 0 <= self.metrics_port < 65536:
            raise FieldError("metrics_port", "must be 0 to 65535")

    def source_limits(self) -> SourceLimits:
        return SourceLimits(
            schema_bytes=self.schema_bytes,
            regex_bytes=self.regex_bytes,
            ebnf_bytes=self.ebnf_bytes,
            tools=self.tools,
        )

    def child_limits(self) -> ChildLimits:
        return ChildLimits(
            at_once=self.compilers,
            spares=self.spares,
            soft_s=self.soft_s,
            hard_s=self.hard_s,
            memory_bytes=self.memory_bytes,
        )
