"""Row formats of the KV pools: how one key row is kept in memory, and read back as FP32.

A `RowStore` is a pool of equal rows in one format. `round` is what a row reads back as after it was written; the
forward applies it to rows that it uses in the step that writes them, so that every later read agrees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.ops import quant_fp4, quant_fp8

Planes = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """encode: FP32 [n, width] -> planes [n, ...]; decode: the inverse. `exact` formats keep FP32 as it is."""

    name: str
    width: int
    encode: Callable[[Tensor], Planes]
    decode: Callable[[Planes], Tensor]
    exact: bool = False

    @property
    def bytes_per_row(self) -> int:
        """Memory of one row over all planes."""
        return sum(plane.nbytes for plane in self.encode(torch.zeros(1, self.width)))


def fp32_rows(width: int) -> RowFormat:
    """FP32, 4 bytes a value."""
    return RowFormat("fp32", width, lambda rows: (rows,), lambda planes: planes[0], exact=True)


def bf16_rows(width: int) -> RowFormat:
    """BF16, 2 bytes a value."""
    return RowFormat("bf16", width, lambda rows: (rows.bfloat16(),), lambda planes: planes[0].float())


def fp8_kv_rows(nope: int, rope: int, dtype: torch.dtype) -> RowFormat:
    """FP8 for the leading `nope` dims with a power-of-two scale per 64, BF16 for the rope dims (584 B at 448 + 64)."""

    def encode(rows: Tensor) -> Planes:
        codes, scale = quant_fp8.quantise(rows[:, :nope], quant_fp8.KV_BLOCK, dtype)
        return codes.view(torch.uint8), scale, rows[:, nope:].bfloat16()

    def decode(planes: Planes) -> Tensor:
        codes, scale, tail = planes
        head = quant_fp8.dequantise(codes.view(dtype), scale, quant_fp8.KV_BLOCK)
        return torch.cat([head, tail.float()], dim=1)

    return RowFormat(str(dtype).removeprefix("torch."), nope + rope, encode, decode)


def fp8_index_rows(width: int) -> RowFormat:
    """E4M3 with a power-of-two scale per 128 values."""

    def encode(rows: Tensor) -> Planes:
        codes, scale = quant_fp8.quantise(rows, quant_fp8.ACTIVATION_BLOCK)
        return codes.view(torch.uint8), scale

    def decode(planes: Planes) -> Tensor:
        return quant_fp8.dequantise(planes[0].view(torch.float8_e4m3fn), planes[1], quant_fp8.ACTIVATION_BLOCK)

    return RowFormat("fp8", width, encode, decode)


def fp4_index_rows(width: int) -> RowFormat:
    """MXFP4: E2M1 pairs with a power-of-two scale per 32 values (68 B at width 128)."""
    return RowFormat("fp4", width, quant_fp4.quantise, lambda planes: quant_fp4.dequantise(*planes))


class RowStore:
    """`num_rows` rows of one format. Rows are named by their index; who owns which is not known here."""

    def __init__(self, row_format: RowFormat, num_rows: int) -> None:
        self.format, self.num_rows = row_format, num_rows
        sample = row_format.encode(torch.zeros(1, row_format.width))
        self.planes: Planes = tuple(torch.zeros(num_rows, *plane.shape[1:], dtype=plane.dtype) for plane in sample)

    def write(self, index: Tensor, rows: Tensor) -> None:
        """Rows FP32 [n, width] into places index [n]."""
        for plane, part in zip(self.planes, self.format.encode(rows)):
            plane.index_copy_(0, index, part)

    def read(self, index: Tensor) -> Tensor:
        """FP32 [n, width] of the rows at index [n]."""
        return self.format.decode(tuple(plane.index_select(0, index) for plane in self.planes))

    def read_into(self, out: Tensor, index: Tensor) -> None:
        """`read` into out [n, width], without a temporary where the format is exact."""
        if self.format.exact:
            torch.index_select(self.planes[0], 0, index, out=out)
        else:
            out.copy_(self.read(index))

    def round(self, rows: Tensor) -> Tensor:
        """FP32 [n, width] as they will read back."""
        return rows if self.format.exact else self.format.decode(self.format.encode(rows))

    def copy_rows(self, source: "RowStore", source_index: Tensor | slice, index: Tensor | slice) -> None:
        """Copy rows of a store of the same format, bit for bit."""
        for plane, origin in zip(self.planes, source.planes):
            plane[index] = origin[source_index]

    def poison(self) -> None:
        """Fill with values that read back as NaN, so that a read of anything unwritten shows. For tests."""
        poison_planes(self.planes)


def poison_planes(planes: Sequence[Tensor]) -> None:
    """NaN for floats; for codes and scales the byte that decodes to NaN."""
    for place, plane in enumerate(planes):
        if plane.is_floating_point():
            plane.fill_(torch.nan)
        else:
            plane.fill_(0x7F if place == 0 and len(planes) != 2 else 0xFF)
