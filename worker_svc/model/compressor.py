"""KV compression of one layer: raw token states (kv, z) in, one entry per closed window out.

C128 compresses 128 tokens into one entry; C4 reads the a halves of the previous four tokens and the b halves of its
own four. The states of tokens that later entries need live in a ring that the attention layer reads and writes.
"""

import torch
from torch import Tensor

from worker_svc.model.glue import Glue
from worker_svc.model.norm import RMSNorm


class Compressor:
    """One compressor: ape [m, c*e] (added to z by position mod m) and the entry norm over e; c = 2 for C4, else 1."""

    def __init__(self, ratio: int, ape: Tensor, norm: RMSNorm, glue: Glue) -> None:
        self.ratio, self.norm, self.glue = ratio, norm, glue
        self.head_dim = norm.weight.shape[0]
        self.half_width = ape.shape[1]  # c * e: floats of kv, and of z
        self.position_bias = torch.cat([torch.zeros_like(ape), ape], dim=1)  # [m, 2 c e], as a state is laid out

    @property
    def state_width(self) -> int:
        """Floats of one token's state: kv then z."""
        return 2 * self.half_width

    def entries(self, states: Tensor, turns: Tensor, no_past: bool) -> Tensor:
        """states [n, 2ce] of consecutive tokens, turns [E, r/2] of each entry's first own token -> [E, e].

        C4 states start four tokens before the first entry's own window, or at it if there is no past (entry 0).
        """
        count = turns.shape[0]
        if self.ratio == 4:
            values, scores = self._overlapping(states, count, no_past)
        else:
            windows = states[: count * self.ratio].view(count, self.ratio, -1)
            values, scores = windows[:, :, : self.half_width], windows[:, :, self.half_width :]
        return self.glue.compress(values, scores, self.norm.weight, turns)

    def _overlapping(self, states: Tensor, count: int, no_past: bool) -> tuple[Tensor, Tensor]:
        """Values and scores [count, 8, e]: a halves of the group before, b halves of the entry's own group."""
        if no_past:
            absent = states.new_zeros(self.ratio, states.shape[1])
            absent[:, self.half_width :] = -torch.inf
            states = torch.cat([absent, states])
        groups = states[: (count + 1) * self.ratio].view(count + 1, self.ratio, 4, self.head_dim)  # kv a, b, z a, b
        values = torch.cat([groups[:-1, :, 0], groups[1:, :, 1]], dim=1)
        scores = torch.cat([groups[:-1, :, 2], groups[1:, :, 3]], dim=1)
        return values, scores
