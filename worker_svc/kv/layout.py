"""Sizes of the KV pools: what one page, slot and tail holds in each layer, and what it costs in bytes.

page  256 tokens of compressed entries: 64 main and 64 indexer rows per C4 layer, 2 rows per C128 layer
slot  a running sequence's window ring, compressor state rings and boundary marks
tail  what makes a prefix resumable at a page boundary: 128 window rows of every layer, 4 C4 states, the streams
"""

import hashlib
from dataclasses import dataclass

import torch

from meshkit.types import PAGE_TOKENS
from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.kv.formats import (
    RowFormat,
    bf16_rows,
    fp4_index_rows,
    fp8_index_rows,
    fp8_kv_rows,
    fp32_rows,
)

C4_CARRY = 4
"""States that cross a page boundary in a C4 layer: the previous group, whose a halves the next entry uses."""
_RING_STEP = 64
_FLOAT_BYTES = 4
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Everything that the shape and meaning of the pools follow from."""

    config: V4Config
    numerics: Numerics
    max_verify: int = 8  # tokens of the longest verify row: 1 + drafts

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratio of each layer that has pools."""
        return self.config.layer_ratios

    @property
    def window(self) -> int:
        return self.config.sliding_window

    @property
    def window_ring(self) -> int:
        """Window rows per slot and layer: one verify row beyond the window, in whole kernel pages of 64."""
        return _round_up(self.window + self.max_verify - 1, _RING_STEP)

    def state_ring(self, ratio: int) -> int:
        """Compressor states per slot: window w of the longest emission plus the drafts that may be taken back."""
        slots = 2 * ratio if ratio == 4 else ratio
        return _round_up(slots + self.max_verify - 2, 8)

    def state_width(self, ratio: int) -> int:
        """Floats of one state: (kv, z) of the main compressor, then of the indexer's where there is one."""
        if ratio == 0:
            return 0
        halves = 2 if ratio == 4 else 1
        indexer = 2 * halves * self.config.index_head_dim if ratio == 4 else 0
        return 2 * halves * self.config.head_dim + indexer

    def kv_format(self) -> RowFormat:
        """Window rows and main entries."""
        c, name = self.config, self.numerics.kv
        if name == "fp32":
            return fp32_rows(c.head_dim)
        if name == "bf16":
            return bf16_rows(c.head_dim)
        return fp8_kv_rows(c.nope_head_dim, c.qk_rope_head_dim, _FP8[name])

    def index_format(self) -> RowFormat:
        """Indexer keys."""
        width, name = self.config.index_head_dim, self.numerics.indexer
        if name == "none":
            return fp32_rows(width)
        return fp4_index_rows(width) if name == "fp4" else fp8_index_rows(width)

    @property
    def bytes_per_page(self) -> int:
        """Memory of one page over all layers."""
        main, index = self.kv_format().bytes_per_row, self.index_format().bytes_per_row
        rows = [(PAGE_TOKENS // ratio, main + (index if ratio == 4 else 0)) for ratio in self.ratios if ratio]
        return sum(count * size for count, size in rows)

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one running sequence beside its pages: rings, states and the boundary mark."""
        rings = len(self.ratios) * self.window_ring * self.kv_format().bytes_per_row
        states = sum(self.state_ring(ratio) * self.state_width(ratio) for ratio in self.ratios if ratio)
        return rings + _FLOAT_BYTES * (states + self._carry_floats)

    @property
    def bytes_per_tail(self) -> int:
        """Memory of one tail."""
        rows = len(self.ratios) * self.window * self.kv_format().bytes_per_row
        return rows + _FLOAT_BYTES * self._carry_floats

    @property
    def _carry_floats(self) -> int:
        """C4 states of all layers and the streams: what a boundary mark or tail keeps in FP32."""
        carried = sum(C4_CARRY * self.state_width(ratio) for ratio in self.ratios if ratio == 4)
        return carried + self.config.hc_mult * self.config.hidden_size

    @property
    def layout_id(self) -> str:
        """Digest that changes whenever the meaning of a page's or tail's contents does."""
        c = self.config
        parts = (
            "v1",
            self.numerics.describe(),
            self.ratios,
            self.window,
            c.head_dim,
            c.qk_rope_head_dim,
        )
        text = repr((*parts, c.index_head_dim, c.hc_mult, c.hidden_size, PAGE_TOKENS, C4_CARRY))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
