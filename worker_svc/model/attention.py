"""Attention of one layer over paged KV: window keys from the ring and the row itself, compressed entries from pages.

One shared vector per token is key and value of all heads. Projections run over the whole batch; the rest goes row by
row. Order inside a row matters: old ring rows are read before the row's own rows overwrite them, and entries that the
row closes are written before its queries read.
"""

import torch
from torch import Tensor

from worker_svc.kv.pools import LayerPools
from worker_svc.model.compressor import Compressor
from worker_svc.model.glue import Glue
from worker_svc.model.indexer import Indexer
from worker_svc.model.linear import GroupedLinear, Linear
from worker_svc.model.norm import RMSNorm
from worker_svc.model.rope import RopeTable
from worker_svc.model.step import EntryPlan, RowPlan, Step, Tile
from worker_svc.ops.rope import rotate_
from worker_svc.ops.sparse_attention import KEY_BLOCK


class Attention:
    """The box of the paper: low-rank queries, shared KV, sink, inverse rope, grouped output.

    `inputs` are the stacked products of the layer input in the order wq_a, wkv, then (compressed layers) the state
    columns, then (C4) weights_proj; one stack in exact numerics, two where only the first two take FP8 input.
    """

    def __init__(
        self,
        *,
        inputs: tuple[Linear, ...],
        q_norm: RMSNorm,
        wq_b: Linear,
        kv_norm: RMSNorm,
        sink: Tensor,
        wo_a: GroupedLinear,
        wo_b: Linear,
        rope: RopeTable,
        head_dim: int,
        glue: Glue,
        compressor: Compressor | None = None,
        indexer: Indexer | None = None,
        deterministic: bool = False,
    ) -> None:
        self.inputs, self.q_norm, self.wq_b, self.kv_norm = inputs, q_norm, wq_b, kv_norm
        self.sink, self.wo_a, self.wo_b, self.rope = sink, wo_a, wo_b, rope
        self.heads, self.head_dim, self.scale = sink.shape[0], head_dim, head_dim**-0.5
        self.compressor, self.indexer, self.deterministic = compressor, indexer, deterministic
        self.glue = glue
        if compressor is not None:
            biases = [compressor.position_bias]
            if indexer is not None:
                biases.append(indexer.compressor.position_bias)
            bias = torch.cat(biases, dim=1)
            # States are columns of the last product: from states_at, and behind them in C4 the index weights.
            self.states_at, self.state_width = sum(inputs[0].sizes[:2]) if len(inputs) == 1 else 0, bias.shape[1]
            behind = sum(inputs[-1].sizes) - self.states_at - self.state_width
            self.position_bias = torch.cat([bias, bias.new_zeros(bias.shape[0], behind)], dim=1)

    def __call__(self, x: Tensor, step: Step, pools: LayerPools) -> Tensor:
        """x [S, D] normed -> [S, D]."""
        turns = step.turns[self.rope]  # [S, r/2]
        products = [stack(x) for stack in self.inputs]
        qr, kv = self.glue.latents(products[0], self.q_norm.weight, self.kv_norm.weight, turns.forward)
        kv = pools.window.round(kv)
        queries = self.wq_b(qr)
        q = self.glue.queries(queries, turns.forward)
        states = None
        if self.compressor is not None:
            states = self.glue.states(products[-1], self.states_at, self.position_bias, step.positions)
            states = states[:, : self.state_width]
        index = None
        if self.indexer is not None:
            weights = self.inputs[-1].split(products[-1])[-1]
            index = self.indexer.queries(queries[:, self.heads * self.head_dim :], turns.forward), weights
        out = torch.empty_like(q)
        for row in step.rows:
            window = self._window(kv[row.tokens], row, pools)
            entries = allowed = None
            if states is not None:
                plan = row.entries[pools.ratio]
                self._compress(states[row.tokens], row, plan, pools)
                entries, allowed = self._entries(index, row, plan, pools)
            out[row.tokens] = self._attend(q[row.tokens], window, entries, allowed, row)
        out = rotate_(out, turns.inverse.unsqueeze(1))
        return self.wo_b(self.wo_a(out.flatten(1)))

    def _window(self, kv: Tensor, row: RowPlan, pools: LayerPools) -> Tensor:
        """[old + T, d] window keys of the row in position order; the row's own go into the ring, saves into tails."""
        window = kv.new_empty(row.num_old + row.length, self.head_dim)
        pools.window.read_into(window[: row.num_old], row.old_window)
        window[row.num_old :] = kv
        pools.window.write(row.ring_rows, kv[row.kept])
        for save in row.windows:
            pools.save_window(save.tail, window[save.keys])
        return window

    def _compress(self, states: Tensor, row: RowPlan, plan: EntryPlan, pools: LayerPools) -> None:
        """Write the entries that the row closes; keep its states in the ring."""
        assert self.compressor is not None and pools.states is not None and pools.entries is not None
        if plan.num_new:
            needed = torch.cat([pools.states.index_select(0, plan.old_states), states[plan.own_states]])
            first = plan.first_new * plan.ratio
            turns = self.rope.turns[first : first + plan.num_new * plan.ratio : plan.ratio]
            places = plan.read_rows[plan.first_new :]
            width = self.compressor.state_width
            pools.entries.write(places, self.compressor.entries(needed[:, :width], turns, plan.no_past))
            if self.indexer is not None and pools.index_keys is not None:
                pools.index_keys.write(places, self.indexer.keys(needed[:, width:], turns, plan.no_past))
        if pools.carries is not None:
            for save in row.boundaries:
                pools.carries[save.number] = torch.cat(
                    [pools.states.index_select(0, save.old_states), states[save.own_states]]
                )
        pools.states.index_copy_(0, plan.state_rows, states[plan.kept])

    def _entries(
        self, index: tuple[Tensor, Tensor] | None, row: RowPlan, plan: EntryPlan, pools: LayerPools
    ) -> tuple[Tensor | None, Tensor | None]:
        """Entries [n, d] for the row's queries, and which query may read which [T, n] (None: all may)."""
        assert pools.entries is not None
        rows = plan.read_rows
        count = rows.shape[0]
        if count == 0:
            return None, None
        if self.indexer is not None and count > self.indexer.top_k:
            assert index is not None and pools.index_keys is not None
            q, weights = index[0][row.tokens], index[1][row.tokens]
            allowed = self.indexer.select(q, weights, pools.index_keys, rows, plan.visible)
            if row.length == 1 and not self.deterministic:
                return pools.entries.read(rows[allowed[0]]), None
        elif row.length == 1 and not self.deterministic:
            return pools.entries.read(rows), None
        else:
            allowed = torch.arange(count) < plan.visible.unsqueeze(1)
        return pools.entries.read(rows), allowed

    def _attend(
        self, q: Tensor, window: Tensor, entries: Tensor | None, allowed: Tensor | None, row: RowPlan
    ) -> Tensor:
        """q [T, H, d] -> [T, H, d], tile by tile of the row's queries."""
        if row.length == 1 and not self.deterministic:
            keys = window if entries is None else torch.cat([window, entries])
            return self.glue.attend(q, keys, self.sink, self.scale)
        parts = []
        for tile in row.tiles:
            keys, mask = self._tile_keys(window, entries, allowed, tile)
            assert mask is not None
            parts.append(self.glue.attend_allowed(q[tile.queries], keys, mask, self.sink, self.scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _tile_keys(
        self, window: Tensor, entries: Tensor | None, allowed: Tensor | None, tile: Tile
    ) -> tuple[Tensor, Tensor | None]:
        """One tile's keys and mask: window rows, then entries, in whole aligned blocks where bits must repeat."""
        keys = [window[tile.keys]]
        if self.deterministic:
            keys = [window.new_zeros(tile.lead, self.head_dim), *keys, window.new_zeros(tile.trail, self.head_dim)]
        if entries is None or allowed is None:
            return torch.cat(keys), tile.allowed
        assert tile.allowed is not None
        seen = allowed[tile.queries]
        masks = [tile.allowed, seen]
        keys.append(entries)
        if self.deterministic and (short := -entries.shape[0] % KEY_BLOCK):
            keys.append(window.new_zeros(short, self.head_dim))
            masks.append(seen.new_zeros(seen.shape[0], short))
        return torch.cat(keys), torch.cat(masks, dim=1)
