"""What only some requests want done with their logits on the device: penalties, bias, min_tokens, log-probabilities.

Runs between forward and sampling, row by row, for the rows that asked; the usual step never comes here. The order is
that of `worker_svc.sampling`: penalties, bias, then masks. Log-probabilities are taken before any of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshkit.types import NO_LOGPROBS, SamplingParams, TokenLogprobs
from worker_svc.core.work import RowWork, SlotInit
from worker_svc.ops.slot_step import Field
from worker_svc.sampling import VocabRules


@dataclass(slots=True)
class _Slot:
    """Edits of one slot. counts int32 [V] of emitted tokens, seen bool [V] of those and the prompt's."""

    params: SamplingParams
    early: Tensor | None  # ids that may not end the output before min_tokens
    bias_ids: Tensor | None
    bias_values: Tensor | None
    counts: Tensor | None
    seen: Tensor | None


@dataclass(slots=True)
class LogprobsAsked:
    """log-softmax of a batch part, and what goes home of it."""

    full: Tensor  # FP32 [B, V]
    wanted: list[int]  # per row: alternatives asked for, NO_LOGPROBS = none
    chosen: Tensor | None = None
    top_values: Tensor | None = None
    top_ids: Tensor | None = None
    tokens: Tensor | None = None

    def home(self, tokens: Tensor) -> "LogprobsAsked":
        """Pick the drawn tokens' values and the alternatives; copies to the host are queued, not waited for."""
        most = max(0, *self.wanted)
        drawn = tokens[: len(self.wanted)]
        self.chosen = _queued(self.full.gather(1, drawn.clamp(min=0).long().unsqueeze(1)).squeeze(1))
        if most:
            # A stable sort keeps equal values in id order, as on the CPU.
            values, ids = self.full.sort(dim=1, descending=True, stable=True)
            self.top_values, self.top_ids = _queued(values[:, :most]), _queued(ids[:, :most])
        self.tokens = _queued(drawn)
        self.full = self.full[:0]
        return self

    def of_row(self, number: int) -> tuple[TokenLogprobs, ...]:
        """Of one row, once the step is over."""
        if self.wanted[number] == NO_LOGPROBS:
            return ()
        assert self.chosen is not None and self.tokens is not None
        ids, values = [int(self.tokens[number])], [float(self.chosen[number])]
        if count := self.wanted[number]:
            assert self.top_ids is not None and self.top_values is not None
            ids += self.top_ids[number, :count].tolist()
            values += self.top_values[number, :count].tolist()
        return (TokenLogprobs(tuple(ids), tuple(values)),)


class LogitEdits:
    """Per slot, what its logits need. `never` int32 [ceil(V / 32)]: bitmap of ids that are no token, or None."""

    def __init__(self, rules: VocabRules, device: torch.device) -> None:
        self.rules, self.device = rules, device
        self._slots: dict[int, _Slot] = {}
        self.never = self._bitmap(rules) if rules.masked_ids else None

    def _bitmap(self, rules: VocabRules) -> Tensor:
        bits = np.zeros(-(-rules.vocab_size // 32) * 32, dtype=np.uint8)
        bits[rules.masked] = 1
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy()).to(self.device)

    def init(self, init: SlotInit) -> None:
        """The slot starts over."""
        p = init.params
        self._slots.pop(init.slot, None)
        plain = not (p.reads_output or p.bias or p.top_logprobs != NO_LOGPROBS or p.min_tokens > init.n_emitted)
        if plain:
            return
        vocab = self.rules.vocab_size
        early = sorted({*self.rules.eos_ids, *p.stop_ids}) if p.min_tokens > init.n_emitted else None
        counts = seen = None
        if p.reads_output:
            counts = torch.bincount(_ids(init.emitted), minlength=vocab).to(torch.int32).to(self.device)
        if p.reads_prompt:
            both = torch.bincount(_ids((*init.prompt, *init.emitted)), minlength=vocab)
            seen = (both > 0).to(self.device)
        self._slots[init.slot] = _Slot(
            params=p,
            early=None if early is None else _ids(early).to(self.device),
            bias_ids=_ids([i for i, _ in p.bias]).to(self.device) if p.bias else None,
            bias_values=torch.tensor([v for _, v in p.bias], device=self.device) if p.bias else None,
            counts=counts,
            seen=seen,
        )

    def wanted(self, rows: Sequence[RowWork]) -> bool:
        """Whether any row needs more than the sampler does."""
        return any(row.slot in self._slots for row in rows)

    def logprobs(self, rows: Sequence[RowWork], logits: Tensor) -> LogprobsAsked | None:
        """Take log-softmax now, before the logits are edited, if a row asked for it."""
        wanted = [self._slots[row.slot].params.top_logprobs if row.slot in self._slots else NO_LOGPROBS for row in rows]
        if all(count == NO_LOGPROBS for count in wanted):
            return None
        return LogprobsAsked(logits[: len(rows)].log_softmax(1), wanted)

    def apply(self, rows: Sequence[RowWork], logits: Tensor, fields: Tensor) -> None:
        """Edit the rows' logits in place."""
        for number, row in enumerate(rows):
            slot = self._slots.get(row.slot)
            if slot is not None:
                _edit(logits[number], slot, fields[Field.EMITTED, row.slot])

    def accept(self, rows: Sequence[RowWork], tokens: Tensor) -> None:
        """Count what was drawn, int32 [B], -1 where nothing was."""
        for number, row in enumerate(rows):
            slot = self._slots.get(row.slot)
            if slot is None or slot.counts is None:
                continue
            token = tokens[number : number + 1]
            at, drawn = token.clamp(min=0).long(), token >= 0
            slot.counts.index_add_(0, at, drawn.to(torch.int32))
            if slot.seen is not None:
                slot.seen.index_copy_(0, at, slot.seen[at] | drawn)


def _edit(logits: Tensor, slot: _Slot, emitted: Tensor) -> None:
    p = slot.params
    if slot.seen is not None:
        factor = torch.where(logits > 0, 1 / p.repetition_penalty, p.repetition_penalty)
        logits.copy_(torch.where(slot.seen, logits * factor, logits))
    if slot.counts is not None:
        logits.sub_(slot.counts * p.frequency_penalty).sub_((slot.counts > 0) * p.presence_penalty)
    if slot.bias_ids is not None and slot.bias_values is not None:
        logits.index_add_(0, slot.bias_ids, slot.bias_values)
    if slot.early is not None:
        held = torch.where(emitted < p.min_tokens, -torch.inf, logits[slot.early])
        logits.index_copy_(0, slot.early, held)


def _ids(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _queued(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
