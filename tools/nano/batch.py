"""Documents packed into rows for training, and what the model must know about them.

Compression windows count from the start of a sequence in serving, so a document starts at a multiple of 128 in its
row and sees nothing before its start: attention inside it is exactly what it will be when it is served alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tools.nano.document import TokenizedDocument

BLOCK = 128
_WAITING = 48


@dataclass(frozen=True, slots=True)
class PackedRows:
    """ids int32, weights float32 and source int32 [B, T]; the rest per block of 128.

    source: the C4 entry that a query should read, or -1. document: its number in the row, or -1 for none.
    """

    ids: np.ndarray
    weights: np.ndarray
    source: np.ndarray
    document: np.ndarray
    blind: np.ndarray
    short: np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """`PackedRows` on the device. `hide_c128` is for ablations only."""

    ids: Tensor
    weights: Tensor
    source: Tensor
    document: Tensor
    short: Tensor
    hide_c4: Tensor
    hide_c128: Tensor

    @staticmethod
    def of(rows: PackedRows, device: torch.device) -> Batch:
        """Move to the device without waiting for it."""

        def move(array: np.ndarray, dtype: torch.dtype) -> Tensor:
            tensor = torch.from_numpy(array).to(dtype)
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

        blind = move(rows.blind, torch.bool)
        document = move(rows.document, torch.int32)
        ids, weights = move(rows.ids, torch.int64), move(rows.weights, torch.float32)
        source, short = move(rows.source, torch.int64), move(rows.short, torch.bool)
        return Batch(ids, weights, source, document, short, blind, torch.zeros_like(blind))


class Packer:
    """Fills rows with whole documents, always the longest waiting one that still fits."""

    def __init__(self, draw: Callable[[], TokenizedDocument], length: int) -> None:
        assert length % BLOCK == 0, length
        self._draw, self._length = draw, length
        self._waiting: list[TokenizedDocument] = []

    def rows(self, count: int) -> PackedRows:
        """`count` fresh rows."""
        blocks, packed = self._length // BLOCK, empty_rows(count, self._length)
        for row in range(count):
            at = number = 0
            while (found := self._take((blocks - at) * BLOCK)) is not None:
                place(packed, row, at, number, found)
                at, number = at + blocks_of(found), number + 1
        return packed

    def _take(self, room: int) -> TokenizedDocument | None:
        while len(self._waiting) < _WAITING:
            document = self._draw()
            if len(document.ids) <= self._length:
                self._waiting.append(document)
        fitting = [document for document in self._waiting if len(document.ids) <= room]
        if not fitting:
            return None
        # The oldest first at the head of a row, so that no document waits for ever; then whatever fills best.
        chosen = fitting[0] if room == self._length else max(fitting, key=lambda document: len(document.ids))
        self._waiting = [document for document in self._waiting if document is not chosen]
        return chosen


def empty_rows(count: int, length: int) -> PackedRows:
    """Rows without documents."""
    blocks = length // BLOCK
    return PackedRows(
        np.zeros((count, length), np.int32),
        np.zeros((count, length), np.float32),
        np.full((count, length), -1, np.int32),
        np.full((count, blocks), -1, np.int32),
        np.zeros((count, blocks), bool),
        np.zeros((count, blocks), bool),
    )


def blocks_of(document: TokenizedDocument) -> int:
    """Blocks of 128 that a document takes."""
    return -(-len(document.ids) // BLOCK)


def place(packed: PackedRows, row: int, block: int, number: int, document: TokenizedDocument) -> None:
    """Write one document into a row, from `block` on."""
    begin, size = block * BLOCK, len(document.ids)
    packed.ids[row, begin : begin + size] = document.ids
    packed.weights[row, begin : begin + size] = document.weights
    # Targets are one and two tokens ahead: the first two of a document follow from nothing in it.
    packed.weights[row, begin : begin + 2] = 0
    for at, origin in document.sources():
        packed.source[row, begin + at - 1] = (begin + origin) // 4
    packed.document[row, block : block + blocks_of(document)] = number
    packed.blind[row, block : block + blocks_of(document)] = document.blind
    packed.short[row, block : block + blocks_of(document)] = document.short
