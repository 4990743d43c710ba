"""What the GPU kernels can serve, and what KV memory costs in the formats that they read. Sizes only, no tensors."""

from dataclasses import dataclass
from typing import Final

from meshkit.types import PAGE_TOKENS
from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.errors import CheckpointError
from worker_svc.kv.layout import C4_CARRY, KvLayout
from worker_svc.ops.kv_rows import BF16_PAGE_BYTES, FP8_PAGE_BYTES, INDEX_PAGE_BYTES, KERNEL_PAGE

_FLOAT: Final = 4
_BF16: Final = 2


class ShapeError(CheckpointError):
    """The kernels exist for other shapes than this checkpoint's."""


def check_shapes(config: V4Config) -> None:
    """Raise ShapeError unless the row formats and 128-wide blocks of the kernels fit this model."""
    rules = (
        ("head_dim", config.head_dim, config.head_dim == 512, "must be 512 (rows of 584 bytes)"),
        ("qk_rope_head_dim", config.qk_rope_head_dim, config.qk_rope_head_dim == 64, "must be 64"),
        ("index_head_dim", config.index_head_dim, config.index_head_dim == 128, "must be 128"),
        ("sliding_window", config.sliding_window, config.sliding_window == 128, "must be 128"),
        ("hidden_size", config.hidden_size, config.hidden_size % 128 == 0, "must be a multiple of 128"),
        ("q_lora_rank", config.q_lora_rank, config.q_lora_rank % 128 == 0, "must be a multiple of 128"),
        ("o_lora_rank", config.o_lora_rank, config.o_lora_rank % 128 == 0, "must be a multiple of 128"),
        (
            "moe_intermediate_size",
            config.moe_intermediate_size,
            config.moe_intermediate_size % 128 == 0,
            "must be a multiple of 128",
        ),
        ("hc_mult", config.hc_mult, config.hc_mult == 4, "must be 4"),
    )
    wrong = [f"{name} is {value}; {remedy}" for name, value, holds, remedy in rules if not holds]
    if wrong:
        raise ShapeError(f"the GPU kernels cannot serve this model: {'; '.join(wrong)}; use --device cpu")


@dataclass(frozen=True, slots=True)
class GpuSizes:
    """Memory of one page, slot and tail over all layers, in bytes."""

    layout: KvLayout

    @property
    def kernel_page_bytes(self) -> int:
        """64 KV rows: 584 bytes each and padding in FP8, 1024 in BF16."""
        return BF16_PAGE_BYTES if self.layout.numerics.kv == "bf16" else FP8_PAGE_BYTES

    @property
    def bytes_per_page(self) -> int:
        """256 tokens of compressed entries and index keys."""
        c4, c128, size = self._layers(4), self._layers(128), self.kernel_page_bytes
        return c4 * (size + INDEX_PAGE_BYTES) + c128 * (PAGE_TOKENS // 128) * size // KERNEL_PAGE

    @property
    def bytes_per_slot(self) -> int:
        """Window rings and compressor states of one running sequence."""
        rings = len(self.layout.ratios) * self.layout.window_ring // KERNEL_PAGE * self.kernel_page_bytes
        states = sum(self.layout.state_ring(r) * self.layout.state_width(r) for r in self.layout.ratios if r)
        return rings + _FLOAT * states

    @property
    def bytes_per_tail(self) -> int:
        """What makes a prefix resumable: windows, C4 states and the streams before the boundary."""
        c = self.layout.config
        windows = len(self.layout.ratios) * self.layout.window // KERNEL_PAGE * self.kernel_page_bytes
        carried = self._layers(4) * C4_CARRY * self.layout.state_width(4)
        return windows + _FLOAT * carried + _BF16 * c.hc_mult * c.hidden_size

    def _layers(self, ratio: int) -> int:
        return sum(r == ratio for r in self.layout.ratios)
