"""Which arithmetic runs: `--quantization` and `--kv-cache-dtype` resolved against what the checkpoint holds.

Exact maths (FP32 on dequantised weights) is the default of the torch path. A quantisation name switches on the
run-time quantisation the model was trained with; it is accepted only if the checkpoint really has that format,
because a name that is silently something else is worse than a refusal. Weights are never re-quantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshkit.numerics_names import EXACT_NAMES, KV_NAMES, SCHEMES_OF_EXPERTS, KvFormat
from worker_svc.checkpoint.errors import NumericsError
from worker_svc.checkpoint.names import ExpertFormat

IndexerFormat = Literal["none", "fp8", "fp4"]

INDEXER_NAMES: dict[str, IndexerFormat] = {"none": "none", "fp8": "fp8", "fp4": "fp4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What the forward rounds, and where. The default rounds nothing.

    activations: inputs of every FP8 or FP4 linear (wq_a, wq_b, wkv, wo_b, indexer.wq_b, experts, shared experts,
        e_proj, h_proj): none, or E4M3 with a power-of-two scale per 128. wo_a, router, compressors, mixers and head
        are never quantised.
    kv: window rows and main compressed entries. For the FP8 formats the dims without rope are quantised in
        blocks of 64; the rope dims are BF16. `bf16` rounds the whole row, `fp32` rounds nothing.
    indexer: indexer queries and keys after the Hadamard transform: none, E4M3 (one scale per 128) or E2M1 (per 32).
        With none the transform may be left out: it is orthogonal and cancels.
    """

    activations: Literal["none", "fp8"] = "none"
    kv: KvFormat = "fp32"
    indexer: IndexerFormat = "none"

    @property
    def is_exact(self) -> bool:
        """True if nothing is rounded beyond FP32."""
        return self == Numerics()

    def describe(self) -> str:
        """One line for the start-up log."""
        if self.is_exact:
            return "exact FP32 on dequantised weights"
        return f"activations {self.activations}, KV {self.kv}, indexer {self.indexer}"


def choose_numerics(
    expert_format: ExpertFormat,
    *,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    indexer_dtype: str | None = None,
) -> Numerics:
    """Resolve the three options (None or `auto` = default) or raise NumericsError with the names there are.

    Defaults: exact maths keeps KV in fp32 and the indexer unquantised; a quantisation name brings fp8_e4m3 KV;
    FP8 KV brings the FP4 indexer.
    """
    activations = _activations(expert_format, (quantization or "auto").lower())
    kv = _kv((kv_cache_dtype or "auto").lower(), activations)
    default_indexer: IndexerFormat = "fp4" if kv.startswith("fp8") else "none"
    indexer_name = (indexer_dtype or "auto").lower()
    if indexer_name != "auto" and indexer_name not in INDEXER_NAMES:
        raise NumericsError("--indexer-dtype", indexer_name, "no such indexer format", ("auto", *INDEXER_NAMES))
    return Numerics(activations=activations, kv=kv, indexer=INDEXER_NAMES.get(indexer_name, default_indexer))


def _activations(expert_format: ExpertFormat, name: str) -> Literal["none", "fp8"]:
    if name in EXACT_NAMES:
        return "none"
    there = SCHEMES_OF_EXPERTS[expert_format]
    if name in there:
        return "fp8"
    held = "FP4 experts and FP8 dense weights" if expert_format == "fp4" else "FP8 weights throughout"
    raise NumericsError("--quantization", name, f"the checkpoint has {held}", (*EXACT_NAMES, *there))


def _kv(name: str, activations: str) -> KvFormat:
    if name == "auto":
        return "fp32" if activations == "none" else "fp8_e4m3"
    if name not in KV_NAMES:
        raise NumericsError("--kv-cache-dtype", name, "no such KV format", ("auto", *KV_NAMES))
    return KV_NAMES[name]
