"""The lightning indexer of a C4 layer: which compressed entries each query of a row reads.

It owns no projection: queries and head weights come from the attention layer's stacked products, keys from its own
compressor through the page pool. With quantised indexer numerics both sides pass the Hadamard transform first.
"""

from torch import Tensor

from worker_svc.kv.formats import RowFormat, RowStore
from worker_svc.model.compressor import Compressor
from worker_svc.ops.hadamard import hadamard
from worker_svc.ops.index_scores import index_scores, select_entries
from worker_svc.ops.rope import rotate_


class Indexer:
    """heads x head_dim queries; `row_format` is that of the key pool, and rounds the queries too."""

    def __init__(
        self, heads: int, top_k: int, compressor: Compressor, row_format: RowFormat, *, deterministic: bool
    ) -> None:
        self.heads, self.top_k, self.compressor = heads, top_k, compressor
        self.format, self.deterministic = row_format, deterministic
        self.scale = compressor.head_dim**-0.5 * heads**-0.5

    def queries(self, raw: Tensor, turns: Tensor) -> Tensor:
        """raw [S, h*e] -> [S, h, e]: rope at the query's position, then the numerics of the key pool. No norm."""
        q = rotate_(raw.reshape(-1, self.heads, self.compressor.head_dim), turns.unsqueeze(1))
        if self.format.exact:
            return q
        flat = hadamard(q).flatten(0, 1)
        return self.format.decode(self.format.encode(flat)).view_as(q)

    def keys(self, states: Tensor, turns: Tensor, no_past: bool) -> Tensor:
        """New index keys [E, e], as they go into the pool."""
        entries = self.compressor.entries(states, turns, no_past)
        return entries if self.format.exact else hadamard(entries)

    def select(self, q: Tensor, weights: Tensor, store: RowStore, rows: Tensor, visible: Tensor) -> Tensor:
        """q [T, h, e], weights [T, h] raw, key rows [n], visible [T] -> [T, n] bool of the entries to read."""
        keys = store.read(rows)
        scores = index_scores(q, keys, weights * self.scale, deterministic=self.deterministic)
        return select_entries(scores, visible, self.top_k)
