"""Attention-side Triton kernels under the interpreter against torch references: fresh inputs, poisoned outputs."""

import pytest
import torch

from worker_svc.model.rope import RopeTable
from worker_svc.ops import attention_output, kv_rows, latent_rows, query_heads
from worker_svc.ops.kv_rows.ref import KERNEL_PAGE, data_view, read_rows, scale_view

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("these tests run kernels on CPU tensors", allow_module_level=True)

FREQS = 1.0 / (10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
TURNS = torch.view_as_real(RopeTable(FREQS, 1024).turns).contiguous()
EPS = 1e-6


def seeded(*key) -> torch.Generator:
    return torch.Generator().manual_seed(hash(key) % 2**31)


def poisoned_codes(*shape) -> torch.Tensor:
    return torch.full(shape, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)


def poisoned_pool(rows: int, *, bf16: bool = False) -> torch.Tensor:
    return kv_rows.allocate(rows, "cpu", bf16=bf16).fill_(0xA5)


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius distance; NaN never passes."""
    out, expected = out.double(), expected.double()
    return float((out - expected).norm() / expected.norm())


def same_rows(pool: torch.Tensor, other: torch.Tensor) -> float:
    """Share of bytes that differ between two FP8 or BF16 pools."""
    return float((pool != other).float().mean())


def wide(generator: torch.Generator, *shape) -> torch.Tensor:
    """Normal values whose 64-blocks differ by powers of two, with some zeros."""
    x = torch.randn(*shape, generator=generator)
    scale = torch.exp2(torch.randint(-9, 6, (*shape[:-1], shape[-1] // 64), generator=generator).float())
    x = x * scale.repeat_interleave(64, -1)
    return x.masked_fill(torch.rand(*shape, generator=generator) < 0.02, 0.0)


@pytest.mark.parametrize("bf16", [False, True])
def test_rows_are_inserted_as_the_layout_says_and_gathered_back(bf16):
    from worker_svc.ops.kv_rows import triton

    generator = seeded("rows", bf16)
    values = wide(generator, 21, 640)[:, 64:576]
    rows = torch.randperm(200, generator=generator)[:21].int()
    rows[[3, 8]] = -1
    pool, expected = poisoned_pool(200, bf16=bf16), poisoned_pool(200, bf16=bf16)
    triton.insert_rows(values, pool, rows)
    kv_rows.insert_rows(values, expected, rows)
    assert torch.equal(pool, expected)
    wanted = torch.cat([rows, torch.tensor([-1], dtype=torch.int32)])
    out = torch.full((22, 1024), torch.nan, dtype=torch.bfloat16)
    triton.gather_rows(pool, wanted, out[:, :512])
    assert torch.equal(out[:, :512], read_rows(pool, wanted))
    assert out[:, 512:].isnan().all()
    again = poisoned_pool(200, bf16=bf16)
    triton.insert_rows(out[:21, :512], again, rows)
    # A block whose maximum rounded down to a power of two takes half the scale the second time; its values stay.
    assert torch.equal(read_rows(again, wanted), read_rows(pool, wanted)), "rounded rows round to themselves"


def test_row_bytes_lie_where_the_attention_library_reads_them():
    values = torch.zeros(1, 512)
    values[0, 64:128], values[0, 448:] = 3.0, 1.5
    pool = poisoned_pool(130)
    kv_rows.insert_rows(values, pool, torch.tensor([64 + 5], dtype=torch.int32))
    data, scale = data_view(pool)[1, 5], scale_view(pool)[1, 5]
    assert (data[64:128].view(torch.float8_e4m3fn).float() * 2.0 ** (scale[1].int() - 127) == 3.0).all()
    assert (data[448:].view(torch.bfloat16) == 1.5).all()
    assert scale[7] == 0
    assert pool.shape == (3, 37440) and kv_rows.rows584(pool).shape == (3, KERNEL_PAGE, 1, 584)
    first = 1 * 37440 + 5 * 576
    assert pool.flatten()[first : first + 448].equal(data[:448])
    assert pool.flatten()[37440 + 64 * 576 + 5 * 8] == scale[0]


def test_index_rows_are_gathered():
    from worker_svc.ops.kv_rows import triton

    generator = seeded("index rows")
    pool = kv_rows.allocate_index(150, "cpu")
    rows = torch.randperm(150, generator=generator)[:40].int()
    kv_rows.insert_index_rows(wide(generator, 40, 128), pool, rows)
    rows[7] = -1
    codes, scale = poisoned_codes(40, 128), torch.full((40,), torch.nan)
    wanted_codes, wanted_scale = poisoned_codes(40, 128), torch.full((40,), torch.nan)
    triton.gather_index_rows(pool, rows, codes, scale)
    kv_rows.gather_index_rows(pool, rows, wanted_codes, wanted_scale)
    assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8)) and torch.equal(scale, wanted_scale)


@pytest.mark.parametrize("q_lora", [128, 1024, 1536])
@pytest.mark.parametrize(("bf16", "parts"), [(False, 1), (True, 1), (False, 4)])
def test_latent_rows(q_lora, bf16, parts):
    from worker_svc.ops.latent_rows import triton

    generator = seeded("latent", q_lora, bf16)
    tokens = 5
    qkv = wide(generator, tokens, q_lora + 512 + 128)[:, : q_lora + 512].bfloat16()
    qkv = torch.nn.functional.pad(qkv, (0, 64))[:, : q_lora + 512]
    if parts > 1:
        qkv = qkv.float() * torch.randn(parts, tokens, 1, generator=generator)
    q_weight, kv_weight = 1 + torch.randn(q_lora, generator=generator) / 4, torch.rand(512, generator=generator) + 0.5
    positions = torch.tensor([0, 1, 700, -1, 1023], dtype=torch.int32)
    write = torch.tensor([5, 191, -1, -1, 64], dtype=torch.int32)
    places = torch.tensor([3, 0, 1, 0, 4], dtype=torch.int32)
    results = []
    for call in (triton.latent_rows, latent_rows.latent_rows):
        pool, codes = poisoned_pool(192, bf16=bf16), poisoned_codes(tokens, q_lora)
        scale = torch.full((q_lora // 128, 8), torch.nan).t()[:tokens]
        space = torch.full((6, 512), torch.nan, dtype=torch.bfloat16)
        call(
            qkv, q_weight, kv_weight, TURNS, positions, write, pool, codes, scale,
            eps=EPS, workspace=space, workspace_rows=places,
        )  # fmt: skip
        results.append((pool, codes, scale, space))
    (pool, codes, scale, space), (ref_pool, ref_codes, ref_scale, ref_space) = results
    assert torch.equal(scale, ref_scale) and not scale.isnan().any()
    value = codes.float() * scale.repeat_interleave(128, 1)
    assert distance(value, ref_codes.float() * ref_scale.repeat_interleave(128, 1)) < 5e-4
    assert same_rows(pool, ref_pool) < 2e-4, "bytes of unwritten rows are equal, written ones but for last bits"
    assert distance(space[[3, 0, 1, 4]], ref_space[[3, 0, 1, 4]]) < 5e-4
    assert space[[2, 5]].isnan().all()
    assert torch.equal(space[[3, 0, 4]], read_rows(pool, write[[0, 1, 4]])), "the workspace holds what reads back"


@pytest.mark.parametrize(("heads", "index_heads", "padded"), [(4, 4, 32), (12, 64, 64)])
@pytest.mark.parametrize("few", [0, 64])
def test_query_heads(heads, index_heads, padded, few, monkeypatch):
    from worker_svc.ops.query_heads import triton

    monkeypatch.setattr(triton, "FEW_TOKENS", few)

    generator = seeded("query", heads)
    positions = torch.tensor([0, 1000, -1], dtype=torch.int32)
    both = wide(generator, 3, heads * 512 + index_heads * 128).bfloat16()
    weights = torch.randn(3, index_heads + 6, generator=generator)[:, 2 : 2 + index_heads]
    results = []
    for call in (triton.query_heads, query_heads.ref.query_heads):
        fresh = both.clone()
        index = query_heads.IndexQuery(
            raw=fresh[:, heads * 512 :],
            weights=weights,
            codes=poisoned_codes(3, padded, 128),
            folded=torch.full((3, padded), torch.nan),
        )
        view = fresh.as_strided((3, heads, 512), (fresh.stride(0), 512, 1))
        call(view, TURNS, positions, view, eps=EPS, index=index)
        results.append((view, index, fresh))
    (view, index, fresh), (ref_view, ref_index, ref_fresh) = results
    assert distance(view, ref_view) < 1e-3
    assert torch.equal(fresh[:, heads * 512 :], ref_fresh[:, heads * 512 :])
    assert distance(index.folded, ref_index.folded) < 1e-6
    assert distance(index.codes.float(), ref_index.codes.float()) < 2e-3
    assert (index.folded[:, index_heads:] == 0).all() and (index.codes[:, index_heads:].float() == 0).all()
    separate = torch.full((3, heads, 512), torch.nan, dtype=torch.bfloat16)
    source = both.clone()
    triton.query_heads(
        source.as_strided((3, heads, 512), (source.stride(0), 512, 1)), TURNS, positions, separate, eps=EPS, index=None
    )
    assert torch.equal(separate, view) and torch.equal(source, both)
    # FP16 queries over the memory of the BF16 ones, as attention over rows likes them best.
    same = source.as_strided((3, heads, 512), (source.stride(0), 512, 1))
    triton.query_heads(same, TURNS, positions, same.view(torch.float16), eps=EPS, index=None)
    expected = torch.empty(3, heads, 512, dtype=torch.float16)
    original = both.as_strided((3, heads, 512), (both.stride(0), 512, 1))
    query_heads.ref.query_heads(original, TURNS, positions, expected, EPS, None)
    assert distance(same.view(torch.float16), expected) < 3e-4


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (64, 8), (6, 1)])
def test_attention_output(heads, groups):
    from worker_svc.ops.attention_output import triton

    generator = seeded("output", heads)
    positions = torch.tensor([3, 1023], dtype=torch.int32)
    o = wide(generator, 2, heads, 512).bfloat16()
    results = []
    for call in (triton.attention_output, attention_output.attention_output):
        codes = poisoned_codes(2, groups, heads // groups * 512)
        scale = attention_output.scales(2, groups, codes.shape[2], "cpu").fill_(torch.nan)
        call(o, TURNS, positions, codes, scale)
        results.append((codes, scale))
    (codes, scale), (ref_codes, ref_scale) = results
    assert torch.equal(scale, ref_scale) and scale.shape == (2, groups, heads // groups * 4)
    assert distance(codes.float(), ref_codes.float()) < 1e-3
    assert scale.stride(0) == 1
