"""From logits to tokens: a pure function of (logits, parameters, seed, choice, output position), row by row.

Given ids are not drawn: they are taken as they stand. Order: penalties, bias, masks (of the model, the request's
allowed ids and bad words, its grammar), temperature, top-k, top-p, min-p, then argmax of logits + Gumbel noise;
greedy adds no noise. The lowest token id wins every tie. Rows are computed one at a time, so that batch companions
cannot change a bit. Log-probabilities are those of the model itself, before any of that. Runs on the CPU in numpy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from meshkit.types import NO_LOGPROBS, SamplingParams, TokenLogprobs
from worker_svc.sampling import philox

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would only overflow."""
MAX_TOP_LOGPROBS = 20
_PRESELECT = (512, 8192)
"""Tokens looked at first for top-p: sorting a whole vocabulary is slow and rarely needed."""

Fault = Literal["broken_logits", "nothing_allowed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabRules:
    """What the model says about its vocabulary: EOS ids, and ids that must never be sampled."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    masked_ids: tuple[int, ...] = ()
    masked: Ids = field(init=False, repr=False, compare=False)
    is_masked: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert all(0 <= i < self.vocab_size for i in (*self.eos_ids, *self.masked_ids))
        object.__setattr__(self, "masked", np.array(self.masked_ids, dtype=np.int64))
        object.__setattr__(self, "is_masked", frozenset(self.masked_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """Everything fixed about how one choice draws its tokens."""

    params: SamplingParams
    seed: int
    choice: int
    rules: VocabRules
    bias_ids: Ids = field(init=False, repr=False, compare=False)
    bias_values: Floats = field(init=False, repr=False, compare=False)
    early_ids: Ids = field(init=False, repr=False, compare=False)  # not before min_tokens
    refused_ids: Ids = field(init=False, repr=False, compare=False)  # not allowed, or bad words of one token
    phrases: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)  # longer bad words
    is_plain: bool = field(init=False, repr=False, compare=False)  # no penalty, no bias, nothing refused

    def __post_init__(self) -> None:
        p, rules = self.params, self.rules
        stops = (*rules.eos_ids, *p.stop_ids)
        assert all(0 <= i < rules.vocab_size for i in (*stops, *(i for i, _ in p.bias)))
        object.__setattr__(self, "bias_ids", np.array([i for i, _ in p.bias], dtype=np.int64))
        object.__setattr__(self, "bias_values", np.array([v for _, v in p.bias], dtype=np.float32))
        object.__setattr__(self, "early_ids", np.array(sorted(set(stops)), dtype=np.int64))
        object.__setattr__(self, "refused_ids", refused_ids(p, rules.vocab_size))
        object.__setattr__(self, "phrases", tuple(word for word in p.bad_words if len(word) > 1))
        plain = not (p.counts_output or p.bias or p.allowed_ids or p.bad_words)
        object.__setattr__(self, "is_plain", plain)

    @property
    def is_greedy(self) -> bool:
        """True if the highest logit is taken and no noise is drawn."""
        return self.params.temperature < GREEDY_BELOW


def refused_ids(params: SamplingParams, vocab_size: int) -> Ids:
    """What is never drawn for a request: all but its allowed ids, and its bad words of one token."""
    refused = np.zeros(vocab_size, dtype=np.bool_)
    if params.allowed_ids:
        refused[:] = True
        refused[np.array(params.allowed_ids, dtype=np.int64)] = False
    refused[np.array([word[0] for word in params.bad_words if len(word) == 1], dtype=np.int64)] = True
    return np.flatnonzero(refused)


class SamplerState:
    """What one slot has to remember between steps: which tokens were seen, if a penalty asks for it, and the last ones,
    if a bad word may go on from them.

    Presence and frequency penalties count emitted tokens; the repetition penalty also reads the prompt.
    """

    __slots__ = ("_counts", "_last", "_seen", "row")

    def __init__(self, row: RowSampling, *, prompt: Sequence[int] = (), emitted: Sequence[int] = ()) -> None:
        self.row = row
        vocab, p = row.rules.vocab_size, row.params
        self._counts = np.zeros(vocab, dtype=np.int32) if p.counts_output else None
        self._last: deque[int] = deque(maxlen=max((len(word) - 1 for word in row.phrases), default=0))
        self._seen = np.zeros(vocab, dtype=np.bool_) if p.reads_prompt else None
        if self._seen is not None and len(prompt):
            self._seen[np.asarray(prompt, dtype=np.int64)] = True
        self.accept(emitted)

    def accept(self, tokens: Sequence[int]) -> None:
        """Book emitted tokens: call once for every token that stays."""
        self._last.extend(tokens)
        if self._counts is None or not len(tokens):
            return
        ids = np.asarray(tokens, dtype=np.int64)
        np.add.at(self._counts, ids, 1)
        if self._seen is not None:
            self._seen[ids] = True

    def forbid(self, logits: Floats, ahead: Sequence[int]) -> None:
        """Take out, in place, what would end a bad word after the emitted tokens and the drafted ones `ahead`."""
        last = (*self._last, *ahead)
        for word in self.row.phrases:
            if last[-len(word) + 1 :] == word[:-1]:
                logits[word[-1]] = -np.inf

    def penalise(self, logits: Floats, ahead: Sequence[int]) -> None:
        """Apply the three penalties in place, as if the drafted tokens `ahead` had been emitted too."""
        if self._counts is None:
            return
        p, counts, seen = self.row.params, self._counts, self._seen
        if len(ahead):
            ids = np.asarray(ahead, dtype=np.int64)
            counts = counts.copy()
            np.add.at(counts, ids, 1)
            if seen is not None:
                seen = seen.copy()
                seen[ids] = True
        if seen is not None:
            factor = np.float32(p.repetition_penalty)
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
        if p.frequency_penalty:
            logits -= np.float32(p.frequency_penalty) * counts.astype(np.float32)
        if p.presence_penalty:
            logits[counts > 0] -= np.float32(p.presence_penalty)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """One row to sample. `position` is the output index of the token to draw.

    mask: grammar mask, one bit per token in little-endian 32-bit words, 1 = allowed; None = no grammar.
    ahead: drafted tokens between the committed ones and this position (verify rows).
    """

    state: SamplerState
    position: int
    mask: npt.NDArray[np.int32] | None = None
    ahead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token; -1 with a fault: the row cannot go on."""

    token: int
    logprobs: TokenLogprobs | None = None
    fault: Fault | None = None


def sample(logits: torch.Tensor, rows: Sequence[RowState]) -> list[Sampled]:
    """Draw one token per row. logits: float32 [n, V] on the CPU, row i for rows[i]; left unchanged."""
    assert logits.dtype == torch.float32 and logits.device.type == "cpu", (logits.dtype, logits.device)
    assert logits.dim() == 2 and logits.shape[0] == len(rows), (logits.shape, len(rows))
    values: Floats = logits.detach().contiguous().numpy()
    return [_sample_row(values[i], row) for i, row in enumerate(rows)]


def _sample_row(raw: Floats, row: RowState) -> Sampled:
    sampling = row.state.row
    assert raw.shape == (sampling.rules.vocab_size,), (raw.shape, sampling.rules.vocab_size)
    params = sampling.params
    token = _plain_greedy(raw, row)
    if token is None:
        if not np.isfinite(raw.max()):  # NaN, +inf, or nothing but -inf: a mask must not hide it
            return Sampled(-1, fault="broken_logits")
        if row.position < len(params.given_ids):
            given = params.given_ids[row.position]
            return Sampled(given, _logprobs(raw, given, params.top_logprobs, params.logprob_ids))
        logits = _processed(raw, row)
        token = int(logits.argmax())
        if not np.isfinite(logits[token]):  # a bias, or a penalty, can overflow too
            return Sampled(-1, fault="nothing_allowed" if np.isneginf(logits[token]) else "broken_logits")
        if not sampling.is_greedy:
            token = _draw(logits, sampling, row.position)
    return Sampled(token, _logprobs(raw, token, params.top_logprobs, params.logprob_ids))


def _is_unchanged(row: RowState) -> bool:
    """True if nothing but the ids that the model masks stands between its logits and the temperature."""
    sampling = row.state.row
    first = max(sampling.params.min_tokens, len(sampling.params.given_ids))
    return sampling.is_plain and row.mask is None and row.position >= first


def _plain_greedy(raw: Floats, row: RowState) -> int | None:
    """The usual greedy step without a copy of the logits; None if the row needs the long way."""
    sampling = row.state.row
    if not sampling.is_greedy or not _is_unchanged(row):
        return None
    best = int(raw.argmax())
    return best if best not in sampling.rules.is_masked and np.isfinite(raw[best]) else None


def _processed(raw: Floats, row: RowState) -> Floats:
    """Logits after penalties, bias and masks: `raw` itself if none applies, else a copy."""
    state, sampling = row.state, row.state.row
    if _is_unchanged(row) and not sampling.rules.masked_ids:
        return raw
    logits = raw.copy()
    state.penalise(logits, row.ahead)
    if len(sampling.bias_ids):
        np.add.at(logits, sampling.bias_ids, sampling.bias_values)
    logits[sampling.rules.masked] = -np.inf
    logits[sampling.refused_ids] = -np.inf
    state.forbid(logits, row.ahead)
    if row.mask is not None:
        logits[~_allowed(row.mask, len(logits))] = -np.inf
    if row.position < sampling.params.min_tokens:
        kept = logits[sampling.early_ids].copy()
        logits[sampling.early_ids] = -np.inf
        # A grammar that allows nothing but the end has priority over min_tokens.
        if np.isneginf(logits.max()):
            logits[sampling.early_ids] = kept
    return logits


def _allowed(mask: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.bool_]:
    assert mask.size == -(-vocab_size // 32), (mask.shape, vocab_size)
    octets = np.ascontiguousarray(mask).astype("<i4").view(np.uint8)
    return np.unpackbits(octets, count=vocab_size, bitorder="little").view(np.bool_)


def _draw(logits: Floats, sampling: RowSampling, position: int) -> int:
    scaled = logits / np.float32(sampling.params.temperature)
    ids = kept_ids(scaled, sampling.params.top_k, sampling.params.top_p, sampling.params.min_p)
    # Noise cannot lift a token over the best one from further below than its own range: leave those out.
    ids = ids[scaled[ids] >= scaled[ids].max() - np.float32(philox.GUMBEL_SPREAD)]
    if len(ids) == 1:
        return int(ids[0])
    noise = philox.gumbel(ids, len(scaled), seed=sampling.seed, choice=sampling.choice, position=position)
    kept = scaled if len(ids) == len(scaled) else scaled[ids]
    return int(ids[(kept.astype(np.float64) + noise).argmax()])


def kept_ids(scaled: Floats, top_k: int, top_p: float, min_p: float) -> Ids:
    """Token ids, ascending, that top-k, then top-p within those, then min-p leave; at least one.

    `top_k` <= 0, `top_p` >= 1 and `min_p` <= 0 are off. Equal logits at a boundary: lower ids stay.
    """
    ids = np.flatnonzero(scaled > -np.inf)
    if 0 < top_k < len(ids):
        ids = _highest(scaled, ids, top_k)
    if top_p < 1.0:
        ids = _nucleus(scaled, ids, top_p)
    if min_p > 0.0:
        values = scaled[ids].astype(np.float64)
        ids = ids[np.exp(values - values.max()) >= min_p]
    return np.sort(ids)


def _highest(scaled: Floats, ids: Ids, count: int) -> Ids:
    """The `count` ids with the highest values, best first, lower ids first among equals."""
    values = scaled[ids]
    if count < len(ids):
        bound = np.partition(values, len(ids) - count)[len(ids) - count]
        inside = values >= bound
        ids, values = ids[inside], values[inside]
    return ids[np.argsort(-values, kind="stable")][:count]


def _nucleus(scaled: Floats, ids: Ids, top_p: float) -> Ids:
    """The fewest most probable ids whose probabilities reach top_p, best first; ids may come in any order."""
    ids = np.sort(ids)
    values = scaled[ids].astype(np.float64)
    top = values.max()
    bound = top_p * np.exp(values - top).sum()
    for count in (*_PRESELECT, len(ids)):
        ordered = _highest(scaled, ids, min(count, len(ids)))
        before = np.cumsum(np.exp(scaled[ordered].astype(np.float64) - top))
        if before[-1] >= bound:
            break
    return ordered[: int(np.searchsorted(before, bound, side="left")) + 1]


def _logprobs(raw: Floats, token: int, top: int, more: tuple[int, ...]) -> TokenLogprobs | None:
    """log-softmax of the model's own logits for the token, for the `top` most probable ones, best first, and `more`."""
    if top == NO_LOGPROBS:
        return None
    assert 0 <= top <= MAX_TOP_LOGPROBS, top
    values = raw.astype(np.float64)
    peak = values.max()
    norm = peak + np.log(np.exp(values - peak).sum())
    ids = [token, *(_highest(raw, np.arange(len(raw)), top).tolist() if top else ()), *more]
    return TokenLogprobs(tuple(ids), tuple((values[ids] - norm).astype(np.float32).tolist()))
