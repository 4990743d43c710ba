"""GPU memory before anything is loaded: weights, KV pools and work space of a checkpoint, from its config.json alone.

Every number is arithmetic on the config in the formats that the GPU kernels read, so `v4mesh plan` and the worker can
say, before a byte is read, what fits and what does not. Estimates (activations, libraries) are marked as such.
Pure: no torch, no files, no environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshkit.types import PAGE_TOKENS

GPUS: Mapping[str, int] = {  # bytes that a driver shows, of one card
    "H100": 85_520_809_984,
    "H200": 150_754_820_096,
    "H20": 102_625_181_696,
    "B200": 191_514_017_792,
    "B300": 288_000_000_000,
}
LIBRARIES = 2_500_000_000
"""CUDA context, loaded kernels, captured graphs (estimate)."""
RESERVE = 0.03
"""Share of the card that stays free: fragmentation, and what the driver takes."""
KERNEL_PAGE = 64  # KV rows
KV_PAGE_BYTES = {"fp8_e4m3": 37_440, "bf16": 65_536}  # 64 rows of 584 bytes and padding; of 1024 bytes
INDEX_PAGE_BYTES = 64 * 132
C4_CARRY = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """The config keys that memory depends on, under their own names."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    hc_mult: int
    max_position_embeddings: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> Shape:
        """From a parsed config.json; ValueError names the first key that is missing or no number."""
        values: dict[str, Any] = {}
        for name in Shape.__slots__:
            value = config.get(name)
            if name == "compress_ratios":
                if not isinstance(value, list) or not all(isinstance(r, int) for r in value):
                    raise ValueError("config.json: compress_ratios must be a list of numbers")
                values[name] = tuple(value)
            elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"config.json: {name} must be a number, not {value!r}")
            else:
                values[name] = value
        if len(values["compress_ratios"]) < values["num_hidden_layers"]:
            raise ValueError("config.json: compress_ratios must have an entry per layer")
        return Shape(**values)

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratio of each trunk layer."""
        return self.compress_ratios[: self.num_hidden_layers]


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the plan: what it is, its bytes, how they come about."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows, and what is left for pages."""

    lines: tuple[Line, ...]
    total: int  # of the card
    usable: int
    page_bytes: int
    pages: int

    @property
    def used(self) -> int:
        """All rows, without pages."""
        return sum(line.bytes for line in self.lines)

    @property
    def tokens(self) -> int:
        """Tokens of compressed KV that the pages hold."""
        return self.pages * PAGE_TOKENS

    @property
    def fits(self) -> bool:
        """True if everything fits together, with pages for at least one request."""
        return self.pages >= 2 and self.used + self.pages * self.page_bytes <= self.usable

    @property
    def short(self) -> int:
        """Bytes that are missing; below zero where it fits."""
        return self.used + max(2, self.pages) * self.page_bytes - self.usable

    def table(self, card: str) -> list[str]:
        """The rows as text, pages and the sum last."""
        out = [f"{line.name:30} {line.bytes / 1e9:9.3f} GB  {line.how}" for line in self.lines]
        kept = self.pages * self.page_bytes
        pages = f"{self.pages} pages x {_mb(self.page_bytes)} = {self.tokens} tokens, {PAGE_TOKENS} a page"
        out.append(f"{'pages':30} {kept / 1e9:9.3f} GB  {pages}")
        total = f"of {self.total / 1e9:.2f} GB ({card}), of which {self.usable / 1e9:.2f} GB are planned with"
        return [*out, f"{'together':30} {(self.used + kept) / 1e9:9.3f} GB  {total}"]


def plan(
    shape: Shape,
    total: int,
    *,
    slots: int,
    step_tokens: int,
    tails: int = 0,
    kv: str = "fp8_e4m3",
    gpus: int = 1,
    pages: int = 0,
) -> Plan:
    """Memory of one of `gpus` cards, experts spread over them, everything else on each; pages 0: as many as fit."""
    tails = tails or 4 * slots
    slot, tail, page = slot_bytes(shape, kv), tail_bytes(shape, kv), page_bytes(shape, kv)
    lines = (
        *weight_lines(shape, gpus),
        Line("slots", slots * slot, f"{slots} running requests x {_mb(slot)}: window rings, compressor states"),
        Line("tails", tails * tail, f"{tails} resumable prefix ends x {_mb(tail)}"),
        Line(
            "activations",
            activation_bytes(shape, step_tokens),
            f"a step of {step_tokens} tokens (estimate)",
        ),
        Line("libraries", LIBRARIES, "CUDA context, kernels, graphs (estimate)"),
    )
    usable = int(total * (1 - RESERVE))
    left = usable - sum(line.bytes for line in lines)
    return Plan(lines, total, usable, page, pages or max(0, left // page))


def weight_lines(shape: Shape, gpus: int = 1) -> tuple[Line, ...]:
    """Weights as the GPU holds them: FP4 experts, FP8 dense, BF16 the rest."""
    s = shape
    experts = -(-s.n_routed_experts // gpus)
    expert = 3 * s.hidden_size * s.moe_intermediate_size
    routed = expert // 2 + expert // 32
    dense = sum(_dense(s, ratio) for ratio in s.ratios)
    mixers = s.num_hidden_layers * 2 * (2 + s.hc_mult) * s.hc_mult * s.hc_mult * s.hidden_size * 4
    vocab = 2 * s.vocab_size * s.hidden_size * 2
    tables = s.num_hash_layers * s.vocab_size * s.num_experts_per_tok * 4
    return (
        Line(
            "experts",
            s.num_hidden_layers * experts * routed,
            f"{s.num_hidden_layers} layers x {experts} experts x {_mb(routed)}, FP4 with a scale per 32",
        ),
        Line("attention and shared experts", dense, "FP8 with a scale per 128 x 128, compressors and routers BF16"),
        Line("embedding and head", vocab, f"2 x {s.vocab_size} x {s.hidden_size} BF16"),
        Line("mixers and tables", mixers + tables, "hyper-connections, hash routing"),
    )


def _dense(s: Shape, ratio: int) -> int:
    """Bytes of one layer beside its routed experts and mixers."""
    heads = s.num_attention_heads * s.head_dim
    fp8 = s.q_lora_rank * s.hidden_size + heads * s.q_lora_rank + s.head_dim * s.hidden_size
    fp8 += s.o_lora_rank * heads + s.hidden_size * s.o_groups * s.o_lora_rank
    fp8 += s.n_shared_experts * 3 * s.hidden_size * s.moe_intermediate_size
    bf16 = s.n_routed_experts * s.hidden_size
    if ratio == 4:
        fp8 += s.index_n_heads * s.index_head_dim * s.q_lora_rank
        bf16 += (4 * s.head_dim + 4 * s.index_head_dim + s.index_n_heads) * s.hidden_size
    elif ratio:
        bf16 += 2 * s.head_dim * s.hidden_size
    return fp8 + fp8 // (128 * 128) * 4 + 2 * bf16


def page_bytes(shape: Shape, kv: str) -> int:
    """256 tokens of compressed entries and index keys over all layers."""
    size = KV_PAGE_BYTES[kv]
    c4, c128 = (sum(r == ratio for r in shape.ratios) for ratio in (4, 128))
    return c4 * (size + INDEX_PAGE_BYTES) + c128 * (PAGE_TOKENS // 128) * size // KERNEL_PAGE


def slot_bytes(shape: Shape, kv: str) -> int:
    """Window rings and compressor states of one running request (one token per step)."""
    ring = _round_up(shape.sliding_window, KERNEL_PAGE)
    rings = len(shape.ratios) * ring // KERNEL_PAGE * KV_PAGE_BYTES[kv]
    states = sum(_round_up((2 * r if r == 4 else r) - 1, 8) * _state_width(shape, r) for r in shape.ratios if r)
    return rings + 4 * states


def tail_bytes(shape: Shape, kv: str) -> int:
    """What makes a prefix resumable: windows, C4 states, the streams before the boundary."""
    windows = len(shape.ratios) * shape.sliding_window // KERNEL_PAGE * KV_PAGE_BYTES[kv]
    carried = sum(r == 4 for r in shape.ratios) * C4_CARRY * _state_width(shape, 4)
    return windows + 4 * carried + 2 * shape.hc_mult * shape.hidden_size


def activation_bytes(shape: Shape, tokens: int) -> int:
    """The most that one layer of a step holds at once, from the widths of its results."""
    s = shape
    streams = 2 * s.hc_mult * s.hidden_size * 2
    heads = s.num_attention_heads * s.head_dim
    attention = 2 * heads * 2 + heads + s.o_groups * s.o_lora_rank * 3 + (s.head_dim * 4 + 2048) * 2
    routed = s.num_experts_per_tok * (2 * s.moe_intermediate_size * 2 + s.moe_intermediate_size + s.hidden_size * 2)
    return tokens * (streams + max(attention, routed) + 8 * s.hidden_size)


def _state_width(shape: Shape, ratio: int) -> int:
    """Floats of one compressor state: (kv, z), then the indexer's where there is one."""
    halves = 2 if ratio == 4 else 1
    return 2 * halves * shape.head_dim + (2 * halves * shape.index_head_dim if ratio == 4 else 0)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f} MB"
