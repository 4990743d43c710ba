"""Which backend gives a row the same bits whatever stands beside it: deterministic mode of the GPU forward.

Per operation, in order, the backends whose sums cannot follow the batch, with the reason. `switch` makes the registry
choose among them and the operations leave out what follows the number of rows (products for few rows, splits that
fill the chip). That a reason holds on a given GPU is measured: `worker_svc.gpu.self_check`. Decode and chunk steps
share one program per operation, compiled for the same kinds of arguments (a program for rows of another format may add
the same numbers in another order), so a sequence that is computed again from its tokens gets its bits again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from worker_svc.ops import registry


@dataclass(frozen=True, slots=True)
class Recipe:
    """A backend, and why a row's result does not depend on other rows."""

    backend: str
    reason: str


def _triton(reason: str) -> tuple[Recipe, ...]:
    return (Recipe("triton", reason),)


_TOKEN = "a program works on one token; its sums have one shape"
_NO_SUMS = "integers, or maxima, which have no order"

RECIPES: Mapping[str, tuple[Recipe, ...]] = {
    "fp8_gemm": (
        Recipe("deep_gemm", "every tile walks all of K in steps of 128; few rows and grouped products take no other"),
        Recipe("triton", "every program walks all of K in steps of 128, for 64 rows however many there are"),
    ),
    "bf16_gemm": (
        Recipe("deep_gemm", "every tile walks all of K in one order"),
        Recipe("triton", "every program walks all of K in one order, for 64 rows however many there are"),
    ),
    "experts": (Recipe("humming", "use_batch_invariant: no stream-K, no K split over warps, one K step at all sizes"),),
    "large_experts": (Recipe("humming", "large steps run the product of the small ones"),),
    "sparse_attention": _triton(
        "64 keys at a time, 256 to a split, splits joined in order; FP8 rows in decode and chunks"
    ),
    "index_scores": _triton("a query meets 64 keys by itself, in pages, in chunks too"),
    "paged_attention": _triton("not run: it rounds once less than chunks do; sparse_attention runs in its place"),
    "top_entries": _triton("exact selection, lowest entry first among equals"),
    "latent_rows": _triton(f"{_TOKEN}; decode has a workspace like chunks"),
    "query_heads": _triton("four heads of one token to a program, the indexer's always in a launch of their own"),
    "compress_step": _triton("an entry is made by one program from its window, out of ring or batch; states after it"),
    "attention_output": _triton("four heads of one token to a program, however many tokens"),
    "kv_rows": _triton(_NO_SUMS),
    "step_lists": _triton(_NO_SUMS),
    "slot_step": _triton(_NO_SUMS),
    "hyper_boundary": _triton("one cut of the channels at all numbers of tokens, parts added in order"),
    "topk_gate": _triton("one token to a program, logits whole"),
    "expert_sort": _triton(_NO_SUMS),
    "swiglu_middle": _triton("each value by itself; a block's scale is a maximum"),
    "quant_fp8": _triton(_NO_SUMS),
    "skinny_gemm": _triton("run by fp8_gemm and bf16_gemm, 64 rows to a program"),
    "sample": _triton("a row never looks at another"),
}

_on = False


def on() -> bool:
    """True if operations are to be batch-invariant. On CPU tensors too: plain torch then multiplies in fixed shapes."""
    return _on


def switch(wanted: bool, chosen: Mapping[str, str] | None = None) -> None:
    """Of this process, as pins are; what a graph has captured stays as it is. `chosen`: other than the first recipes.

    KernelError if a pin contradicts, or no recipe of an operation can run here.
    """
    global _on
    required = {} if not wanted else first_choices() | dict(chosen or {})
    registry.require(required)
    _on = wanted


@contextmanager
def switched(wanted: bool) -> Iterator[None]:
    """The mode inside a block, as it was behind it."""
    was, required = _on, registry.required()
    switch(wanted)
    try:
        yield
    finally:
        switch(was, required if was else None)


def first_choices() -> dict[str, str]:
    """The first recipe of every operation that can run here; nothing where there is no GPU."""
    if registry.chip() == 0:
        return {}
    return {op: candidates(op)[0] for op in RECIPES}


def candidates(op: str) -> list[str]:
    """Backends of one operation that can be tried, best first. KernelError naming the operation if there is none."""
    recipes, pinned = [recipe.backend for recipe in RECIPES[op]], registry.pinned(op)
    if pinned and pinned not in recipes:
        raise registry.KernelError(
            f"--kernel {op}={pinned} with --deterministic: its results follow the batch; there is: {', '.join(recipes)}"
        )
    reasons = {name: registry.obstacle(name) for name in ([pinned] if pinned else recipes)}
    able = [name for name, reason in reasons.items() if not reason]
    if not able:
        why = ", ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise registry.KernelError(f"--deterministic: no backend of {op} can run here ({why})")
    return able
