"""Is the operators' guide's command line understood? Counts flags and variables that `v4mesh serve` does not parse.

Runs the launch command and then every flag and variable alone through the real command line, without starting services.
"""

import contextlib
import io
import os
import shlex
from unittest import mock

from meshkit.cli.flag_table import FLAGS, VARIABLES
from meshkit.cli.main import main
from meshkit.models import DEFAULT_MODEL

TITLE = "flags and variables of the operators' guide: understood, in effect, waiting for a part"
LAUNCH = (
    f"serve --model-path {DEFAULT_MODEL} --tp 4 --ep-size 8 --enable-expert-parallel --enable-deepep "
    "--enable-two-batch-overlap --kv-cache-dtype fp8 --quantization fp4 --enable-torch-compile "
    "--speculative-algorithm MTP --speculative-num-steps 1 --moe-dp-size 4 --attention-dp-size 2 "
    "--trust-remote-code --host 0.0.0.0 --port 30000"
)
# One value per flag and variable of the guide that takes one; a second source beside the table, on purpose.
VALUES = {
    "--model-path": str(DEFAULT_MODEL),
    "--host": "0.0.0.0",
    "--port": "30000",
    "--trust-remote-code": "",
    "--tp": "4",
    "--ep-size": "1",
    "--enable-expert-parallel": "",
    "--enable-deepep": "",
    "--enable-two-batch-overlap": "",
    "--moe-fp8-communication": "",
    "--moe-dp-size": "1",
    "--attention-dp-size": "2",
    "--attention-cp-size": "2",
    "--kv-cache-dtype": "fp8_e5m2",
    "--quantization": "w4a8",
    "--enable-torch-compile": "",
    "--speculative-algorithm": "EAGLE",
    "--speculative-num-steps": "1",
    "--speculative-eagle-model-path": "/draft",
    "DEEPGEMM_ENABLE_JIT": "1",
    "DEEPGEMM_FORCE_RECOMPILE": "1",
    "DEEPGEMM_CACHE_DIR": "/cache",
    "FLASHINFER_AUTOTUNE": "1",
    "FLASHINFER_AUTOTUNE_CACHE_DIR": "/cache",
    "SGLANG_MOE_BACKEND": "flashinfer_trtllm",
    "SGLANG_SCHEDULE_CONSERVATIVENESS": "0.5",
    "SGLANG_TORCH_COMPILE_MODE": "max-autotune",
    "SGLANG_ELASTIC_MEMORY_POOL": "1",
    "SGLANG_HICACHE_L2_SIZE": "64GB",
    "SGLANG_HICACHE_L3_URL": "redis://cache:6379",
    "SGLANG_RADIX_CACHE_TARGET_SLIDING_WINDOW": "128",
    "SGLANG_RADIX_CACHE_EVICT_POLICY": "lru",
}


def understood(args: list[str], variables: dict[str, str]) -> bool:
    """True if the command line accepts this; prints what it said otherwise."""
    said = io.StringIO()
    with (
        mock.patch.dict(os.environ, variables),  # noqa: TID251 - sets, to try the command as a user does
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
    ):
        status = main([*args, "--launcher", "print"])
    if status:
        print(f"{shlex.join(args)} {variables}: exit {status}: {said.getvalue()}")
    return status == 0


def run(args: list[str]) -> dict[str, float | int | str]:
    """Metrics: unrecognised (must be 0), in_effect, waiting, launch_ok."""
    unrecognised = 0
    for name, value in VALUES.items():
        if name.startswith("--"):
            ok = understood(["serve", name, *([value] if value else [])], {})
        else:
            ok = understood(["serve"], {name: value})
        unrecognised += not ok
    entries = [*FLAGS, *VARIABLES]
    return {
        "unrecognised": unrecognised + len(VALUES.keys() - {e.name for e in entries}),
        "launch_ok": int(understood(shlex.split(LAUNCH), {})),
        "flags": sum(n.startswith("--") for n in VALUES),
        "variables": sum(not n.startswith("--") for n in VALUES),
        "in_effect": sum(not e.needs for e in entries),
        "waiting_for_a_part": sum(bool(e.needs) for e in entries),
    }
