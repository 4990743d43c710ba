"""FlashInfer as a backend of the indexer's selection: how it is called, and on a GPU that it agrees.

Without a GPU the library is a stand-in that insists on what the real one insists on and picks in descending order.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from worker_svc.ops import invariant, registry
from worker_svc.ops.top_entries import flashinfer, ref


class Library:
    """The two functions in torch, with the checks of the real ones."""

    def radix_topk_page_table_transform(
        self, scores, out, table, row_to_batch, lengths, states, k, det, tie, page, safe, starts, table_starts, raw
    ):
        assert out.is_contiguous() and table.is_contiguous() and row_to_batch.is_contiguous()
        assert scores.stride(1) == 1 and out.shape == (len(scores), k) and tie == 1 and not (det or safe)
        assert starts is table_starts is raw is None and states.dtype == torch.uint8 and not states.any()
        for row, (length, slot) in enumerate(zip(lengths.tolist(), row_to_batch.tolist())):
            chosen = self._chosen(scores[row], length, k)
            out[row] = -1
            out[row, : len(chosen)] = table[slot, chosen // page] * page + chosen % page

    def radix_topk_ragged_transform(self, scores, out, offsets, lengths, states, k, det, tie, safe, starts):
        assert scores.is_contiguous() and out.is_contiguous() and offsets.is_contiguous() and lengths.is_contiguous()
        assert tie == 1 and not (det or safe) and starts is None and len(states) == 1 << 20
        for row, (length, base) in enumerate(zip(lengths.tolist(), offsets.tolist())):
            chosen = self._chosen(scores[row], length, k)
            out[row] = -1
            out[row, : len(chosen)] = (chosen + base).int()

    @staticmethod
    def _chosen(row, length, k):
        if length <= k:
            return torch.arange(length)
        return torch.sort(row[:length], descending=True, stable=True).indices[:k]


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(flashinfer, "library", Library)
    flashinfer._states.cache_clear()
    yield
    flashinfer._states.cache_clear()


def drawn(k: int):
    generator = torch.Generator().manual_seed(k)
    scores = torch.randn(6, 700, generator=generator)[:, :600]
    scores[1].relu_()
    lengths = torch.tensor([600, 511, 600, k + 1, k, 0], dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        scores[row, length:] = torch.nan
    table = torch.randperm(30, generator=generator).int().view(3, 10)
    return scores, lengths, torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32), table


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("wide", [0, 128])
def test_rows_and_entries_are_the_references_in_another_order(wide):
    scores, lengths, slots, table = drawn(64)
    want, got = torch.empty(6, 64, dtype=torch.int32), torch.full((6, wide + 64), -7, dtype=torch.int32)
    ref.top_rows(scores, lengths, slots, table, want)
    flashinfer.top_rows(scores, lengths, slots, table, got[:, wide:])
    assert not torch.equal(got[:, wide:], want), "the stand-in's order is another one"
    assert torch.equal(got[:, wide:].sort(1).values, want.sort(1).values)
    ref.top_entries(scores, lengths, slots * 1000, want)
    flashinfer.top_entries(scores, lengths, slots * 1000, got[:, wide:])
    assert torch.equal(got[:, wide:].sort(1).values, want.sort(1).values) and (got[:, :wide] == -7).all()


def test_rows_are_handed_over_as_they_lie_where_memory_reaches():
    whole = torch.randn(4, 700)
    seen = flashinfer._whole_rows(whole[:, :600])
    assert seen.data_ptr() == whole.data_ptr() and seen.shape == (4, 700)
    behind = flashinfer._whole_rows(whole[:, 200:])
    assert torch.equal(behind, whole[:, 200:]) and behind.is_contiguous() and behind.data_ptr() != whole.data_ptr()


def test_a_library_that_cannot_be_compiled_says_what_it_needs(monkeypatch):
    def fails():
        raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist")

    spec = SimpleNamespace(is_compiled=False, build_and_load=fails)
    module = SimpleNamespace(gen_topk_module=lambda: spec)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(topk=module))
    monkeypatch.setitem(sys.modules, "flashinfer.topk", module)
    flashinfer.library.cache_clear()
    with pytest.raises(RuntimeError, match=r"Could not find nvcc.*precache MODEL --kernel top_entries=flashinfer"):
        flashinfer.library()
    spec.is_compiled, spec.load = True, lambda: "as it lies"
    assert flashinfer.library() == "as it lies"
    flashinfer.library.cache_clear()


def test_deterministic_mode_refuses_it(monkeypatch):
    monkeypatch.setattr(registry, "_pins", {"top_entries": "flashinfer"})
    with pytest.raises(registry.KernelError, match="--kernel top_entries=flashinfer with --deterministic"):
        invariant.candidates("top_entries")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rows", "entries"), [(1, 1024), (64, 4096), (3, 300_032)])
def test_it_takes_what_our_kernel_takes_on_the_gpu(rows, entries):
    from worker_svc.ops.top_entries import triton

    if registry.obstacle("flashinfer"):
        pytest.skip(registry.obstacle("flashinfer"))
    scores = torch.randn(rows, entries, device="cuda").relu_()
    lengths = torch.randint(0, entries + 1, (rows,), device="cuda").int()
    lengths[0] = entries
    slots, pages = torch.arange(rows, device="cuda").int(), entries // 64
    table = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
    ours, theirs = (torch.full((rows, 512), -7, dtype=torch.int32, device="cuda") for _ in range(2))
    triton.top_rows(scores, lengths, slots, table, ours)
    flashinfer.top_rows(scores, lengths, slots, table, theirs)
    assert torch.equal(ours.sort(1).values, theirs.sort(1).values)
    wide = torch.full((rows, 640), -7, dtype=torch.int32, device="cuda")
    triton.top_entries(scores, lengths, slots * 9, ours)
    flashinfer.top_entries(scores, lengths, slots * 9, wide[:, 128:])
    assert torch.equal(ours.sort(1).values, wide[:, 128:].sort(1).values) and bool((wide[:, :128] == -7).all())
