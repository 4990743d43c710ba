"""Step time of DeepSeek-V4-Flash on H200 from its bytes and operations: the worker of the scheduling benchmarks.

A component takes max(bytes / bandwidth, operations / peak) and components run one after another; constants are those of
the roofline: 4.3e12 B/s, FP8 1.58e15, BF16 7.9e14, TF32 3.95e14 operations/s; FP4 experts computed in FP8.
`efficiency` is the fraction of that floor that kernels reach. Contexts are sums, so that a step needs no list of rows.
"""

from dataclasses import dataclass

BANDWIDTH, FP8, BF16, TF32 = 4.3e12, 1.58e15, 7.9e14, 3.95e14
SWA, C4, C128 = 2, 21, 20
LAYERS = SWA + C4 + C128
WINDOW, TOPK = 128, 512
EXPERTS, ACTIVE, EXPERT_BYTES, EXPERT_PARAMS = 256, 6, 13.37e6, 25.17e6
PROJ_PARAMS = 106.95e6


@dataclass(frozen=True, slots=True)
class Flash:
    """One GPU that held all layers. `gpus` > 1 divides everything, without communication."""

    efficiency: float = 0.6
    gpus: int = 1

    def step_s(self, rows: int, row_context: int, chunk_tokens: int, chunk_work: int) -> float:
        """Seconds of a step: decode rows, their summed context, chunk tokens, sum of chunk tokens times context."""
        tokens = rows + chunk_tokens
        if not tokens:
            return 0.0
        context = (row_context + chunk_work) / tokens
        attention = SWA * self._attention(tokens, WINDOW, context)
        attention += C4 * (self._attention(tokens, WINDOW + min(TOPK, context / 4), context) + _index(tokens, context))
        attention += C128 * self._attention(tokens, WINDOW + context / 128, context)
        experts = EXPERTS * (1 - (1 - ACTIVE / EXPERTS) ** tokens) * EXPERT_BYTES
        layer = (
            max(PROJ_PARAMS / BANDWIDTH, 2 * PROJ_PARAMS * tokens / FP8)
            + max(3.1e6 / BANDWIDTH, 2 * tokens * 2 * 24 * 16384 / TF32)
            + max(experts / BANDWIDTH, 2 * tokens * ACTIVE * EXPERT_PARAMS / FP8)
            + max(25.2e6 / BANDWIDTH, 2 * tokens * EXPERT_PARAMS / FP8)
            + (2.1e6 + 0.6e6 * tokens) / BANDWIDTH
        )
        compressors = C4 * max(29.9e6 / BANDWIDTH, 29.9e6 * tokens / FP8)
        compressors += C128 * max(8.4e6 / BANDWIDTH, 8.4e6 * tokens / FP8)
        head = 1.059e9 / BANDWIDTH
        return (LAYERS * layer + attention + compressors + head) / (self.efficiency * self.gpus)

    def _attention(self, tokens: int, keys: float, context: float) -> float:
        keys = min(keys, max(context, 1.0))
        return max(tokens * keys * 584 / BANDWIDTH, tokens * 64 * keys * 512 * 4 / BF16)


def _index(tokens: int, context: float) -> float:
    return max(tokens * context / 4 * 132 / BANDWIDTH, tokens * context / 4 * 64 * 128 * 2 / FP8)
