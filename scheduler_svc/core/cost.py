"""How long a step takes, learnt from the worker's own timings: t(decode rows, prefill tokens, context).

A sum of non-negative terms: a constant, hinges min(tokens, knot) that bend as experts and kernels saturate, rows, the
rows' context, and each chunk's tokens times its context. Steps of like shape are averaged in one bucket, so that an
hour of decode steps does not make it forget what a chunk costs; the terms are fitted to the buckets by relative error.
It answers the watchdog's deadline, the forecast of admission and how many prefill tokens fit a time. Not here: clocks,
and what to do with the answers (policy, forecast).
"""

from dataclasses import dataclass, field
from operator import mul

import numpy as np
import numpy.typing as npt

KNOTS = (8, 32, 128, 512)
TERMS = len(KNOTS) + 5
_ORDER = (*range(len(KNOTS) + 1, -1, -1), *range(len(KNOTS) + 2, TERMS))
_EACH = 0.05  # weight of a new step in its bucket once that has twenty
_OUTLIER = 3.0  # a step this many times longer or shorter than its like counts as just so many times
_GROWTH = 4  # a chunk may be so many times the largest one timed: the model is not trusted far beyond what it saw
_EARLY = 32  # steps after each of which the model is fitted wholly
_SWEEPS = 8  # of a later fit, per step: a twentieth of a millisecond
_FIRST = 256  # tokens of the first chunk


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step consists of. `chunk_work`: sum over chunks of tokens times mean context."""

    rows: int = 0
    row_context: int = 0
    chunk_tokens: int = 0
    chunk_work: int = 0

    def with_chunk(self, tokens: int) -> "Shape":
        """The same rows beside so many prefill tokens at no context."""
        return Shape(self.rows, self.row_context, tokens)


@dataclass(slots=True, eq=False)
class _Bucket:
    """Mean of like steps."""

    terms: list[float]
    took: float
    n: int = 1


@dataclass(slots=True, eq=False)
class _Fit:
    """A fit under way: argmin over c >= 0 of c'Gc/2 - c'r. `c` holds scaled coefficients, `product` is G c."""

    gram: list[list[float]]
    rhs: list[float]
    scale: list[float]
    c: list[float]
    product: list[float]
    sweeps: int = 60

    def run(self, sweeps: int) -> bool:
        """So many sweeps of coordinate descent, which explains by tokens what it can. True when it is done."""
        c, product = self.c, self.product
        for _ in range(min(sweeps, self.sweeps)):
            self.sweeps -= 1
            moved = 0.0
            for i in _ORDER:
                row = self.gram[i]
                by = max(-c[i], (self.rhs[i] - product[i]) / row[i])
                if by:
                    c[i] += by
                    moved = max(moved, abs(by))
                    for j, g in enumerate(row):
                        product[j] += g * by
            if moved <= 1e-9 * max(c):
                return True
        return not self.sweeps


@dataclass(slots=True, eq=False)
class CostModel:
    """One worker group's step times, in nanoseconds. Deterministic: the same steps give the same answers."""

    steps: int = 0
    decode_steps: int = 0  # without a chunk
    chunk_steps: int = 0
    largest_chunk: int = 0
    error: float = 0.0  # mean relative error of recent predictions
    last: Shape = field(default_factory=Shape)
    _buckets: dict[tuple[int, int, int], _Bucket] = field(default_factory=dict)
    _coef: list[float] = field(default_factory=lambda: [0.0] * TERMS)
    _stale: int = 0
    _fit: _Fit | None = None

    # ---- learning ----

    def observe(self, shape: Shape, took_ns: int) -> None:
        """Learn from one step. The caller leaves out steps that compiled something or failed."""
        tokens = shape.rows + shape.chunk_tokens
        if tokens <= 0 or took_ns <= 0:
            return
        terms = _terms(shape)
        if self.steps > TERMS:
            off = min(1.0, abs(_dot(self._coef, terms) - took_ns) / took_ns)
            self.error += 0.05 * (off - self.error)
        self.steps += 1
        self.last = shape
        if shape.chunk_tokens:
            self.chunk_steps += 1
            self.largest_chunk = max(self.largest_chunk, shape.chunk_tokens)
        else:
            self.decode_steps += 1
        key = (
            shape.rows.bit_length(),
            shape.chunk_tokens.bit_length(),
            (shape.row_context + shape.chunk_work).bit_length() // 2,
        )
        bucket = self._buckets.get(key)
        if bucket is None:
            self._buckets[key] = _Bucket(terms, float(took_ns))
            self._learn(start=True)
            return
        bucket.n += 1
        weight = max(_EACH, 1 / bucket.n)
        took = float(took_ns)
        if bucket.n > 3:
            took = min(max(took, bucket.took / _OUTLIER), bucket.took * _OUTLIER)
        elif took < bucket.took:
            bucket.took = took  # the first of a kind pay for warming up
        bucket.took += weight * (took - bucket.took)
        bucket.terms = [mean + weight * (term - mean) for mean, term in zip(bucket.terms, terms, strict=True)]
        self._stale += 1
        self._learn(start=self._stale >= (32 if self.error > 0.1 else 512) or self.steps < _EARLY)

    def _learn(self, *, start: bool) -> None:
        """Begin a fit, or go on with it: a few sweeps per step, since a whole one would hold up the next frame."""
        if start:
            self._stale = 0
            self._fit = self._begin()
        fit = self._fit
        if fit is not None and fit.run(_SWEEPS if self.steps >= _EARLY else fit.sweeps):
            self._coef = [c / s for c, s in zip(fit.c, fit.scale, strict=True)]
            self._fit = None

    def _begin(self) -> _Fit:
        """Non-negative least squares on the buckets, each divided by its time, from the last solution on."""
        buckets = list(self._buckets.values())
        # Until little and much were timed, half of the shortest step counts as what any step costs.
        buckets.append(_Bucket([1.0] + [0.0] * (TERMS - 1), 0.5 * min(b.took for b in buckets)))
        x: npt.NDArray[np.float64] = np.array([b.terms for b in buckets])
        took = np.array([b.took for b in buckets])
        weight = np.sqrt(np.minimum([b.n for b in buckets], 16)) / took
        x = x * weight[:, None]
        scale = np.sqrt((x * x).sum(axis=0)) + 1e-30
        x = x / scale
        gram = x.T @ x
        gram[np.diag_indices(TERMS)] += 1e-6
        c = np.array(self._coef) * scale
        return _Fit(gram.tolist(), (x.T @ (took * weight)).tolist(), scale.tolist(), c.tolist(), (gram @ c).tolist())

    # ---- answers ----

    def predict(self, shape: Shape) -> float:
        """Time of such a step; 0 while nothing is known."""
        return _dot(self._coef, _terms(shape))

    def alone(self, rows: int, row_context: int) -> float:
        """Time of a step of decode rows only."""
        return self.predict(Shape(rows, row_context))

    @property
    def fixed(self) -> float:
        """What a step with a large chunk takes beside its tokens: reading the weights, mostly."""
        if not self.chunk_steps:
            return 0.0
        return self._coef[0] + sum(c * knot for c, knot in zip(self._coef[1:], KNOTS, strict=False))

    @property
    def token_ns(self) -> float:
        """What a prefill token costs in a chunk of some hundred; 0 while no chunk was timed."""
        return self.predict(Shape(chunk_tokens=KNOTS[-1])) / KNOTS[-1] if self.chunk_steps else 0.0

    @property
    def context_weight(self) -> float:
        """What one token of context adds to a chunk token's cost, in chunk tokens."""
        per_token = self.predict(Shape(chunk_tokens=2 * KNOTS[-1])) - self.predict(Shape(chunk_tokens=KNOTS[-1]))
        return self._coef[-1] * KNOTS[-1] / per_token if per_token > 0 else 0.0

    @property
    def most_chunk(self) -> int:
        """Tokens of the largest chunk that predictions are trusted for."""
        return _GROWTH * max(self.largest_chunk, _FIRST // _GROWTH)

    def chunk_for(self, rows: int, row_context: int, target_ns: float, most: int) -> int:
        """The most prefill tokens (at no context) with which the step is predicted to take at most `target_ns`."""
        if self.predict(Shape(rows, row_context, most)) <= target_ns:
            return most
        low, high = 0, most  # low fits, high does not
        while high - low > max(1, low // 64):
            middle = (low + high) // 2
            if self.predict(Shape(rows, row_context, middle)) <= target_ns:
                low = middle
            else:
                high = middle
        return low

    def deadline_ns(self, shape: Shape, *, least_ns: int, factor: int, warm_steps: int, warm_ns: int) -> int:
        """How long such a step may run: a multiple of the prediction, generous until like steps were timed."""
        if (self.chunk_steps if shape.chunk_tokens else self.decode_steps) < warm_steps:
            return warm_ns
        return max(least_ns, int(factor * self.predict(shape)))


def _dot(coef: list[float], terms: list[float]) -> float:
    return float(sum(map(mul, coef, terms)))


def _terms(shape: Shape) -> list[float]:
    tokens = shape.rows + shape.chunk_tokens
    return [
        1.0,
        *[float(tokens if tokens < knot else knot) for knot in KNOTS],
        float(tokens),
        float(shape.rows),
        float(shape.row_context),
        float(shape.chunk_work),
    ]
