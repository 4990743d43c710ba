"""Step lists, compressors and selection in Triton under the interpreter, against torch and plain arithmetic."""

import pytest
import torch

from worker_svc.model.rope import RopeTable
from worker_svc.ops import compress_step, kv_rows, step_lists, top_entries
from worker_svc.ops.compress_step import IndexCompressor
from worker_svc.ops.kv_rows.ref import read_rows

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("these tests run kernels on CPU tensors", allow_module_level=True)

FREQS = 1.0 / (160000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
TURNS = torch.view_as_real(RopeTable(FREQS, 2048).turns).contiguous()
RING = 192


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_table(slots: int, pages: int, seed: int) -> torch.Tensor:
    order = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(seed))
    return order.view(slots, pages).int()


def fields(lists) -> dict[str, torch.Tensor]:
    return {name: getattr(lists, name) for name in lists.__dataclass_fields__}


def test_decode_lists():
    from worker_svc.ops.step_lists import triton

    table = random_table(4, 80, 0)
    positions, slots = ints(0, 3, 127, 128, 255, 2047, 2048, 20000, -1, 999), ints(0, 1, 2, 3, 0, 1, 2, 3, 0, 2)
    fresh, write = ints(0, 0, 900, 0), ints(0, 0, 0, 300)
    got = step_lists.DecodeLists.allocate(10, 20480, "cpu")
    expected = step_lists.DecodeLists.allocate(10, 20480, "cpu")
    triton.decode_lists(positions, slots, table, fresh, write, ring=RING, out=got)
    step_lists.decode_lists(positions, slots, table, fresh, write, ring=RING, out=expected)
    for name, value in fields(expected).items():
        assert torch.equal(fields(got)[name], value), name
    # By hand: position 999 of slot 2, whose keys exist from 900 on, closes entry 249.
    assert got.window_len[9] == 100
    assert got.window_rows[9, :100].tolist() == [2 * RING + p % RING for p in range(900, 1000)]
    assert (got.window_rows[9, 100:] == -1).all()
    assert got.c4_len[9] == 250 and got.c4_write[9] == table[2, 249 // 64] * 64 + 249 % 64
    assert got.c4_rows[9, 70] == table[2, 1] * 64 + 6 and (got.c4_rows[9, 250:] == -1).all()
    assert got.c128_write[9] == -1 and got.c128_len[9] == 7
    assert got.c128_rows[9, :7].tolist() == [int(table[2, i // 2]) * 2 + i % 2 for i in range(7)]
    # The 513th entry makes selection necessary; padding has no rows.
    assert got.c4_len[5] == 512 and (got.c4_rows[5] >= 0).all()
    assert got.c4_len[7] == 5000 and (got.c4_rows[7] == -1).all()
    assert got.window_len[8] == 0 and got.window_write[8] == -1 and (got.window_rows[8] == -1).all()


def test_entries_before_write_from_are_not_written():
    table = random_table(1, 8, 1)
    positions = torch.arange(0, 600, dtype=torch.int32)
    out = step_lists.DecodeLists.allocate(600, 2048, "cpu")
    zeros = torch.zeros(600, dtype=torch.int32)
    step_lists.decode_lists(positions, zeros, table, ints(0), ints(300), ring=RING, out=out)
    assert positions[out.c4_write >= 0].tolist() == list(range(303, 600, 4))
    assert positions[out.c128_write >= 0].tolist() == [383, 511]


def test_chunk_lists():
    from worker_svc.ops.step_lists import triton

    top_k = 300

    table = random_table(3, 16, 2)
    spans = [(0, 0, 5), (1, 250, 8), (2, 3000, 195)]  # slot, start, length
    positions = torch.cat([torch.arange(start, start + n) for _, start, n in spans] + [ints(-1)]).int()
    slots = torch.cat([torch.full((n,), slot) for slot, _, n in spans] + [ints(0)]).int()
    last = torch.cat([torch.full((n,), start + n - 1) for _, start, n in spans] + [ints(-1)]).int()
    tokens = positions.shape[0]
    own = torch.arange(tokens, dtype=torch.int32) + 127 * (slots + 1)
    c4, c128 = own * 0 + 2000 + slots * 1000, own * 0 + 700 + slots * 40
    args = (positions, slots, last, table, ints(0, 200, 0), ints(0, 0, 0), own, c4, c128)
    got, expected = (step_lists.ChunkLists.allocate(tokens, 4096, "cpu", top_k=top_k) for _ in range(2))
    triton.chunk_lists(*args, ring=RING, out=got)
    step_lists.chunk_lists(*args, ring=RING, out=expected)
    assert got.top_k == expected.top_k == top_k
    for name, value in fields(expected).items():
        assert name == "top_k" or torch.equal(fields(got)[name], value), name
    # The first token of the second row sees keys 200..250, of which 250 is its own.
    assert got.window_index[5, :51].tolist() == list(range(int(own[5]) - 50, int(own[5]) + 1))
    assert (got.window_index[5, 51:] == -1).all()
    # Only the last RING tokens of the long row stay in the ring.
    assert (got.window_write[13:-1] >= 0).tolist() == [False] * 3 + [True] * 192
    assert got.c128_len[13] == 128 + 23 and got.c128_index[13, 128 + 22] == c128[13] + 22
    assert got.c4_len[13] == 750 and (got.c4_index[13, 128:] == -1).all()


def test_a_chunk_lists_no_more_entries_than_the_indexer_chooses_also_where_its_list_is_longer():
    """A list is as long as whole blocks of 128: what stands behind k must not be read."""
    positions = torch.tensor([255, 259, 400], dtype=torch.int32)  # 64, 65 and 100 entries
    zeros = torch.zeros_like(positions)
    out = step_lists.ChunkLists.allocate(3, 512, "cpu", top_k=64)
    args = (positions, zeros, positions, random_table(1, 2, 3), ints(0), ints(0), zeros + 200, zeros + 300, zeros + 300)
    step_lists.chunk_lists(*args, ring=RING, out=out)
    assert (out.c4_index[:, 128:] >= 0).sum(1).tolist() == [64, 0, 0]
    assert out.c4_reach.tolist() == [192, 192, 192]


class Layer:
    """A C4 or C128 layer's compressor, with its pools, twice: for the kernels and for the reference."""

    def __init__(self, ratio: int, *, slots: int, ring: int, seed: int, bf16: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.ratio, self.ring = ratio, ring
        self.width = compress_step.state_width(ratio)
        columns = torch.arange(self.width)
        scores = (columns % 2560 >= 1024) & (columns < 2048) | (columns >= 2304) if ratio == 4 else columns >= 512
        self.ape = self.normal(ratio, self.width) * scores
        self.norm, self.index_norm = 1 + self.normal(512) / 4, 1 + self.normal(128) / 4
        self.states = torch.full((slots * ring, self.width), torch.nan)
        self.pool = kv_rows.allocate(512, "cpu", bf16=bf16)
        self.index_pool = kv_rows.allocate_index(512, "cpu")

    def normal(self, *shape) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def copy(self) -> "Layer":
        other = object.__new__(Layer)
        other.__dict__ = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.__dict__.items()}
        return other

    def run(self, raw, positions, slots, first, write, last=None, *, kernels: bool) -> None:
        from worker_svc.ops.compress_step import ref, triton

        index = IndexCompressor(norm=self.index_norm, pool=self.index_pool) if self.ratio == 4 else None
        args = (raw, self.ape, self.norm, TURNS, positions, slots, first, self.states, write, self.pool)
        if not kernels:
            ref.compress(*args, last, self.ratio, self.ring, 1e-6, index)
        elif last is None:
            triton.compress_step(*args, ratio=self.ratio, ring=self.ring, eps=1e-6, index=index)
        else:
            triton.compress_chunk(*args, last, ratio=self.ratio, ring=self.ring, eps=1e-6, index=index)

    def entries(self, count: int) -> torch.Tensor:
        return read_rows(self.pool, torch.arange(count, dtype=torch.int32)).float()

    def index_keys(self, count: int) -> torch.Tensor:
        codes, scale = torch.empty(count, 128, dtype=torch.float8_e4m3fn), torch.empty(count)
        kv_rows.gather_index_rows(self.index_pool, torch.arange(count, dtype=torch.int32), codes, scale)
        return codes.float() * scale.unsqueeze(1)

    def agrees(self, other: "Layer", count: int) -> None:
        assert torch.equal(self.states.isnan(), other.states.isnan())
        torch.testing.assert_close(self.states, other.states, rtol=0, atol=0, equal_nan=True)
        for mine, theirs in ((self.entries(count), other.entries(count)),) + (
            ((self.index_keys(count), other.index_keys(count)),) if self.ratio == 4 else ()
        ):
            assert theirs.abs().sum(1).gt(0).all(), "every entry was written"
            assert float((mine - theirs).norm() / theirs.norm()) < 2e-3
        assert (self.pool != other.pool).float().mean() < 1e-3


def spans(*rows, ratio):
    """Token tensors of rows (slot, start, length), entries of slot s in rows s * 200 + i."""
    positions = torch.cat([torch.arange(start, start + n) for _, start, n in rows]).int()
    slots = torch.cat([torch.full((n,), slot) for slot, _, n in rows]).int()
    lengths = [n for _, _, n in rows]
    firsts = [sum(lengths[:i]) for i in range(len(rows))]
    first = torch.cat([torch.full((n,), f) for f, n in zip(firsts, lengths)]).int()
    last = torch.cat([torch.full((n,), start + n - 1) for _, start, n in rows]).int()
    write = torch.where((positions + 1) % ratio == 0, slots * 200 + positions // ratio, -1).int()
    return positions, slots, first, write, last


@pytest.mark.parametrize(("ratio", "bf16"), [(4, False), (4, True), (128, False)])
def test_one_chunk_equals_steps_equals_reference(ratio, bf16):
    length, ring = (40, 8) if ratio == 4 else (256, 128)
    layer = Layer(ratio, slots=2, ring=ring, seed=ratio, bf16=bf16)
    raw = layer.normal(length, layer.width + 64)
    expected = layer.copy()
    expected.run(raw, *spans((1, 0, length), ratio=ratio), kernels=False)
    count = 200 + length // ratio
    whole = layer.copy()
    whole.run(raw, *spans((1, 0, length), ratio=ratio), kernels=True)
    rows = slice(200, count)
    assert float((whole.entries(count)[rows] - expected.entries(count)[rows]).norm()) < 2e-3 * float(
        expected.entries(count)[rows].norm()
    )
    torch.testing.assert_close(whole.states, expected.states, rtol=0, atol=0, equal_nan=True)
    # Token by token from the middle, in the interpreter's time.
    begin = length - (9 if ratio == 4 else 2)
    steps = layer.copy()
    steps.run(raw[:begin], *spans((1, 0, begin), ratio=ratio), kernels=False)
    for position in range(begin, length):
        tokens = spans((1, position, 1), ratio=ratio)
        steps.run(raw[position : position + 1], *tokens[:4], kernels=True)
    assert torch.equal(steps.states.isnan(), expected.states.isnan())
    mine, theirs = steps.entries(count)[rows], expected.entries(count)[rows]
    assert float((mine - theirs).norm() / theirs.norm()) < 2e-3
    if ratio == 4:
        mine, theirs = steps.index_keys(count)[rows], expected.index_keys(count)[rows]
        assert float((mine - theirs).norm() / theirs.norm()) < 2e-3


def test_verify_rows_and_a_row_in_the_middle_of_a_window():
    layer = Layer(4, slots=3, ring=16, seed=7)
    before = spans((0, 0, 13), (2, 0, 6), ratio=4)
    layer.run(layer.normal(19, layer.width), *before, kernels=False)
    expected = layer.copy()
    positions, slots, first, write, _ = spans((0, 13, 7), (2, 6, 7), ratio=4)
    positions = torch.cat([positions, ints(-1)])
    slots, first, write = (torch.cat([t, ints(0)]) for t in (slots, first, write))
    write[-1] = -1
    raw = layer.normal(15, layer.width)
    layer.run(raw, positions, slots, first, write, kernels=True)
    expected.run(raw, positions, slots, first, write, kernels=False)
    assert torch.equal(layer.states.isnan(), expected.states.isnan())
    torch.testing.assert_close(layer.states, expected.states, rtol=0, atol=0, equal_nan=True)
    mine, theirs = layer.entries(5), expected.entries(5)
    assert theirs.abs().sum(1).gt(0).all()
    assert float((mine - theirs).norm() / theirs.norm()) < 2e-3


@pytest.mark.parametrize(("k", "tile"), [(64, 4096), (64, 512), (512, 1024)])
def test_selection_takes_the_highest_and_among_equals_the_first(k, tile, monkeypatch):
    from worker_svc.ops.top_entries import triton

    monkeypatch.setattr(triton, "TILE", tile)
    generator = torch.Generator().manual_seed(k)
    table = random_table(3, 40, 3)
    scores = torch.randn(6, 2300, generator=generator)[:, :2200]
    scores[1].relu_()  # half of the row ties at zero
    scores[2] = torch.randint(-3, 3, (2200,), generator=generator).float()
    scores[3] = -0.0
    scores[4, ::2] = 0.0
    lengths = ints(2200, 2001, 2200, k + 1, k, 0)
    slots = ints(0, 1, 2, 0, 1, 2)
    for place, length in enumerate(lengths.tolist()):
        scores[place, length:] = torch.nan
    scores[4] = torch.nan  # fewer than k visible: never read
    out, expected = torch.full((6, k), -7, dtype=torch.int32), torch.full((6, k), -7, dtype=torch.int32)
    triton.top_rows(scores, lengths, slots, table, out)
    top_entries.top_rows(scores, lengths, slots, table, expected)
    assert torch.equal(out, expected)
    base = ints(0, 5, 9000, 1, 2, 3)
    wide = torch.full((6, k + 128), -7, dtype=torch.int32)
    triton.top_entries(scores, lengths, base, wide[:, 128:])
    top_entries.top_entries(scores, lengths, base, expected)
    assert torch.equal(wide[:, 128:], expected) and (wide[:, :128] == -7).all()
    for place in range(4):
        row = scores[place, : lengths[place]]
        order = sorted(range(row.shape[0]), key=lambda i: (-float(row[i]), i))[:k]
        assert (expected[place] - base[place]).tolist() == sorted(order)
