"""Index lists of one step, shared by all its layers: which KV rows each token reads, and which it writes.

Decode lists name rows of the pools; chunk lists name rows of the BF16 workspace that prefill attention reads. Both
come from the tokens' positions and the block table on the device, in one launch. A token at position -1 is padding: its
lists are -1 and its lengths 0. Scores and selection are not done here.
"""

from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from worker_svc.ops.step_lists import ref
from worker_svc.ops.step_lists.ref import ENTRIES_PER_PAGE, WINDOW

__all__ = ["ENTRIES_PER_PAGE", "WINDOW", "ChunkLists", "DecodeLists", "chunk_lists", "decode_lists"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLists:
    """Outputs of `decode_lists`, int32 and contiguous. `allocate` fills the lists with -1 once; after that only whole
    blocks of 64 up to a token's length are rewritten in `c128_rows`."""

    window_rows: Tensor  # [T, 128] window ring rows, oldest first, -1 behind window_len
    window_len: Tensor  # [T] 1..128, padding 0
    window_write: Tensor  # [T] ring row of the token itself, padding -1
    c4_len: Tensor  # [T] visible entries (p + 1) // 4
    c4_write: Tensor  # [T] entry row that the token closes, or -1
    c4_rows: Tensor  # [T, k] rows of all visible entries where c4_len <= k, else -1
    c128_rows: Tensor  # [T, W] rows of all visible entries
    c128_len: Tensor  # [T] (p + 1) // 128
    c128_write: Tensor  # [T]
    top_len: Tensor  # [T] min(c4_len, k): entries that an indexed layer reads
    scored: Tensor  # [T] max(c4_len, 1): entries that are scored; nobody reads the score of none
    pages: Tensor  # [T, W] the token's block table as far as its entries reach
    every: Tensor  # [T] 0 .. T - 1, a constant

    @staticmethod
    def allocate(tokens: int, max_context: int, device: torch.device | str, *, top_k: int = 512) -> "DecodeLists":
        """Lists for `tokens` tokens of sequences up to max_context tokens long."""
        whole = -(-max(1, max_context // 128) // 64) * 64
        return DecodeLists(
            window_rows=_filled(device, tokens, WINDOW),
            window_len=_filled(device, tokens),
            window_write=_filled(device, tokens),
            c4_len=_filled(device, tokens),
            c4_write=_filled(device, tokens),
            c4_rows=_filled(device, tokens, top_k),
            c128_rows=_filled(device, tokens, whole),
            c128_len=_filled(device, tokens),
            c128_write=_filled(device, tokens),
            top_len=_filled(device, tokens),
            scored=_filled(device, tokens),
            pages=_filled(device, tokens, max(1, -(-max_context // 256))),
            every=torch.arange(tokens, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLists:
    """Outputs of `chunk_lists`, int32 and contiguous. Where a token sees more than k entries, `ops.top_entries` fills
    their part of c4_index."""

    window_index: Tensor  # [T, 128] workspace rows, oldest first, -1 padded
    window_write: Tensor  # [T] ring row, -1 for tokens that a later one of the row overwrites
    top_k: int  # k
    c4_index: Tensor  # [T, 128 + K], K >= k a multiple of 128: window part; all entries if c4_len <= k, else -1
    c4_len: Tensor  # [T] visible entries
    c4_reach: Tensor  # [T] 128 + min(visible, k): how far the list reaches
    c4_write: Tensor  # [T]
    c128_index: Tensor  # [T, 128 + W]: window part, then all visible entries
    c128_len: Tensor  # [T] 128 + visible entries: how far the list reaches
    c128_write: Tensor  # [T]

    @staticmethod
    def allocate(tokens: int, max_context: int, device: torch.device | str, *, top_k: int = 512) -> "ChunkLists":
        """Lists for `tokens` tokens of sequences up to max_context tokens long; both lists in whole blocks of 128. One
        allocation, each list at a multiple of 16 bytes; what is in it is not known, for all of it gets written."""
        whole, chosen = (-(-size // 128) * 128 for size in (max(1, max_context // 128), top_k))
        shapes: dict[str, tuple[int, ...]] = {
            "window_index": (tokens, WINDOW),
            "c4_index": (tokens, WINDOW + chosen),
            "c128_index": (tokens, WINDOW + whole),
        }
        shapes |= dict.fromkeys(("window_write", "c4_len", "c4_reach", "c4_write"), (tokens,))
        shapes |= dict.fromkeys(("c128_len", "c128_write"), (tokens,))
        begins = list(accumulate((-(-prod(shape) // 4) * 4 for shape in shapes.values()), initial=0))
        every = torch.empty(begins[-1], dtype=torch.int32, device=device)
        lists = {
            name: every[begin : begin + prod(shape)].view(shape) for begin, (name, shape) in zip(begins, shapes.items())
        }
        return ChunkLists(top_k=top_k, **lists)


def decode_lists(
    positions: Tensor,
    slots: Tensor,
    block_table: Tensor,
    fresh_from: Tensor,
    write_from: Tensor,
    *,
    ring: int,
    out: DecodeLists,
) -> DecodeLists:
    """positions, slots int32 [T]; block_table int32 [slots, max_pages] of 256-token pages; fresh_from, write_from int32
    [slots]; ring = window rows per slot. Window keys below fresh_from do not exist; entries whose own window starts
    below write_from's are not written. Returns out."""
    _check(positions, slots, block_table, fresh_from, write_from)
    assert ring >= WINDOW, ring
    if positions.is_cuda:
        from worker_svc.ops.step_lists import triton

        triton.decode_lists(positions, slots, block_table, fresh_from, write_from, ring=ring, out=out)
    else:
        ref.decode_lists(positions, slots, block_table, fresh_from, write_from, ring, out)
    return out


def chunk_lists(
    positions: Tensor,
    slots: Tensor,
    last_position: Tensor,
    block_table: Tensor,
    fresh_from: Tensor,
    write_from: Tensor,
    own_row: Tensor,
    c4_base: Tensor,
    c128_base: Tensor,
    *,
    ring: int,
    out: ChunkLists,
) -> ChunkLists:
    """As `decode_lists`, for prefill. last_position [T]: position of the last token of the token's row in this step.
    own_row [T]: workspace row of the token's own key; the keys before it lie directly in front (the 127 or fewer before
    the chunk too). c4_base, c128_base [T]: workspace row of entry 0 of the token's sequence."""
    _check(positions, slots, block_table, fresh_from, write_from)
    for tensor in (last_position, own_row, c4_base, c128_base):
        assert tensor.dtype == torch.int32 and tensor.shape == positions.shape, (tensor.dtype, tensor.shape)
    args = (positions, slots, last_position, block_table, fresh_from, write_from, own_row, c4_base, c128_base)
    if positions.is_cuda:
        from worker_svc.ops.step_lists import triton

        triton.chunk_lists(*args, ring=ring, out=out)
    else:
        ref.chunk_lists(*args, ring, out)
    return out


def _filled(device: torch.device | str, *shape: int) -> Tensor:
    return torch.full(shape, -1, dtype=torch.int32, device=device)


def _check(positions: Tensor, slots: Tensor, table: Tensor, fresh_from: Tensor, write_from: Tensor) -> None:
    for tensor in (positions, slots, table, fresh_from, write_from):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous(), (tensor.dtype, tensor.shape)
    assert positions.shape == slots.shape and positions.dim() == 1 and table.dim() == 2
