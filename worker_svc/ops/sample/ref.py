"""Device sampling on the CPU: the host sampler's own choice of ids and its noise, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from worker_svc.sampling import kept_ids, philox
from worker_svc.sampling.sampler import GREEDY_BELOW

if TYPE_CHECKING:
    from worker_svc.ops.sample import Params

Floats = npt.NDArray[np.float32]


def sample(
    logits: Tensor,
    params: Params,
    tokens: Tensor,
    faults: Tensor,
    end: int,
    never: Tensor | None,
    masks: Tensor | None,
) -> None:
    """See the door."""
    for row in range(logits.shape[0]):
        raw: Floats = logits[row].cpu().numpy()
        values = raw.copy()
        if never is not None:
            values[_bits(never, len(raw))] = -np.inf
        if masks is not None:
            values[~_bits(masks[row], len(raw))] = -np.inf
        best = values[int(values.argmax())]
        if np.isfinite(best):
            tokens[row], faults[row] = _draw(values, params, row), 0
        else:
            tokens[row] = end
            faults[row] = 2 if np.isneginf(best) and not np.isnan(raw).any() else 1


def _bits(words: Tensor, count: int) -> npt.NDArray[np.bool_]:
    octets = words.cpu().contiguous().numpy().astype("<i4").view(np.uint8)
    return np.unpackbits(octets, count=count, bitorder="little").view(np.bool_)


def _draw(values: Floats, params: Params, row: int) -> int:
    temperature = np.float32(params.temperature[row].item())
    if temperature < GREEDY_BELOW:
        return int(values.argmax())
    scaled = values / temperature
    ids = kept_ids(scaled, int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row]))
    low, high, choice, position = (
        int(part[row]) & 0xFFFFFFFF for part in (params.seed_low, params.seed_high, params.choice, params.position)
    )
    noise = philox.gumbel(ids, len(scaled), seed=high << 32 | low, choice=choice, position=position)
    return int(ids[(scaled[ids].astype(np.float64) + noise).argmax()])
