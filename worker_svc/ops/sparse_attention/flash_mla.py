"""Attention by FlashMLA (Hopper): 584-byte rows in decode, a BF16 workspace in prefill, sink included.

The kernel takes any plan of key splits: `ops.split_plan` makes those of a step, one for each kind of layer, because
they depend on the lengths alone. Without one, the first layer of a kind makes it in one thread, for the others too.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from worker_svc.ops.kv_rows import HEAD_DIM, rows584

if TYPE_CHECKING:
    from worker_svc.ops.sparse_attention import DecodePlan


@cache
def package() -> Any:
    """The `flash_mla` module; ImportError names the package to install."""
    try:
        import flash_mla  # type: ignore[import-not-found, unused-ignore]
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise ImportError(f"sparse attention needs sgl-flash-mla==1.0.0 (--no-deps): {error}") from error
    return flash_mla


def decode_attention(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    window_len: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    entry_len: Tensor | None,
    sink: Tensor,
    scale: float,
    plan: "DecodePlan",
) -> Tensor:
    """See the door."""
    library = package()
    if plan.split is None:
        plan.split = library.get_mla_metadata()[0]
        plan.split.tile_scheduler_metadata, plan.split.num_splits = plan.parts, plan.splits
    out, _ = library.flash_mla_with_kvcache(
        q.unsqueeze(1),
        rows584(window),
        None,
        None,
        HEAD_DIM,
        plan.split,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=window_rows.unsqueeze(1),
        topk_length=window_len,
        attn_sink=sink,
        extra_k_cache=None if entries is None else rows584(entries),
        extra_indices_in_kvcache=None if entry_rows is None else entry_rows.unsqueeze(1),
        extra_topk_length=entry_len,
        use_legacy=True,
    )
    attended: Tensor = out.squeeze(1)
    return attended


def chunk_attention(
    q: Tensor, keys: Tensor, index: Tensor, sink: Tensor, scale: float, reach: Tensor | None = None
) -> Tensor:
    """See the door. Keys are read in pairs of blocks, 128 at a time: a shorter reach saves whole pairs."""
    out, _, _ = package().flash_mla_sparse_fwd(
        q,
        keys.unsqueeze(1),
        index.unsqueeze(1),
        scale,
        HEAD_DIM,
        sink,
        reach,
        use_legacy=True,
        return_log2_lse=False,
    )
    attended: Tensor = out
    return attended
