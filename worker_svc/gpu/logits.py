"""What only some requests want done with their logits on the device: penalties, bias, refused ids, log-probabilities.

Runs between forward and sampling, row by row, for the rows that asked; the usual step never comes here. The order is
that of `worker_svc.sampling`: penalties, bias, then masks. Log-probabilities are taken before any of that. Where the
output's first ids are given, all others are taken out.
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
from worker_svc.sampling.sampler import refused_ids


@dataclass(slots=True)
class _Slot:
    """Edits of one slot. counts int32 [V] of emitted tokens, seen bool [V] of those and the prompt's."""

    params: SamplingParams
    early: Tensor | None  # ids that may not end the output before min_tokens
    bias_ids: Tensor | None
    bias_values: Tensor | None
    counts: Tensor | None
    seen: Tensor | None
    refused: Tensor | None  # ids never drawn
    phrases: "_Phrases | None"
    given: Tensor | None  # ids the output begins with
    more: Tensor | None  # ids whose log-probabilities are wanted too


@dataclass(slots=True)
class _Phrases:
    """Bad words of several tokens. starts int64 [W, L]: what stands before the last id, from the right, -1 = anything;
    ends int64 [W]; last int64 [L]: the ids emitted last, -1 where there were fewer."""

    starts: Tensor
    ends: Tensor
    last: Tensor


@dataclass(slots=True)
class LogprobsAsked:
    """log-softmax of a batch part, and what goes home of it."""

    full: Tensor  # FP32 [B, V]
    wanted: list[int]  # per row: alternatives asked for, NO_LOGPROBS = none
    more: dict[int, tuple[tuple[int, ...], Tensor]]  # row -> further ids and their values
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
        self.more = {row: (ids, _queued(values)) for row, (ids, values) in self.more.items()}
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
        more, theirs = self.more.get(number, ((), None))
        if theirs is not None:
            ids += more
            values += theirs.tolist()
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
        early_on = max(p.min_tokens, len(p.given_ids)) > init.n_emitted
        restricted = p.bias or p.allowed_ids or p.bad_words
        if not (p.reads_output or restricted or p.top_logprobs != NO_LOGPROBS or early_on):
            return
        vocab = self.rules.vocab_size
        early = sorted({*self.rules.eos_ids, *p.stop_ids}) if p.min_tokens > init.n_emitted else None
        counts = seen = None
        if p.counts_output:
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
            refused=self._home_of(refused_ids(p, vocab)),
            phrases=self._phrases(p, init.emitted),
            given=self._home_of(p.given_ids),
            more=self._home_of(p.logprob_ids),
        )

    def _home_of(self, ids: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor | None:
        return torch.as_tensor(ids, dtype=torch.int64).to(self.device) if len(ids) else None

    def _phrases(self, params: SamplingParams, emitted: Sequence[int]) -> _Phrases | None:
        words = [word for word in params.bad_words if len(word) > 1]
        if not words:
            return None
        long = max(map(len, words)) - 1
        starts = _ids([token for word in words for token in (*[-1] * (long + 1 - len(word)), *word[:-1])])
        last = [*[-1] * long, *emitted][-long:]
        ends = _ids([word[-1] for word in words])
        return _Phrases(starts.view(-1, long).to(self.device), ends.to(self.device), _ids(last).to(self.device))

    def wanted(self, rows: Sequence[RowWork]) -> bool:
        """Whether any row needs more than the sampler does."""
        return any(row.slot in self._slots for row in rows)

    def logprobs(self, rows: Sequence[RowWork], logits: Tensor) -> LogprobsAsked | None:
        """Take log-softmax now, before the logits are edited, if a row asked for it."""
        wanted = [self._slots[row.slot].params.top_logprobs if row.slot in self._slots else NO_LOGPROBS for row in rows]
        if all(count == NO_LOGPROBS for count in wanted):
            return None
        full, more = logits[: len(rows)].log_softmax(1), {}
        for number, row in enumerate(rows):
            if (slot := self._slots.get(row.slot)) is not None and slot.more is not None:
                more[number] = (slot.params.logprob_ids, full[number, slot.more])
        return LogprobsAsked(full, wanted, more)

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
            if slot is None:
                continue
            token = tokens[number : number + 1]
            at, drawn = token.clamp(min=0).long(), token >= 0
            if slot.phrases is not None:
                last = slot.phrases.last
                slot.phrases.last = torch.where(drawn, torch.cat([last[1:], at]), last)
            if slot.counts is None:
                continue
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
    if slot.refused is not None:
        logits.index_fill_(0, slot.refused, -torch.inf)
    if slot.phrases is not None:
        words = slot.phrases
        complete = ((words.starts == words.last) | (words.starts < 0)).all(1)
        logits.index_add_(0, words.ends, torch.where(complete, -torch.inf, 0.0))
    if slot.early is not None:
        held = torch.where(emitted < p.min_tokens, -torch.inf, logits[slot.early])
        logits.index_copy_(0, slot.early, held)
    if slot.given is not None:
        left = emitted < len(slot.given)
        now = slot.given[emitted.clamp(max=len(slot.given) - 1).long()]
        others = torch.arange(len(logits), device=logits.device) != now
        logits.copy_(torch.where(left, torch.where(others, -torch.inf, 0.0), logits))


def _ids(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _queued(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
