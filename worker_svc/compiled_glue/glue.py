"""The compiled glue: the calls of `model.glue`, each one call into a loaded object."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from worker_svc.compiled_glue.pieces import PIECES
from worker_svc.model.glue import Glue, GlueShapes

Run = Callable[[list[Tensor]], list[Tensor]]
"""A loaded object: it takes its inputs for what they were compiled as, and looks at no shape."""


class CompiledGlue(Glue):
    """`runs` has every piece of `PIECES`, compiled for these shapes. Not for deterministic mode: vector tails round
    differently, so a token's bits follow the number of tokens."""

    def __init__(self, shapes: GlueShapes, runs: Mapping[str, Run]) -> None:
        super().__init__(shapes)
        assert runs.keys() == PIECES.keys(), sorted(runs)
        self._runs = dict(runs)
        self._scale = shapes.head_dim**-0.5

    def run(self, name: str, *inputs: Tensor) -> list[Tensor]:
        """One piece; inputs must be contiguous, of the sizes that it was compiled for."""
        assert all(tensor.is_contiguous() for tensor in inputs), name
        return self._runs[name](list(inputs))

    def boundary(self, mixes: Tensor, x: Tensor, base: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Glue`."""
        y, post, comb = self.run("boundary", mixes, x, base, weight)
        return y, post, comb

    def expand(self, out: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """See `Glue`."""
        return self.run("expand", out, x, post, comb)[0]

    def head(self, mixes: Tensor, x: Tensor, base: Tensor, weight: Tensor) -> Tensor:
        """See `Glue`. A step that samples nothing has no rows here."""
        return self.run("head", mixes, x, base, weight)[0] if x.shape[0] else super().head(mixes, x, base, weight)

    def latents(self, stack: Tensor, q_weight: Tensor, kv_weight: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """See `Glue`."""
        latent, kv = self.run("latents", stack, q_weight, kv_weight, torch.view_as_real(turns))
        return latent, kv

    def queries(self, stack: Tensor, turns: Tensor) -> Tensor:
        """See `Glue`."""
        return self.run("queries", stack, torch.view_as_real(turns))[0]

    def states(self, product: Tensor, at: int, bias: Tensor, positions: Tensor) -> Tensor:
        """See `Glue`. The piece is for states behind queries and KV; FP8 activations put them elsewhere."""
        if at != self.shapes.latent + self.shapes.head_dim:
            return super().states(product, at, bias, positions)
        return self.run("states", product, bias, positions)[0]

    def compress(self, values: Tensor, scores: Tensor, weight: Tensor, turns: Tensor) -> Tensor:
        """See `Glue`. C128's windows are columns of the states, and every 4th or 128th turn is one of an entry."""
        inputs = (values.contiguous(), scores.contiguous(), weight, torch.view_as_real(turns.contiguous()))
        return self.run("compress", *inputs)[0]

    def attend_allowed(self, q: Tensor, keys: Tensor, allowed: Tensor, sink: Tensor, scale: float) -> Tensor:
        """See `Glue`; between two products, the softmax."""
        assert scale == self._scale, scale
        queries, heads, width = q.shape
        scores = torch.mm(q.view(-1, width), keys.t()).view(queries, heads, -1)
        hidden = torch.where(allowed, 0.0, -torch.inf)  # added: a choice by bytes would not be vectorised
        probs = self.run("allowed", scores, hidden, sink)[0]
        return torch.mm(probs.view(queries * heads, -1), keys).view(queries, heads, width)

    def attend(self, q: Tensor, keys: Tensor, sink: Tensor, scale: float) -> Tensor:
        """See `Glue`; between two products, the softmax."""
        assert scale == self._scale and q.shape[0] == 1, (scale, q.shape)
        return torch.mm(self.run("softmax", torch.mm(q[0], keys.t()), sink)[0], keys).unsqueeze(0)

    def activate(self, hidden: Tensor, scale: Tensor) -> Tensor:
        """clamped_swiglu(hidden [R, 2I], limit) * scale [R, 1] -> [R, I]."""
        return self.run("activate", hidden, scale)[0]

    def route(self, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """See `Glue`."""
        if logits.shape[0] > PIECES["route"].most:
            return super().route(logits, bias)
        experts, weights = self.run("route", logits, bias)
        return experts, weights

    def weigh(self, logits: Tensor, experts: Tensor) -> Tensor:
        """See `Glue`."""
        if logits.shape[0] > PIECES["weigh"].most:
            return super().weigh(logits, experts)
        return self.run("weigh", logits, experts)[0]
