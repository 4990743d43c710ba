"""Split plans: both forms agree, and what a reader of a plan does covers every block once."""

import pytest
import torch

from worker_svc.ops.split_plan import split_plans
from worker_svc.ops.split_plan.ref import share

BLOCK, PARTS = 64, 132


def lengths(kind: str, batch: int, seed: int) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    if kind == "full":
        return tuple(torch.full((batch,), n, dtype=torch.int32) for n in (128, 512, 40))
    tops = (129, 513, 3000) if kind == "mixed" else (2, 1, 1)
    return tuple(torch.randint(0, top, (batch,), generator=rng, dtype=torch.int32) for top in tops)


def walk(parts: list[list[int]], splits: list[int], blocks: list[int]) -> None:
    """Follow the plan as the attention kernel does: every block of every request once, every split's place once."""
    done = [set() for _ in blocks]
    places = [set() for _ in blocks]
    for first, last, begin, end, split, first_cut, last_cut, _ in parts:
        if first >= len(blocks):
            continue
        assert first <= last
        for request in range(first, last + 1):
            start = begin if request == first else 0
            stop = end if request == last else blocks[request]
            assert start < stop <= blocks[request]
            whole = (start, stop) == (0, blocks[request])
            cut = first_cut if request == first else last_cut if request == last else 0
            assert bool(cut) != whole
            assert not done[request] & set(range(start, stop))
            done[request] |= set(range(start, stop))
            places[request].add(split if request == first else 0)
    for request, count in enumerate(blocks):
        assert done[request] == set(range(count))
        assert places[request] == set(range(splits[request + 1] - splits[request]))
    assert splits[0] == 0 and splits[-1] <= len(blocks) + len(parts)


@pytest.mark.parametrize("kind", ["full", "mixed", "short"])
@pytest.mark.parametrize("batch", [1, 9, 64, 200, 256])
def test_plans_cover_every_block_once(kind, batch):
    near, c4, c128 = lengths(kind, batch, batch)
    plans = split_plans(near, c4, c128, PARTS)
    for number, far in enumerate((torch.zeros_like(near), c4, c128)):
        blocks = [max(1, -(-a // BLOCK)) + -(-b // BLOCK) for a, b in zip(near.tolist(), far.tolist())]
        walk(plans.parts[number].tolist(), plans.splits[number].tolist(), blocks)


def test_equal_requests_are_kept_whole_where_that_is_cheaper():
    assert share([10] * 256, PARTS) == 20, "two requests each"
    assert share([10] * 64, PARTS) == 5, "half a request each"
    assert share([3] * 200, PARTS) == 6, "rather two whole ones than five blocks of three"
    assert share([10] * 4, PARTS) == 1


@pytest.mark.parametrize(("kind", "batch"), [("full", 64), ("full", 200), ("mixed", 37), ("short", 9), ("mixed", 1)])
def test_kernel_makes_the_same_plans(kind, batch):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("runs the kernel on CPU tensors")
    from worker_svc.ops.split_plan import SplitPlans, triton

    near, c4, c128 = lengths(kind, batch, batch + 1)
    wanted = split_plans(near, c4, c128, PARTS)
    got = SplitPlans(torch.full_like(wanted.parts, 77), torch.full_like(wanted.splits, 77))
    triton.split_plans(near, c4, c128, got)
    assert torch.equal(got.splits, wanted.splits)
    assert torch.equal(got.parts, wanted.parts)
