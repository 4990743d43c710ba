"""Router choice and expert sort, interpreted, against the torch references; integers exactly."""

import pytest
import torch

from worker_svc.ops import expert_sort, topk_gate
from worker_svc.ops.expert_sort import ref as sort_ref

pytest.importorskip("triton")
from worker_svc.ops.expert_sort import triton as sort_kernels
from worker_svc.ops.topk_gate import triton as gate_kernels


def _outputs(tokens, k):
    return torch.full((tokens, k), 77, dtype=torch.int32), torch.full((tokens, k), float("nan"))


@pytest.mark.parametrize(("tokens", "experts", "k", "parts"), [(5, 256, 6, 0), (3, 16, 2, 3), (2, 384, 6, 1)])
def test_select_equals_its_reference(tokens, experts, k, parts):
    draw = torch.Generator().manual_seed(experts)
    shape = (parts, tokens, experts) if parts else (tokens, experts)
    logits, bias = torch.randn(shape, generator=draw) * 4, torch.randn(experts, generator=draw) * 0.1
    positions = torch.arange(tokens, dtype=torch.int32)
    positions[-1] = -1
    got, want = _outputs(tokens, k), _outputs(tokens, k)
    gate_kernels.select(logits, bias, *got, 1.5, positions)
    topk_gate.select(logits, bias, *want, 1.5, positions)
    assert torch.equal(got[0], want[0]) and got[0][-1].tolist() == [-1] * k
    torch.testing.assert_close(got[1], want[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got[1][0].sum(), torch.tensor(1.5))


def test_among_equal_scores_the_lowest_expert_wins():
    logits = torch.ones(1, 256)
    logits[0, 200] = 2.0
    experts, weights = _outputs(1, 6)
    gate_kernels.select(logits, torch.zeros(256), experts, weights, 1.5, None)
    assert experts.tolist() == [[200, 0, 1, 2, 3, 4]]


def test_small_scores_keep_their_digits():
    logits = torch.linspace(-30, -5, 16).view(1, 16)
    got, want = _outputs(1, 6), _outputs(1, 6)
    gate_kernels.select(logits, torch.zeros(16), *got, 1.0, None)
    topk_gate.select(logits, torch.zeros(16), *want, 1.0, None)
    torch.testing.assert_close(got[1], want[1], atol=0, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hash_layers_route_by_token(dtype):
    draw = torch.Generator().manual_seed(1)
    logits, ids = torch.randn(4, 16, generator=draw), torch.tensor([3, 0, 9, 3], dtype=dtype)
    table = torch.rand(10, 16, generator=draw).argsort(1)[:, :2].int()
    got, want = _outputs(4, 2), _outputs(4, 2)
    positions = torch.tensor([5, -1, 0, 7], dtype=torch.int32)
    gate_kernels.select_hash(logits, table, ids, *got, 1.5, positions)
    topk_gate.select_hash(logits, table, ids, *want, 1.5, positions)
    assert torch.equal(got[0], want[0]) and got[0][0].tolist() == table[3].tolist()
    torch.testing.assert_close(got[1], want[1])


def _check_sorted(ids, out):
    flat, block = ids.flatten().tolist(), out.block
    end = int(out.num_padded)
    assert end % block == 0
    found = {}
    for first in range(0, end, block):
        expert = int(out.experts[first // block])
        slots = out.slots[first : first + block].tolist()
        real = [s for s in slots if s != len(flat)]
        assert real and slots == real + [len(flat)] * (block - len(real)), "padding stands behind the slots of a block"
        found.setdefault(expert, []).extend(real)
    assert list(found) == sorted(found)
    assert found == {e: [i for i, f in enumerate(flat) if f == e] for e in sorted(set(flat)) if e >= 0}


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "block"), [(1, 6, 16, 8), (7, 2, 16, 16), (40, 6, 12, 8), (9, 3, 6, 40)]
)
@pytest.mark.parametrize("chunk", [4096, 32])
def test_slots_are_sorted_by_expert(tokens, k, experts, block, chunk, monkeypatch):
    monkeypatch.setattr(sort_ref, "CHUNK", chunk)
    monkeypatch.setattr(sort_kernels, "CHUNK", chunk)
    draw = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=draw).argsort(1)[:, :k].int().contiguous()
    if tokens > 1:
        ids[tokens // 2 :: 5] = -1
    got, want = (expert_sort.allocate(tokens, k, experts, block, "cpu") for _ in range(2))
    for part in (got, want):
        for tensor in (part.slots, part.experts, part.num_padded, part.layout, part.counts):
            tensor.fill_(-9)
    sort_kernels.sort_slots(ids, got.slots, got.experts, got.num_padded, got.layout, got.counts, block)
    expert_sort.sort_slots(ids, want)
    _check_sorted(ids, got)
    _check_sorted(ids, want)
    assert torch.equal(got.layout, want.layout) and torch.equal(got.num_padded, want.num_padded)


def test_capacity_holds_the_worst_case():
    ids = torch.arange(12, dtype=torch.int32).view(4, 3)
    out = expert_sort.allocate(4, 3, 256, 16, "cpu")
    expert_sort.sort_slots(ids, out)
    assert int(out.num_padded) == 12 * 16 == out.slots.numel() == expert_sort.capacity(12, 256, 16)
