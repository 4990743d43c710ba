"""The KV pools on the device, and the moves of whole slots, pages and tails between them.

Tensors of the same kind are one allocation over all layers, so that a move is a handful of launches however deep the
model is. Rings are addressed by position and never cleared. Names of sequences and free lists live elsewhere.
"""
# mypy: disallow-untyped-calls=False

from dataclasses import dataclass

import torch
from torch import Tensor

from meshkit.types import PAGE_TOKENS
from worker_svc.gpu.layout import GpuSizes
from worker_svc.kv.layout import C4_CARRY, KvLayout
from worker_svc.ops.kv_rows import BF16_PAGE_BYTES, INDEX_PAGE_BYTES, KERNEL_PAGE
from worker_svc.ops.kv_rows.ref import data_view, scale_view

C128_ROWS = PAGE_TOKENS // 128
"""Entries of a page in a C128 layer; 32 pages share a kernel page."""


@dataclass(frozen=True, slots=True)
class LayerPools:
    """One layer. KV caches uint8 [kernel pages, bytes], index_keys uint8 [pages, 8448], states FP32 [rows, width]."""

    ratio: int
    window: Tensor
    tail_window: Tensor
    entries: Tensor | None
    index_keys: Tensor | None
    states: Tensor | None
    carries: Tensor | None  # FP32 [tails, 4, width]: C4 states before a boundary


class GpuPools:
    """All layers' pools."""

    def __init__(self, layout: KvLayout, *, slots: int, pages: int, tails: int, device: torch.device) -> None:
        self.layout, self.slots, self.pages, self.tails, self.device = layout, slots, pages, tails, device
        self.ring, ratios = layout.window_ring, layout.ratios
        self.ring_pages = self.ring // KERNEL_PAGE
        size, c4, c128 = GpuSizes(layout).kernel_page_bytes, ratios.count(4), ratios.count(128)
        c128_pages = -(-pages * C128_ROWS // KERNEL_PAGE)
        self.window = self._bytes(len(ratios), slots * self.ring_pages, size)
        self.tail_window = self._bytes(len(ratios), max(1, tails) * layout.window // KERNEL_PAGE, size)
        self.entries4 = self._bytes(c4, pages, size)
        self.index_keys = self._bytes(c4, pages, INDEX_PAGE_BYTES)
        self.entries128 = self._bytes(c128, c128_pages, size)
        self.states4 = self._floats(c4, slots * layout.state_ring(4), layout.state_width(4))
        self.states128 = self._floats(c128, slots * layout.state_ring(128), layout.state_width(128))
        self.carries = self._floats(c4, max(1, tails), C4_CARRY, layout.state_width(4))
        c = layout.config
        self.streams = torch.zeros(max(1, tails), c.hc_mult, c.hidden_size, dtype=torch.bfloat16, device=device)
        self.layers = [self._layer(place) for place in range(len(ratios))]

    @property
    def num_bytes(self) -> int:
        """Device memory of everything."""
        tensors = (
            *(self.window, self.tail_window, self.entries4, self.index_keys, self.entries128),
            *(self.states4, self.states128, self.carries, self.streams),
        )
        return sum(tensor.nbytes for tensor in tensors)

    def _bytes(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=self.device)

    def _floats(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device)

    def _layer(self, place: int) -> LayerPools:
        ratios = self.layout.ratios
        ratio = ratios[place]
        same = ratios[:place].count(ratio)
        return LayerPools(
            ratio=ratio,
            window=self.window[place],
            tail_window=self.tail_window[place],
            entries=(self.entries4 if ratio == 4 else self.entries128)[same] if ratio else None,
            index_keys=self.index_keys[same] if ratio == 4 else None,
            states=(self.states4 if ratio == 4 else self.states128)[same] if ratio else None,
            carries=self.carries[same] if ratio == 4 else None,
        )

    # Moves. Numbers are known to the host; nothing waits for the device.

    def copy_slot(self, src: int, dst: int) -> None:
        """dst takes src's rings and states."""
        for tensor, size in (
            (self.window, self.ring_pages),
            (self.states4, self.layout.state_ring(4)),
            (self.states128, self.layout.state_ring(128)),
        ):
            tensor[:, dst * size : (dst + 1) * size] = tensor[:, src * size : (src + 1) * size]

    def copy_page(self, src: int, dst: int) -> None:
        """dst takes the contents of page src in every layer."""
        self.entries4[:, dst] = self.entries4[:, src]
        self.index_keys[:, dst] = self.index_keys[:, src]
        for cache in self.entries128:
            for plane in _row_planes(cache):
                plane[_page(dst), _places(dst)] = plane[_page(src), _places(src)]

    def load_tail(self, slot: int, pos: int, tail: int) -> None:
        """Make `slot` resume at `pos` from `tail`."""
        for half, ring in enumerate(self._window_pages(slot, pos)):
            self.window[:, ring] = self.tail_window[:, tail * len(self._window_pages(slot, pos)) + half]
        for place, row in enumerate(self._carried_rows(slot, pos)):
            self.states4[:, row] = self.carries[:, tail, place]

    def refresh_tail(self, slot: int, pos: int, tail: int, streams: Tensor, alive: Tensor) -> None:
        """Keep in `tail` where `slot` stands after its token at pos - 1, if `alive` (a bool on the device).

        streams BF16 [N, D] of that token. A slot that has ended meanwhile leaves the tail as it was.
        """
        pages = self._window_pages(slot, pos)
        for half, ring in enumerate(pages):
            _keep(self.tail_window[:, tail * len(pages) + half], self.window[:, ring], alive)
        for place, row in enumerate(self._carried_rows(slot, pos)):
            _keep(self.carries[:, tail, place], self.states4[:, row], alive)
        _keep(self.streams[tail], streams, alive)

    def _window_pages(self, slot: int, pos: int) -> list[int]:
        """Kernel pages of the ring that hold positions pos - 128 .. pos - 1 (pos and ring are multiples of 64)."""
        firsts = range(pos - self.layout.window, pos, KERNEL_PAGE)
        return [slot * self.ring_pages + first % self.ring // KERNEL_PAGE for first in firsts]

    def _carried_rows(self, slot: int, pos: int) -> list[int]:
        ring = self.layout.state_ring(4)
        return [slot * ring + position % ring for position in range(pos - C4_CARRY, pos)]


def _row_planes(cache: Tensor) -> tuple[Tensor, ...]:
    """Views [kernel pages, 64, bytes] of what belongs to one row."""
    if cache.shape[1] == BF16_PAGE_BYTES:
        return (cache.unflatten(1, (KERNEL_PAGE, -1)),)
    return data_view(cache), scale_view(cache)


def _keep(target: Tensor, source: Tensor, alive: Tensor) -> None:
    target.copy_(torch.where(alive, source, target))


def _page(page: int) -> int:
    return page * C128_ROWS // KERNEL_PAGE


def _places(page: int) -> slice:
    first = page * C128_ROWS % KERNEL_PAGE
    return slice(first, first + C128_ROWS)
