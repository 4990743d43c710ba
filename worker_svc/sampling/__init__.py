"""Sampling: counter-based, resumable, independent of the batch. See `sampler` for the order of operations."""

from worker_svc.sampling.sampler import (
    RowSampling,
    RowState,
    Sampled,
    SamplerState,
    VocabRules,
    kept_ids,
    sample,
)

__all__ = ["RowSampling", "RowState", "Sampled", "SamplerState", "VocabRules", "kept_ids", "sample"]
