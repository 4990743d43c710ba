"""What can be tuned: names, candidates, bounds, and the backends whose pins leave a choice alone. Data alone.

Two kinds of choice. A `Cut` decides by a size which of two programs runs ("up to so many rows our own"): both are timed
at the ends of every stretch between two candidates, and a candidate's times follow from that. An `Options` is a shape
of a program, each of which is timed by itself. The built-in value stands in the operation, with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker_svc.tuning import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """`few` is in force up to and with the value's size, `many` above; `from_there`: `many` from that size on.

    `few` and `many` are values that force either program at all sizes that are timed.
    """

    what: str
    ops: tuple[str, ...]  # of the registry: whose pin leaves the built-in value
    few: int
    many: int
    candidates: tuple[int, ...]
    highest: int
    lowest: int = 0
    above: int = 0  # sizes up to here are never decided by this choice
    from_there: bool = False

    def accepts(self, value: Value) -> bool:
        """True if a worker may run with this value."""
        return type(value) is int and self.lowest <= value <= self.highest

    def runs_few(self, value: int, size: int) -> bool:
        """Which program a value takes at a size."""
        return size < value if self.from_there else size <= value

    def sizes(self) -> list[int]:
        """Both ends of every stretch between two candidates."""
        ends = set(self.candidates)
        ends |= {value - 1 for value in ends} if self.from_there else {value + 1 for value in ends}
        top = max(self.candidates) if not self.from_there else self.highest
        return sorted(size for size in ends if max(self.above, 0) < size <= top)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`fields` names the numbers of a value in order; only candidates are accepted."""

    what: str
    ops: tuple[str, ...]
    fields: tuple[str, ...]
    candidates: tuple[tuple[int, ...], ...]
    at: tuple[int, ...]  # sizes that are timed

    def accepts(self, value: Value) -> bool:
        """True if a worker may run with this value."""
        return value in self.candidates

    def sizes(self) -> list[int]:
        """Those that are timed."""
        return list(self.at)


SPLIT_FEW = ("tokens", "channels", "warps")
SPLIT_MANY = ("tokens", "channels", "parts", "warps", "stages", "registers")
TILE = ("keys", "heads", "warps", "stages")
_BOUNDARY = ("hyper_boundary",)
_ATTENTION = ("sparse_attention", "paged_attention")

CHOICES: Mapping[str, Cut | Options] = {  # in the order in which they are timed: later ones run with earlier winners
    "hyper_boundary.split_16": Options(
        what="cut of a boundary of up to 16 tokens",
        ops=_BOUNDARY,
        fields=SPLIT_FEW,
        candidates=((16, 64, 4), (16, 64, 2), (16, 64, 8), (16, 128, 4), (16, 128, 8)),
        at=(1, 8, 16),
    ),
    "hyper_boundary.split_64": Options(
        what="cut of a boundary of 17 to 64 tokens",
        ops=_BOUNDARY,
        fields=SPLIT_FEW,
        candidates=((16, 128, 4), (16, 64, 4), (16, 64, 2), (16, 128, 8), (16, 256, 8), (32, 64, 4), (32, 128, 8)),
        at=(24, 48, 64),
    ),
    "hyper_boundary.split_1024": Options(
        what="cut of a boundary of 65 to 1024 tokens",
        ops=_BOUNDARY,
        fields=SPLIT_MANY,
        candidates=(
            *((16, 64, 8, 4, 3, 0), (16, 64, 8, 4, 2, 0), (16, 64, 8, 4, 4, 0), (16, 64, 4, 4, 3, 0)),
            *((16, 128, 8, 8, 2, 0), (32, 64, 8, 8, 2, 0), (32, 32, 8, 4, 2, 0)),
        ),
        at=(96, 256, 512, 1024),
    ),
    "hyper_boundary.split_more": Options(
        what="cut of a boundary of more tokens",
        ops=_BOUNDARY,
        fields=SPLIT_MANY,
        candidates=(
            *((16, 64, 4, 4, 2, 0), (16, 64, 4, 4, 3, 0), (16, 64, 2, 4, 2, 0), (16, 64, 8, 4, 2, 0)),
            *((16, 128, 4, 8, 2, 0), (32, 64, 4, 8, 2, 0), (32, 32, 4, 4, 2, 0), (64, 32, 4, 8, 2, 0)),
        ),
        at=(1536, 4096, 8192),
    ),
    "fp8_gemm.skinny_rows": Cut(
        what="rows up to which whole FP8 products are ours",
        ops=("fp8_gemm", "skinny_gemm"),
        few=64,
        many=0,
        candidates=(0, 4, 8, 12, 16, 24, 32, 48, 64),
        highest=64,
    ),
    "fp8_gemm.parts_rows": Cut(
        what="rows up to which FP8 products come in parts",
        ops=("fp8_gemm", "skinny_gemm"),
        few=64,
        many=0,
        candidates=(0, 4, 8, 12, 16, 24, 32, 48, 64),
        highest=64,
    ),
    "bf16_gemm.deep_rows": Cut(
        what="rows up to which wide BF16 products are the library's",
        ops=("bf16_gemm",),
        few=128,
        many=0,
        candidates=(16, 24, 32, 48, 64, 96, 128),
        highest=128,
        above=16,
    ),
    "bf16_gemm.skinny_rows": Cut(
        what="rows up to which BF16 products are ours",
        ops=("bf16_gemm", "skinny_gemm"),
        few=64,
        many=0,
        candidates=(0, 4, 8, 12, 16, 24, 32, 48, 64),
        highest=64,
    ),
    "sparse_attention.tile_few": Options(
        what="tile of our decode attention of a few tokens",
        ops=_ATTENTION,
        fields=TILE,
        candidates=(
            *((32, 64, 8, 1), (32, 64, 8, 2), (32, 64, 4, 1), (32, 32, 4, 1), (32, 32, 4, 2)),
            *((64, 64, 8, 1), (64, 64, 8, 2), (64, 32, 4, 2)),
        ),
        at=(1, 2, 4),
    ),
    "sparse_attention.tile_many": Options(
        what="tile of our decode attention of more tokens",
        ops=_ATTENTION,
        fields=TILE,
        candidates=((64, 64, 8, 2), (64, 64, 8, 1), (32, 64, 8, 2), (32, 64, 8, 1), (64, 32, 4, 2)),
        at=(5, 8, 16),
    ),
    "sparse_attention.few_tokens": Cut(
        what="tokens that count as a few there",
        ops=_ATTENTION,
        few=64,
        many=0,
        candidates=(0, 1, 2, 4, 8, 16),
        highest=64,
    ),
    "attention.joined_rows": Cut(
        what="rows up to which decode attention is ours, joined and quantised",
        ops=_ATTENTION,
        few=64,
        many=0,
        candidates=(0, 1, 2, 4, 8, 12, 16, 24, 32),
        highest=64,
    ),
    "fp4_experts.many_rows": Cut(
        what="average rows of an expert from which their product is ours",
        ops=("experts", "large_experts"),
        few=4096,
        many=1,
        candidates=(8, 16, 24, 32, 48, 64, 96, 128),
        lowest=1,
        highest=4096,
        from_there=True,
    ),
}
