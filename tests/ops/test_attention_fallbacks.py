"""Scores and attention in Triton under the interpreter, against torch: sparse and empty lists, splits, formats."""

import pytest
import torch

from worker_svc.model.rope import RopeTable
from worker_svc.ops import attention_output, index_scores, kv_rows, paged_attention, sparse_attention
from worker_svc.ops.rope import rotate_
from worker_svc.ops.sparse_attention import DecodePlan

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("these tests run kernels on CPU tensors", allow_module_level=True)

FREQS = 1.0 / (10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
TURNS = torch.view_as_real(RopeTable(FREQS, 512).turns).contiguous()
SCALE = 512**-0.5


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(generator, *shape) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def distance(out, expected) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def filled_pool(generator, rows: int, *, bf16: bool = False) -> torch.Tensor:
    pool = kv_rows.allocate(rows, "cpu", bf16=bf16)
    scale = torch.exp2(torch.randint(-3, 3, (rows, 8), generator=generator).float()).repeat_interleave(64, 1)
    kv_rows.insert_rows(normal(generator, rows, 512) * scale, pool, torch.arange(rows, dtype=torch.int32))
    return pool


def random_lists(generator, tokens: int, width: int, rows: int, lengths: torch.Tensor) -> torch.Tensor:
    """Distinct rows, -1 here and there, and garbage that no kernel may read behind the length."""
    lists = torch.stack([torch.randperm(rows, generator=generator)[:width] for _ in range(tokens)]).int()
    lists[torch.rand(tokens, width, generator=generator) < 0.1] = -1
    lists[torch.arange(width) >= lengths.unsqueeze(1)] = 2**30
    return lists


class Problem:
    """Tokens with full, short and empty lists."""

    def __init__(self, heads: int, *, bf16: bool = False) -> None:
        generator = torch.Generator().manual_seed(heads)
        self.q = normal(generator, 3, heads, 512).bfloat16()
        self.window, self.entries = filled_pool(generator, 256, bf16=bf16), filled_pool(generator, 320, bf16=bf16)
        self.window_len, self.entry_len = ints(128, 5, 0), ints(192, 0, 0)
        self.window_rows = random_lists(generator, 3, 128, 256, self.window_len)
        self.entry_rows = random_lists(generator, 3, 192, 320, self.entry_len)
        self.sink = normal(generator, heads)

    @property
    def rows(self):
        return self.window, self.window_rows, self.window_len, self.entries, self.entry_rows, self.entry_len


@pytest.mark.parametrize(
    ("heads", "bf16", "splits", "dtype"),
    [
        (4, False, 1, torch.bfloat16),
        (20, False, 3, torch.float16),
        (16, True, 7, torch.bfloat16),
    ],
)
def test_decode_over_rows(heads, bf16, splits, dtype):
    from worker_svc.ops.sparse_attention import triton

    problem = Problem(heads, bf16=bf16)
    expected = sparse_attention.decode_attention(problem.q, *problem.rows, problem.sink, SCALE, DecodePlan())
    part, lse = triton.attend(problem.q.to(dtype), *problem.rows, SCALE, splits)
    out = torch.full_like(expected, torch.nan)
    triton.join(part, lse, problem.sink, out)
    assert part.shape == (3, splits, heads, 512) and not out.isnan().any()
    assert distance(out, expected) < 3e-3
    assert (out[2] == 0).all(), "a token without keys attends to nothing"


def test_window_alone_and_the_quantising_join():
    from worker_svc.ops.paged_attention import triton

    problem = Problem(8)
    positions = ints(127, 4, -1)
    results = []
    for call in (triton.paged_attention, paged_attention.paged_attention):
        codes = torch.full((3, 2, 2048), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scale = attention_output.scales(3, 2, 2048, "cpu").fill_(torch.nan)
        call(
            problem.q,
            problem.window,
            problem.window_rows,
            problem.window_len,
            None,
            None,
            None,
            problem.sink,
            SCALE,
            TURNS,
            positions,
            codes,
            scale,
        )
        results.append((codes.float() * scale.repeat_interleave(128, 2), scale))
    assert not results[0][1].isnan().any()
    rows = (problem.window, problem.window_rows, problem.window_len, None, None, None)
    exact = sparse_attention.decode_attention(problem.q, *rows, problem.sink, SCALE, DecodePlan()).float()
    at = torch.view_as_complex(TURNS[positions.clamp(min=0).long()]).conj().resolve_conj()
    exact = rotate_(exact, at.unsqueeze(1)).view(3, 2, 2048)
    # Half an E4M3 step is most of either's distance; values near its edge fall to either side.
    assert distance(results[1][0], exact) < 0.03
    assert distance(results[0][0], exact) < 1.02 * distance(results[1][0], exact)
    assert distance(results[0][0], results[1][0]) < 0.02


def test_prefill_over_a_workspace():
    from worker_svc.ops.sparse_attention import triton

    generator = torch.Generator().manual_seed(3)
    q, keys = normal(generator, 3, 4, 512).bfloat16(), normal(generator, 130, 512).bfloat16()
    index = torch.randint(0, 130, (3, 128), generator=generator).int()
    index[1, 3:], index[0, ::7] = -1, -1
    sink = normal(generator, 4)
    out = torch.full_like(q, torch.nan)
    triton.sparse_prefill(q, keys, index, sink, SCALE, out)
    assert distance(out, sparse_attention.chunk_attention(q, keys, index, sink, SCALE)) < 3e-3


def test_chunks_with_the_librarys_roundings_stay_near_the_exact_ones():
    from worker_svc.ops.sparse_attention import rows_ref

    generator = torch.Generator().manual_seed(5)
    q, keys = normal(generator, 5, 4, 512).bfloat16(), normal(generator, 300, 512).bfloat16()
    index = torch.randint(0, 300, (5, 384), generator=generator).int()
    index[1, 3:], index[0, ::7], index[2] = -1, -1, -1
    sink = normal(generator, 4)
    exact = sparse_attention.chunk_attention(q, keys, index, sink, SCALE)
    rounded = rows_ref.rounded_chunk_attention(q, keys, index, sink, SCALE)
    assert 1e-4 < distance(rounded, exact) < 3e-3
    assert (rounded[2] == 0).all(), "a token without keys attends to nothing"


@pytest.mark.parametrize("heads", [4, 32])
def test_index_scores(heads):
    from worker_svc.ops.index_scores import triton

    generator = torch.Generator().manual_seed(heads)
    codes = normal(generator, 4, heads, 128).to(torch.float8_e4m3fn)
    folded = normal(generator, 4, heads)
    pool = kv_rows.allocate_index(512, "cpu")
    kv_rows.insert_index_rows(normal(generator, 512, 128) * 3, pool, torch.arange(512, dtype=torch.int32))
    table = torch.randperm(8, generator=generator).view(2, 4).int()
    slots, lengths = ints(1, 0, 1, 0), ints(250, 64, 1, 0)
    scores = torch.full((4, 260), torch.nan)
    triton.paged_scores(codes, folded, pool, table, slots, lengths, scores)
    expected = index_scores.paged_scores(codes, folded, pool, table, slots, lengths, 260)
    for token, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(scores[token, :length], expected[token, :length], rtol=1e-4, atol=1e-4)
        assert scores[token, length:].isnan().all()
    keys, key_scale = normal(generator, 300, 128).to(torch.float8_e4m3fn), torch.rand(300, generator=generator)
    first, last = ints(0, 100, 299, 20), ints(300, 171, 300, 20)
    scores = torch.full((4, 300), torch.nan)
    triton.ragged_scores(codes, folded, keys, key_scale, first, last, scores)
    expected = index_scores.ragged_scores(codes, folded, keys, key_scale, first, last, 300)
    for token, length in enumerate((last - first).tolist()):
        torch.testing.assert_close(scores[token, :length], expected[token, :length], rtol=1e-4, atol=1e-4)
        assert scores[token, length:].isnan().all()
