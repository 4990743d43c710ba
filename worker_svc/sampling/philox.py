"""Counter-based random numbers: Philox 4x32-10, and the Gumbel noise that sampling adds to logits.

No state: a value is a function of (seed, choice, output position, token id, purpose) alone, so a resumed, moved or
re-batched request draws what it would have drawn. Key = (low half of the seed, choice); counter = (token id // 4,
output position, high half of the seed, purpose); word token id % 4 of the result belongs to the token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PURPOSE_SAMPLE = 0
"""Choosing a token; draft and target share it, so that they agree as often as they can."""

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

GUMBEL_SPREAD = 26.1
"""No two noise values lie further apart: 32-bit uniforms reach from -3.2 to 22.9."""

Words = npt.NDArray[np.uint32]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds over counters uint32 [4, n] -> uint32 [4, n]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _halves(np.multiply(c0, _MULTIPLIERS[0], dtype=np.uint64))
        high1, low1 = _halves(np.multiply(c2, _MULTIPLIERS[1], dtype=np.uint64))
        c0, c1 = (high1 ^ c1) ^ np.uint32(k0), low1
        c2, c3 = (high0 ^ c3) ^ np.uint32(k1), low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3))


def _halves(products: npt.NDArray[np.uint64]) -> tuple[Words, Words]:
    """High and low 32 bits, as views (the machines this runs on are little-endian, like the weight files)."""
    words = products.view(np.uint32)
    return words[1::2], words[0::2]


def random_words(blocks: Words, *, seed: int, choice: int, position: int, purpose: int = PURPOSE_SAMPLE) -> Words:
    """Four 32-bit words for each vocabulary block (token id // 4): uint32 [4, n]."""
    assert 0 <= seed < 1 << 64 and 0 <= choice < 1 << 32 and 0 <= position < 1 << 32, (seed, choice, position)
    counter = np.empty((4, len(blocks)), dtype=np.uint32)
    counter[0] = blocks
    counter[1:] = np.array([[position], [seed >> 32], [purpose]], dtype=np.uint32)
    return philox4x32(counter, (seed & 0xFFFFFFFF, choice))


def gumbel(
    ids: npt.NDArray[np.int64], vocab_size: int, *, seed: int, choice: int, position: int
) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise of tokens `ids` (ascending) at one output position: float32 [n].

    Computed in float64 and rounded, so that machines with different vector logarithms agree.
    """
    if 4 * len(ids) < vocab_size:
        blocks = (ids >> 2).astype(np.uint32)
        words = random_words(blocks, seed=seed, choice=choice, position=position)
        drawn = words[ids & 3, np.arange(len(ids))]
    else:
        blocks = np.arange(-(-vocab_size // 4), dtype=np.uint32)
        flat = random_words(blocks, seed=seed, choice=choice, position=position).T.reshape(-1)
        drawn = flat[:vocab_size] if len(ids) == vocab_size else flat[ids]
    uniform = (drawn + 0.5) * 2.0**-32  # in (0, 1), both ends excluded
    noise: npt.NDArray[np.float32] = (-np.log(-np.log(uniform))).astype(np.float32)
    return noise
