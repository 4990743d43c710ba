"""Section [worker] of the config file."""

from dataclasses import dataclass
from typing import Literal

from meshkit.address import parse_address
from meshkit.command import option
from meshkit.config import FieldError

AUTOMATIC = ("slots", "pages", "tails", "kv_memory", "max_step_tokens", "threads", "scheduler_wait_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Run one worker group: load a model and execute the steps of the scheduler that it dials."""

    scheduler: str = option("unix:/run/v4mesh/scheduler.sock", "Address of the scheduler.")
    grammar: str = option("", "Address of this host's grammar service; none: constrained requests fail.")
    scheduler_wait_s: float = option(0.0, "Give up if there is no scheduler for so long after start, 0 = never.")
    listen: str = option("", "Address for health checks (default: GROUP.sock beside the scheduler's socket).")
    insecure: bool = option(False, "Allow plain TCP beyond loopback for --listen.")
    group: str = option("worker", "Name of this worker group; unique per scheduler.")
    model: str = option("", "Model folder or hub id found on this machine (default: the shipped V4-nano).")
    served_model_name: str = option("", "Name that clients see (default: the checkpoint's own).")
    backend: Literal["model", "sim"] = option("model", "sim: no model, time of Flash on H200, tokens from a hash.")
    device: Literal["auto", "cpu", "cuda"] = option("cpu", "Where to compute; auto = the GPU if there is one.")
    quantization: str = option("auto", "Run-time quantisation; auto = exact maths on dequantised weights.")
    kv_cache_dtype: str = option("auto", "Format of the KV cache.")
    indexer_dtype: str = option("auto", "Format of the indexer's keys.")
    deterministic: bool = option(False, "Bit-equal results whatever else is in the batch; slower.")
    torch_compile: bool = option(
        False, "CPU: fuse what lies between products with torch's compiler (GPU: it lies in kernels)."
    )
    torch_compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = option(
        "default", "Options that torch's compiler gets."
    )
    slots: int = option(0, "Choices that run at once, 0 = 16, simulated 256.")
    pages: int = option(0, "KV pages of 256 tokens, 0 = as many as kv_memory holds.")
    tails: int = option(0, "Resumable prefix ends kept, spares of running slots included; 0 = 4 per slot.")
    kv_memory: int = option(0, "Bytes for KV, 0 = a quarter of the free memory, at most 4 GiB.")
    max_step_tokens: int = option(0, "Most tokens in one step, 0 = measured so that a step takes half a second.")
    threads: int = option(0, "CPU threads, 0 = one per physical core.")
    sim_efficiency: float = option(0.6, "Simulated: share of the roofline that kernels reach.")
    sim_gpus: int = option(1, "Simulated: GPUs that share each step evenly.")
    sim_step_ms: float = option(0.0, "Simulated: milliseconds of every step, 0 = by its rows and tokens.")
    sim_tokens: int = option(0, "Simulated: tokens of an answer on average, 0 = always max_tokens.")
    sim_spin: bool = option(
        False, "Simulated: wait by spinning, start a step only when the one before was seen to end."
    )
    kernel: str = option(
        "", "Pinned GPU backends, without effect on a CPU: OP=BACKEND,...; `v4mesh doctor --kernels` lists them."
    )
    kernel_cache: str = option("", "Folder of compiled GPU kernels (default: the user's cache).")
    jit: bool = option(True, "Compile GPU kernels that the cache lacks; off: refuse to start without its manifest.")
    jit_recompile: bool = option(False, "Ignore the kernel cache: compile everything into a folder of its own.")
    autotune: bool = option(True, "Take the choices that `v4mesh precache --tune` measured; off: the built-in ones.")
    autotune_cache: str = option("", "Folder of what was measured (default: with the kernels).")
    metrics_port: int = option(0, "Port of /metrics on loopback, 0 for none.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least severe lines to log.")
    log_format: Literal["text", "json"] = option("text", "Form of the log lines.")

    def __post_init__(self) -> None:
        if self.grammar:
            parse_address(self.grammar)  # now, not at the first dial
        for name in (*AUTOMATIC, "sim_step_ms", "sim_tokens"):
            if getattr(self, name) < 0:
                raise FieldError(name, "must be 0 (automatic) or positive")
        if not 0 < self.sim_efficiency <= 1:
            raise FieldError("sim_efficiency", "must be above 0 and at most 1")
        if self.sim_gpus < 1:
            raise FieldError("sim_gpus", "at least 1")
        if not self.group or "/" in self.group or len(self.group) > 64:
            raise FieldError("group", "must be a short name without /")

    @property
    def health_address(self) -> str:
        """Where health checks are answered."""
        if self.listen:
            return self.listen
        scheduler = parse_address(self.scheduler)
        return "127.0.0.1:0" if scheduler.path is None else f"unix:{scheduler.path.parent / self.group}.sock"
