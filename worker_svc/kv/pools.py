"""The KV pools of one worker: page pools, per-slot rings and tails, and the moves between them.

Rings are addressed by position (row = position mod ring size) and never cleared: readers mask by position. Pages are
addressed by arithmetic: entry i of a sequence is row i mod rows of page pages[i // rows]. Names of sequences, leases
and free lists live elsewhere; an index out of range here is a caller's bug.
"""

import torch
from torch import Tensor

from meshkit.types import PAGE_TOKENS
from worker_svc.kv.formats import RowStore, poison_planes
from worker_svc.kv.layout import C4_CARRY, KvLayout


class LayerPools:
    """Pools of one layer. `carries` and `index_keys` exist in C4 layers, `entries` and `states` in compressed ones."""

    def __init__(self, layout: KvLayout, ratio: int, slots: int, pages: int, tails: int) -> None:
        self.ratio, self._window_rows = ratio, layout.window
        self.window = RowStore(layout.kv_format(), slots * layout.window_ring)
        self.tail_window = RowStore(layout.kv_format(), tails * layout.window)
        self.rows_per_page = PAGE_TOKENS // ratio if ratio else 0
        self.entries = RowStore(layout.kv_format(), pages * self.rows_per_page) if ratio else None
        self.index_keys = RowStore(layout.index_format(), pages * self.rows_per_page) if ratio == 4 else None
        self.state_ring = layout.state_ring(ratio) if ratio else 0
        self.states = torch.zeros(slots * self.state_ring, layout.state_width(ratio)) if ratio else None
        carried = (tails + slots) if ratio == 4 else 0
        self.carries = torch.zeros(carried, C4_CARRY, layout.state_width(ratio)) if ratio == 4 else None

    def page_stores(self) -> list[RowStore]:
        """The stores whose rows belong to pages."""
        return [store for store in (self.entries, self.index_keys) if store is not None]

    def save_window(self, tail: int, rows: Tensor) -> None:
        """Keep the window rows [W, d] before a page boundary in a tail. Rounding rounded rows changes nothing."""
        first = tail * self._window_rows
        self.tail_window.write(torch.arange(first, first + self._window_rows), rows)


class KvPools:
    """All layers' pools. Tail numbers below `tails` are tails; number `tails + slot` is the slot's boundary mark:
    C4 states and streams at the last page boundary that the slot crossed, from which `refresh` fills a tail."""

    def __init__(self, layout: KvLayout, *, slots: int, pages: int, tails: int) -> None:
        self.layout, self.slots, self.pages, self.tails = layout, slots, pages, tails
        self.layers = [LayerPools(layout, ratio, slots, pages, tails) for ratio in layout.ratios]
        self.streams = torch.zeros(tails + slots, layout.config.hc_mult, layout.config.hidden_size)

    # Index arithmetic

    def ring_rows(self, slot: int, positions: Tensor) -> Tensor:
        """Window ring rows of `positions` of a slot."""
        ring = self.layout.window_ring
        return positions.remainder(ring).add_(slot * ring)

    def state_rows(self, ratio: int, slot: int, positions: Tensor) -> Tensor:
        """Compressor state ring rows of `positions` of a slot."""
        ring = self.layout.state_ring(ratio)
        return positions.remainder(ring).add_(slot * ring)

    # Moves

    def copy_slot(self, src: int, dst: int) -> None:
        """dst takes src's rings, states and boundary mark."""
        for layer in self.layers:
            ring = self.layout.window_ring
            layer.window.copy_rows(layer.window, _span(src, ring), _span(dst, ring))
            if layer.states is not None:
                layer.states[_span(dst, layer.state_ring)] = layer.states[_span(src, layer.state_ring)]
            if layer.carries is not None:
                layer.carries[self.tails + dst] = layer.carries[self.tails + src]
        self.streams[self.tails + dst] = self.streams[self.tails + src]

    def copy_page(self, src: int, dst: int) -> None:
        """dst takes the contents of page src in every layer."""
        for layer in self.layers:
            for store in layer.page_stores():
                store.copy_rows(store, _span(src, layer.rows_per_page), _span(dst, layer.rows_per_page))

    def load_tail(self, slot: int, pos: int, tail: int) -> None:
        """Make `slot` resume at `pos` from `tail`: window, C4 carry and streams."""
        assert pos % PAGE_TOKENS == 0 and pos >= self.layout.window, pos
        window = self.ring_rows(slot, torch.arange(pos - self.layout.window, pos))
        for layer in self.layers:
            layer.window.copy_rows(layer.tail_window, _span(tail, self.layout.window), window)
            if layer.carries is not None and layer.states is not None:
                carried = self.state_rows(layer.ratio, slot, torch.arange(pos - C4_CARRY, pos))
                layer.states[carried] = layer.carries[tail]
                layer.carries[self.tails + slot] = layer.carries[tail]
        self.streams[self.tails + slot] = self.streams[tail]

    def refresh_tail(self, slot: int, pos: int, tail: int) -> None:
        """Fill `tail` for `pos` from the slot's ring and boundary mark. The slot must have crossed pos last."""
        assert pos % PAGE_TOKENS == 0 and pos >= self.layout.window, pos
        window = self.ring_rows(slot, torch.arange(pos - self.layout.window, pos))
        for layer in self.layers:
            layer.tail_window.copy_rows(layer.window, window, _span(tail, self.layout.window))
            if layer.carries is not None:
                layer.carries[tail] = layer.carries[self.tails + slot]
        self.streams[tail] = self.streams[self.tails + slot]

    def poison(self) -> None:
        """NaN everywhere, so that a read of anything unwritten shows in the logits. For tests."""
        for layer in self.layers:
            for store in (layer.window, layer.tail_window, *layer.page_stores()):
                store.poison()
            poison_planes([plane for plane in (layer.states, layer.carries) if plane is not None])
        poison_planes([self.streams])


def _span(number: int, size: int) -> slice:
    return slice(number * size, (number + 1) * size)
