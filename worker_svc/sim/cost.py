"""How long DeepSeek-V4-Flash takes for a step on an H200, from the bytes and operations of its components.

Each component takes max(bytes / bandwidth, operations / peak) and components run one after another, so the floor of a
step is their sum; `efficiency` says which part of that floor the kernels reach. Routing is taken as uniform. Not here:
transfers between GPUs, launch gaps, anything of the host's.
"""

from dataclasses import dataclass, replace

BANDWIDTH = 4.3e12  # bytes/s of one H200
FP8 = 1.58e15  # operations/s
BF16 = 7.9e14
TF32 = 3.95e14

WINDOW_LAYERS, C4_LAYERS, C128_LAYERS = 2, 21, 20
LAYERS = WINDOW_LAYERS + C4_LAYERS + C128_LAYERS
WINDOW, TOP_KEYS = 128, 512
ROW_BYTES, INDEX_ROW_BYTES = 584, 132
EXPERTS, EXPERTS_PER_TOKEN = 256, 6
EXPERT_BYTES, EXPERT_PARAMS = 13.37e6, 25.17e6
PROJECTION = 106.95e6  # parameters and bytes per layer
SHARED_BYTES = 25.2e6
STREAM_BYTES, STREAM_OPS = 3.1e6, 2 * 2 * 24 * 16384  # residual streams of one layer: weights; operations per token
GATE_BYTES = 2.1e6
ACTIVATION_BYTES = 0.6e6  # per token and layer
C4_COMPRESSOR, C128_COMPRESSOR = 29.9e6, 8.4e6
HEAD_BYTES = 1.059e9


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes. Contexts are summed over tokens, so that a step needs no list of its rows."""

    rows: int = 0  # decode rows
    row_context: int = 0  # sum of their lengths
    chunk_tokens: int = 0
    chunk_context: int = 0  # sum over chunk tokens of the tokens in front of each


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashOnH200:
    """`gpus` share the work evenly; `step_ms` > 0 replaces the model by a constant."""

    efficiency: float = 0.6
    gpus: int = 1
    step_ms: float = 0.0

    def step_ns(self, load: Load) -> int:
        """Nanoseconds of one step."""
        tokens = load.rows + load.chunk_tokens
        if not tokens:
            return 0
        if self.step_ms:
            return int(self.step_ms * 1e6)
        return int(self.floor_s(load) / (self.efficiency * self.gpus) * 1e9)

    def floor_s(self, load: Load) -> float:
        """Seconds on one GPU whose kernels reach the roofline."""
        tokens = load.rows + load.chunk_tokens
        context = (load.row_context + load.chunk_context) / tokens
        touched = EXPERTS * (1 - (1 - EXPERTS_PER_TOKEN / EXPERTS) ** tokens)
        layer = (
            _time(PROJECTION, 2 * PROJECTION * tokens, FP8)
            + _time(STREAM_BYTES, STREAM_OPS * tokens, TF32)
            + _time(touched * EXPERT_BYTES, 2 * tokens * EXPERTS_PER_TOKEN * EXPERT_PARAMS, FP8)
            + _time(SHARED_BYTES, 2 * tokens * EXPERT_PARAMS, FP8)
            + (GATE_BYTES + ACTIVATION_BYTES * tokens) / BANDWIDTH
        )
        near = min(WINDOW, context)
        attention = (
            WINDOW_LAYERS * _attention(tokens, near)
            + C4_LAYERS * (_attention(tokens, near + min(TOP_KEYS, context / 4)) + _index(tokens, context))
            + C128_LAYERS * _attention(tokens, near + context / 128)
        )
        compressors = C4_LAYERS * _time(C4_COMPRESSOR, C4_COMPRESSOR * tokens, FP8)
        compressors += C128_LAYERS * _time(C128_COMPRESSOR, C128_COMPRESSOR * tokens, FP8)
        return LAYERS * layer + attention + compressors + HEAD_BYTES / BANDWIDTH

    def scaled(self, factor: float) -> "FlashOnH200":
        """The same, `factor` times slower."""
        return replace(self, efficiency=self.efficiency / factor, step_ms=self.step_ms * factor)


def _time(moved: float, operations: float, peak: float) -> float:
    return max(moved / BANDWIDTH, operations / peak)


def _attention(tokens: int, keys: float) -> float:
    return _time(tokens * keys * ROW_BYTES, tokens * 64 * keys * 512 * 4, BF16)


def _index(tokens: int, context: float) -> float:
    return _time(tokens * context / 4 * INDEX_ROW_BYTES, tokens * context / 4 * 64 * 128 * 2, FP8)
