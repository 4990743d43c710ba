"""Launching a kernel while the one before it still runs (programmatic dependent launch, Hopper and later).

A kernel that calls `after_others` first touches memory only when everything before it in its stream is complete; so it
may be launched early, which hides its launch behind its predecessor's tail. `set_chained(True)`, before a graph is
captured, turns it on for every kernel that waits in this way; it is off by default.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl

from worker_svc.ops.triton_numbers import INTERPRETED

_state = {"chained": False}


@triton.jit
def after_others() -> None:
    """Wait for the kernels before this one; then let the next one be launched, which waits in the same way."""
    if not INTERPRETED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def set_chained(chained: bool) -> None:
    """Launch kernels that call `after_others` early, or not."""
    _state["chained"] = chained


def launch_options() -> dict[str, bool]:
    """Keyword arguments of a launch."""
    return {"launch_pdl": True} if _state["chained"] else {}
