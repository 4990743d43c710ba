"""Device sampling, interpreted, against the host sampler: the same tokens, whatever the parameters."""

import numpy as np
import pytest
import torch

from worker_svc.ops import sample as door
from worker_svc.ops.sample import Params

pytest.importorskip("triton")
from worker_svc.ops.sample import triton as kernels

VOCAB = 1200


def _params(rows, draw, **fixed):
    def ints():
        return torch.randint(-(2**31), 2**31 - 1, (rows,), generator=draw).int()

    numbers = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | fixed
    whole = {
        name: torch.full((rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
        for name, value in numbers.items()
    }
    return Params(**whole, seed_low=ints(), seed_high=ints(), choice=ints(), position=ints())


def _both(logits, params, **more):
    results = []
    for run in (kernels.sample, door.ref.sample):
        tokens, faults = torch.full((len(logits),), -7, dtype=torch.int32), torch.full((len(logits),), -7).int()
        run(logits, params, tokens, faults, 1, more.get("never"), more.get("masks"))
        results.append((tokens.tolist(), faults.tolist()))
    return results


WAYS = {
    "one lane each": {},
    "few lanes": {"SCAN": 256},  # several values to a lane, as in a real vocabulary
    "no room": {"SCAN": 1024, "SLOW": 512, "ROOM": 4},  # the whole row is searched
}
MODES = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "min_p": 0.1},
    {"top_k": 5},
    {"temperature": 3.0, "top_k": 40, "top_p": 0.7},
    {"temperature": 2.0, "top_p": 0.9, "min_p": 0.02},
]


def _go(monkeypatch, way):
    for name, value in WAYS[way].items():
        monkeypatch.setattr(kernels, name, value)


@pytest.mark.parametrize(
    ("way", "fixed"),
    [("one lane each", mode) for mode in MODES]
    + [("few lanes", mode) for mode in MODES[3:]]
    + [("no room", mode) for mode in MODES[4:]],
)
def test_tokens_are_the_host_samplers(way, fixed, monkeypatch):
    _go(monkeypatch, way)
    draw = torch.Generator().manual_seed(len(fixed))
    logits = torch.randn(3, VOCAB, generator=draw) * 2
    ours, truth = _both(logits, _params(3, draw, **fixed))
    assert ours == truth and ours[1] == [0, 0, 0]


@pytest.mark.parametrize("way", list(WAYS))
def test_equal_values_at_a_boundary_keep_the_lower_ids(way, monkeypatch):
    _go(monkeypatch, way)
    draw = torch.Generator().manual_seed(4)
    logits = torch.randint(0, 4, (2, VOCAB), generator=draw).float()
    modes = [{"temperature": 0.0}, {"top_k": 900}, {"top_p": 0.4}, {"top_k": 500, "top_p": 0.5}]
    for fixed in modes[3:] if way == "no room" else modes:
        ours, truth = _both(logits, _params(2, draw, **fixed))
        assert ours == truth, fixed


def _words(allowed):
    padded = np.zeros(-(-len(allowed) // 32) * 32, dtype=bool)
    padded[: len(allowed)] = allowed
    return torch.from_numpy(np.packbits(padded, bitorder="little").view("<i4").astype(np.int32))


def test_masked_ids_are_never_drawn_and_faults_end_the_row():
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(5, VOCAB, generator=draw)
    never = np.zeros(VOCAB, dtype=bool)
    never[:200] = True
    allowed = np.ones((5, VOCAB), dtype=bool)
    allowed[1] = False
    allowed[1, [100, 700, 701]] = True
    allowed[2, :] = False
    logits[3, 900] = float("nan")
    logits[4, 1100] = float("inf")
    masks = torch.stack([_words(row) for row in allowed])
    ours, truth = _both(logits, _params(5, draw), never=_words(never), masks=masks)
    assert ours == truth
    assert ours[0][0] >= 200 and ours[0][1] in (700, 701)
    assert ours[1] == [0, 0, 2, 1, 1] and ours[0][2:] == [1, 1, 1]


def test_fast_noise_is_close_to_the_exact_one():
    draw = torch.Generator().manual_seed(6)
    words = torch.randint(0, 2**32, (4096,), generator=draw)
    words[:4] = torch.tensor([0, 2**32 - 1, 2**32 - 2, 2**31])
    exact = -np.log(-np.log((words.numpy() + 0.5) * 2.0**-32))
    low = ((words.numpy()).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    gap = ((2**32 - 1 - words.numpy()).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    series = gap * (1 + gap * (0.5 + gap * (1 / 3 + gap * (0.25 + gap * 0.2))))
    with np.errstate(divide="ignore"):
        inner = np.where(gap < 0.02, series, -np.log(np.minimum(low, np.float32(1 - 1e-7))))
    assert np.abs(-np.log(inner) - exact).max() < kernels.REACH.value / 4
