"""Kernels in deterministic mode, interpreted: right against torch, and a row's bits the same alone and among others.

What the interpreter cannot show is that a GPU would run one and the same program for decode and chunks: `Launch` says
what a program would be compiled for.
"""

import pytest
import torch

from worker_svc.ops import compress_step, invariant, kv_rows, sparse_attention
from worker_svc.ops.compress_step import IndexCompressor
from worker_svc.ops.hyper_boundary import BoundaryRules, Workspace, prepare_mixer, ref
from worker_svc.ops.quant_fp8 import quantise_rows, quantise_weight, scale_value
from worker_svc.ops.sparse_attention import DecodePlan

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("these tests run kernels on CPU tensors", allow_module_level=True)

from worker_svc.ops.attention_output import triton as output
from worker_svc.ops.compress_step import triton as compress
from worker_svc.ops.hyper_boundary import triton as boundary
from worker_svc.ops.skinny_gemm import triton as skinny
from worker_svc.ops.sparse_attention import triton as attention

SCALE = 512**-0.5


@pytest.fixture(autouse=True)
def mode():
    with invariant.switched(True):
        yield


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Lists:
    """Three tokens over two pools: full lists, a short window with few entries, a full window alone."""

    def __init__(self, *, far):
        draw = torch.Generator().manual_seed(5)
        self.q = drawn(3, 4, 512, seed=6).bfloat16()
        self.window, self.entries = kv_rows.allocate(256, "cpu"), kv_rows.allocate(320, "cpu")
        for seed, pool in ((1, self.window), (2, self.entries)):
            rows = torch.arange(pool.shape[0] * 64, dtype=torch.int32)
            kv_rows.insert_rows(drawn(len(rows), 512, seed=seed), pool, rows)
        self.near_len = torch.tensor([128, 40, 128], dtype=torch.int32)
        self.far_len = torch.tensor([far, 9, 0], dtype=torch.int32)
        self.near = torch.stack([torch.randperm(256, generator=draw)[:128] for _ in range(3)]).int()
        self.far = torch.stack([torch.randperm(320, generator=draw)[:far] for _ in range(3)]).int()
        for rows, lengths in ((self.near, self.near_len), (self.far, self.far_len)):
            rows[torch.arange(rows.shape[1]) >= lengths.unsqueeze(1)] = -1
        self.sink = drawn(4, seed=7)

    def decode(self, *tokens):
        some, out = list(tokens), torch.full((len(tokens), 4, 512), torch.nan, dtype=torch.bfloat16)
        lists = (self.near[some], self.near_len[some], self.entries, self.far[some], self.far_len[some])
        attention.sparse_decode(self.q[some], self.window, *lists, self.sink, SCALE, out)
        return out

    def chunk(self, *tokens, reach=True, fp8=True):
        """The same keys in one workspace, window first."""
        some, out = list(tokens), torch.full((len(tokens), 4, 512), torch.nan, dtype=torch.bfloat16)
        keys = torch.empty(576, 512, dtype=torch.bfloat16)
        kv_rows.gather_rows(self.window, torch.arange(256, dtype=torch.int32), keys[:256])
        kv_rows.gather_rows(self.entries, torch.arange(320, dtype=torch.int32), keys[256:])
        index = torch.cat([self.near, self.far + 256 * (self.far >= 0)], 1)[some].int().contiguous()
        args = (self.q[some], keys, index, self.sink, SCALE, out)
        attention.sparse_prefill(*args, 128 + self.far_len[some] if reach else None, fp8=fp8)
        return out


def test_attention_reads_a_token_alike_in_decode_in_a_chunk_and_in_any_company():
    lists = Lists(far=256)  # 6 tiles: two splits
    together = lists.decode(0, 1, 2)
    wanted = sparse_attention.decode_attention(
        *(lists.q, lists.window, lists.near, lists.near_len, lists.entries, lists.far, lists.far_len),
        *(lists.sink, SCALE, DecodePlan()),
    )
    assert (together.float() - wanted.float()).norm() < 3e-3 * wanted.float().norm()  # weights are BF16
    assert same(lists.decode(1), together[1:2])
    assert same(lists.chunk(2, 0), together[[2, 0]])
    assert same(lists.chunk(1, reach=False), together[1:2])
    assert same(lists.chunk(2, fp8=False), together[2:3])  # other programs, but the interpreter adds alike


def test_rows_read_from_fp8_are_exact_as_fp8_again():
    values = drawn(130, 512) * torch.logspace(-6, 3, 130).unsqueeze(1)
    values[5, :64] = torch.linspace(0, 223, 64)  # at most half of the largest code
    pool, rows = kv_rows.allocate(130, "cpu"), torch.arange(130, dtype=torch.int32)
    kv_rows.insert_rows(values, pool, rows)
    read = kv_rows.gather_rows(pool, rows, torch.empty(130, 512, dtype=torch.bfloat16))
    again = kv_rows.gather_rows(attention._fp8_pool(read), rows, torch.empty_like(read))
    assert same(again, read) and read.float().abs().max() > 0


def test_a_longer_list_that_holds_nothing_more_changes_nothing(monkeypatch):
    """Graphs of a longer context launch more splits; and groups of a chunk are cut anywhere."""
    lists = Lists(far=64)
    wanted = lists.decode(0)
    lists.far = torch.cat([lists.far, torch.full((3, 320), -1, dtype=torch.int32)], 1)
    monkeypatch.setattr(attention, "PART_BYTES", 1)
    assert same(lists.decode(0), wanted)


def fp8_product(rows):
    codes, scale = torch.empty(70, 256).to(torch.float8_e4m3fn), torch.empty(70, 2)
    quantise_rows(drawn(70, 256).bfloat16(), codes, scale)
    weight, exponent = quantise_weight(drawn(128, 256, seed=1))
    out = torch.full((len(rows), 1, 128), torch.nan, dtype=torch.bfloat16)
    args = (codes[rows].unsqueeze(1), scale[rows].unsqueeze(1), weight.unsqueeze(0), scale_value(exponent).unsqueeze(0))
    skinny.fp8_grouped(*args, out, tiled=True)
    exact = (codes[rows].float() * scale[rows].repeat_interleave(128, 1)) @ (
        weight.float() * scale_value(exponent).repeat_interleave(128, 0).repeat_interleave(128, 1)
    ).t()
    return out[:, 0], exact


def bf16_product(rows):
    x, weight = drawn(70, 256).bfloat16()[rows], drawn(48, 256, seed=1).bfloat16()
    out = torch.full((len(rows), 48), torch.nan)
    skinny.bf16(x, weight, out, tiled=True)
    return out, x.float() @ weight.float().t()


@pytest.mark.parametrize("product", [fp8_product, bf16_product])
def test_products_in_tiles_of_64_rows(product):
    rows = torch.arange(70).flip(0)
    got, exact = product(rows)
    assert (got.float() - exact).norm() < 2e-3 * exact.norm()
    for row in (0, 69):
        assert same(product(torch.tensor([row]))[0], got[69 - row : 70 - row])


def test_a_boundary_is_cut_alike_at_one_token_and_at_many():
    width, rules = 640, BoundaryRules(2, 1e-6, 1e-6)
    assert {boundary.split(tokens, width) for tokens in (1, 17, 65, 5000)} == {boundary.split(1, width)}
    mixer = prepare_mixer(drawn(24, 4 * width, seed=1) * 0.01, torch.ones(3), drawn(24, seed=2))
    space = Workspace(64, width, "cpu")
    space.partials = torch.full((64 * 16 * 42 + 256,), torch.nan)
    streams, out = drawn(5, 4, width, seed=3).bfloat16(), drawn(5, width, seed=4).bfloat16()
    post, comb = torch.rand(5, 4), torch.rand(5, 16) / 4

    def run(rows, side):
        new, y = torch.full((len(rows), 4, width), torch.nan).bfloat16(), torch.empty(len(rows), width).bfloat16()
        args = (streams[rows], new, post[rows].contiguous(), comb[rows].contiguous())
        post_, comb_ = torch.empty(len(rows), 4), torch.empty(len(rows), 16)
        if side is ref:
            ref.post_mix(*args, out[rows], None, None)
            ref.pre_norm(new, mixer, torch.ones(width), rules, y, post_, comb_, None, None, None)
        else:
            boundary.post_mix(*args, mixer, space, out[rows], None, None)
            boundary.pre_norm(new, mixer, space, torch.ones(width), rules, y, post_, comb_, None, None, None)
        return new, y, post_, comb_

    every = torch.arange(5)
    got, wanted = run(every, boundary), run(every, ref)
    for a, b in zip(got, wanted):
        assert (a.float() - b.float()).norm() < 2e-3 * b.float().norm()
    for a, b in zip(run(torch.tensor([4]), boundary), got):
        assert same(a, b[4:])


class Launch:
    """Stands in for a kernel: `programs` are what its launches would be compiled for."""

    def __init__(self, kernel):
        self.kernel, self.programs = kernel, []

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **options):
        apart = self.kernel.kwargs.get("do_not_specialize") or ()
        named = dict(zip(self.kernel.arg_names, args))
        self.programs.append([(name, self.kind(name, value, name not in apart)) for name, value in named.items()])
        self.programs[-1] += sorted(options.items())

    def kind(self, name, value, special):
        """As the compiler sees an argument: its type, and if it is 1 or a multiple of 16."""
        if isinstance(value, torch.Tensor):
            return value.dtype, special and value.data_ptr() % 16 == 0
        if isinstance(value, float):
            return "fp32", False
        wide = name in self.kernel.fn.__annotations__ or abs(value) >= 1 << 31
        return wide, special and ("one" if value == 1 else value % 16 == 0)


def misaligned(*columns):
    """int32 columns at places that are no multiple of 16 bytes."""
    found = []
    for column in columns:
        place = torch.empty(len(column) + 1, dtype=torch.int32)[1:]
        found.append(place.copy_(column))
    return found


class Windows:
    """Two windows of a compressor, closed by their last tokens: the first of a sequence, and a later one."""

    def __init__(self, ratio):
        self.ratio, self.span = ratio, 8 if ratio == 4 else 128
        width = compress_step.state_width(ratio)
        self.raw, self.ape = drawn(2, self.span, width + 4), drawn(ratio, width, seed=1)
        for first, size in ((0, 1024), (2048, 256)) if ratio == 4 else ((0, 512),):
            self.ape[:, first : first + size] = 0  # of keys and values
        self.norm, self.turns = drawn(512, seed=2), drawn(512, 32, 2, seed=3)
        self.at = (torch.tensor([[ratio - 1], [383]]) + torch.arange(1 - self.span, 1)).int()
        self.pool = kv_rows.allocate(2, "cpu")
        pool = kv_rows.allocate_index(2, "cpu")
        self.index = IndexCompressor(norm=drawn(128, seed=4), pool=pool) if ratio == 4 else None

    def states(self, kept):
        """Rings that hold the positions of `kept` bool [2, span]."""
        states = torch.full((2, self.span, self.ape.shape[1]), torch.nan)
        for row, place in kept.nonzero().tolist():
            at = int(self.at[row, place])
            states[row, at % self.span] = self.raw[row, place, : states.shape[2]] + self.ape[at % self.ratio]
        return states.flatten(0, 1)

    def run(self, chunk):
        exists, place = self.at >= 0, torch.arange(self.span).expand(2, -1)
        own = exists & (place >= 3) if chunk else place == self.span - 1
        states = self.states(exists & ~own)
        taken, slots = own.nonzero(), own.nonzero()[:, 0].int()
        first = torch.tensor([int((taken[:, 0] < row).sum()) for row in range(2)], dtype=torch.int32)[slots.long()]
        write = torch.where(place[own] == self.span - 1, slots, -1)
        columns = [self.at[own], slots, first, write, self.at[slots.long(), -1]]
        at, slots, first, write, last = misaligned(*columns) if chunk else columns
        self.pool.zero_()
        args = (self.raw[own].contiguous(), self.ape, self.norm, self.turns, at, slots, first, states, write, self.pool)
        rules = {"ratio": self.ratio, "ring": self.span, "eps": 1e-6, "index": self.index}
        if chunk:
            compress.compress_chunk(*args, last, **rules)
        else:
            compress.compress_step(*args, **rules)
        found = [self.pool.clone(), states]
        return found if self.index is None else [*found, self.index.pool.clone()]


@pytest.mark.parametrize("ratio", [4, 128])
def test_an_entry_is_made_and_states_are_kept_alike_in_decode_and_in_a_chunk(ratio):
    windows = Windows(ratio)
    decode, chunk = windows.run(chunk=False), windows.run(chunk=True)
    assert all(same(a, b) for a, b in zip(decode, chunk, strict=True))
    assert decode[0].any() and (decode[1].isfinite().sum() > 0)


@pytest.mark.parametrize("ratio", [4, 128])
def test_decode_and_chunks_launch_one_and_the_same_compressor(ratio, monkeypatch):
    def programs(on):
        for name in ("_compress", "_keep_states"):
            monkeypatch.setattr(compress, name, Launch(getattr(compress, name)))
        with invariant.switched(on):
            windows = Windows(ratio)
            windows.run(chunk=False), windows.run(chunk=True)
        found = compress._compress.programs, compress._keep_states.programs
        monkeypatch.undo()
        return found

    (decode, chunk), kept = programs(True)
    assert decode == chunk and len(kept) == 2
    (decode, chunk), kept = programs(False)
    assert decode != chunk and len(kept) == 1, "else the test sees nothing"


def test_decode_and_chunks_launch_one_and_the_same_attention(monkeypatch):
    """Lists of another width, pools far from one another, and more splits make no other program."""
    lists, launch = Lists(far=64), Launch(attention._attend_rows)
    monkeypatch.setattr(attention, "_attend_rows", launch)
    monkeypatch.setattr(attention, "_join_in_order", Launch(attention._join_in_order))  # there is nothing to join
    lists.decode(0, 1)
    lists.far = torch.nn.functional.pad(lists.far, (0, 384), value=-1).int()
    lists.decode(2)
    lists.chunk(0, 1, 2)
    decode, longer, chunk = launch.programs
    assert decode == longer == chunk
    lists.chunk(0, fp8=False)
    assert launch.programs[-1] != chunk, "else the test sees nothing"


def test_an_output_is_turned_by_one_program_however_many_tokens(monkeypatch):
    launch = Launch(output._turn_and_quantise)
    monkeypatch.setattr(output, "_turn_and_quantise", launch)
    scale = torch.empty(1, 2, 8)
    for tokens in (1, output.MANY_TOKENS):
        o = torch.empty(1, 4, 512).expand(tokens, -1, -1)
        output.attention_output(o, torch.empty(1, 32, 2), torch.empty(1), torch.empty(tokens, 2, 1024), scale)
    assert launch.programs[0] == launch.programs[1]
