"""Correctness on the device: every operation against its torch reference, the whole forward against the CPU model.

An operation's door runs torch on CPU tensors and kernels on CUDA tensors, on the same layouts: both get the same fresh
random inputs, and outputs that the caller provides start as garbage.
"""
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from worker_svc.ops.fp8_gemm import Fp8Matrix, Fp8Rows
from worker_svc.ops.partial_sums import added
from worker_svc.ops.quant_fp8 import quantise, quantise_rows, quantise_weight, scale_value

Outputs = dict[str, Tensor]
Case = Callable[[torch.device], Outputs]
EXACT = ("rows", "list", "ids", "codes", "bytes")
"""Words in an output's name that make it bit-exact: integers and layouts."""
NANO_SEED = 9999
HOST = torch.device("cpu")


def difference(found: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius error; NaN never passes."""
    a, b = found.cpu().double(), wanted.cpu().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def check_ops(device: torch.device, report: Any) -> None:
    """Run every case on both devices; a row per output."""
    worst = 0.0
    for name, case in cases():
        try:
            wanted, found = case(torch.device("cpu")), case(device)
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - one operation that fails must not hide the others
            report.row("ops", op=name, failed=f"{type(error).__name__}: {error}"[:160])
            report.metrics[f"op_{name}_failed"] = 1
            continue
        for part, value in wanted.items():
            if any(word in part for word in EXACT):
                other = found[part].cpu().view(torch.uint8) != value.view(torch.uint8)
                report.row("ops", op=name, output=part, mismatches=int(other.sum()), of=value.numel())
            else:
                error_ = difference(found[part], value)
                worst = max(worst, error_)
                report.row("ops", op=name, output=part, error=error_)
    report.metrics["ops_worst_error"] = worst


def cases() -> Iterator[tuple[str, Case]]:
    """Name and function of every case."""
    for rows in (1, 4, 16, 64, 300):
        yield f"fp8_gemm_{rows}", partial(_fp8_gemm, rows=rows)
        yield f"fp8_grouped_{rows}", partial(_fp8_grouped, rows=rows)
        yield f"fp8_parts_{rows}", partial(_fp8_parts, rows=rows)
        yield f"bf16_gemm_{rows}", partial(_bf16_gemm, rows=rows)
    for ratio in (0, 4, 128):
        yield f"decode_attention_c{ratio}", partial(_decode_attention, ratio=ratio)
    yield "chunk_attention", _chunk_attention
    yield "paged_scores", _paged_scores
    yield "ragged_scores", _ragged_scores
    yield "slot_step", _slot_step


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rows(device: torch.device, rows: int, width: int, seed: int) -> Fp8Rows:
    out = Fp8Rows.empty(rows, width, device)
    quantise_rows(torch.randn(rows, width, generator=_rng(seed)).bfloat16().to(device), out.codes, out.scale)
    return out


def _matrix(device: torch.device, *shape: int, seed: int) -> Fp8Matrix:
    codes, exponent = quantise_weight(torch.randn(*shape, generator=_rng(seed)) * shape[-1] ** -0.5)
    return Fp8Matrix(codes.to(device), scale_value(exponent).to(device))


def _fp8_gemm(device: torch.device, rows: int) -> Outputs:
    from worker_svc.ops.fp8_gemm import fp8_gemm

    return {"out": fp8_gemm(_rows(device, rows, 4096, rows), _matrix(device, 1536, 4096, seed=2))}


def _fp8_grouped(device: torch.device, rows: int) -> Outputs:
    from worker_svc.ops.fp8_gemm import empty_groups, fp8_grouped

    x = empty_groups(rows, 8, 1024, device)
    codes, exponent = quantise(torch.randn(rows, 8, 1024, generator=_rng(rows)), 128)
    x.codes.copy_(codes.to(device))
    x.scale.copy_(scale_value(exponent).to(device))
    return {"out": fp8_grouped(x, _matrix(device, 8, 256, 1024, seed=3))}


def _fp8_parts(device: torch.device, rows: int) -> Outputs:
    """Products that come in parts where rows are few, added up."""
    from worker_svc.ops.fp8_gemm import fp8_gemm_parts

    wide = fp8_gemm_parts(_rows(device, rows, 8192, rows), _matrix(device, 1024, 8192, seed=4))
    narrow = fp8_gemm_parts(_rows(device, rows, 2048, rows), _matrix(device, 1024, 2048, seed=5))
    return {"wide": added(wide, 2).bfloat16(), "narrow": added(narrow, 2).bfloat16()}


def _bf16_gemm(device: torch.device, rows: int) -> Outputs:
    from worker_svc.ops.bf16_gemm import bf16_gemm

    x, weight = (torch.randn(n, 4096, generator=_rng(n)).bfloat16().to(device) for n in (rows, 2624))
    return {"out": bf16_gemm(x, weight)}


def _pool(device: torch.device, rows: int, seed: int) -> Tensor:
    from worker_svc.ops.kv_rows import allocate, insert_rows

    pool = allocate(rows, "cpu")
    insert_rows(torch.randn(rows, 512, generator=_rng(seed)).bfloat16(), pool, torch.arange(rows, dtype=torch.int32))
    return pool.to(device)


def _decode_attention(device: torch.device, ratio: int) -> Outputs:
    """Rows with full, short and empty lists, and a padding row."""
    from worker_svc.ops.sparse_attention import DecodePlan, decode_attention

    rng, tokens = _rng(11), 6
    q = torch.randn(tokens, 64, 512, generator=rng).bfloat16()
    window_rows = torch.randint(0, 1024, (tokens, 128), generator=rng, dtype=torch.int32)
    window_len = torch.tensor([128, 128, 5, 1, 0, 128], dtype=torch.int32)
    entry_rows = torch.randint(0, 4096, (tokens, 512), generator=rng, dtype=torch.int32)
    entry_len = torch.tensor([512, 37, 1, 0, 0, 64], dtype=torch.int32)
    for rows, lengths in ((window_rows, window_len), (entry_rows, entry_len)):
        rows[torch.arange(rows.shape[1]) >= lengths.unsqueeze(1)] = -1
    entries = None if ratio == 0 else _pool(device, 4096, 13)
    sink = torch.randn(64, generator=rng)
    out = decode_attention(
        q.to(device),
        _pool(device, 1024, 12),
        window_rows.to(device),
        window_len.to(device),
        entries,
        None if entries is None else entry_rows.to(device),
        None if entries is None else entry_len.to(device),
        sink.to(device),
        512**-0.5,
        DecodePlan(),
    )
    live = torch.tensor([0, 1, 2, 3, 5], device=device)
    return {"out": out[live], "finite_padding": torch.isfinite(out[4]).float().mean().view(1)}


def _chunk_attention(device: torch.device) -> Outputs:
    """Against the reference with the library's roundings; lists have holes, and some end early."""
    from worker_svc.ops.sparse_attention import chunk_attention
    from worker_svc.ops.sparse_attention.rows_ref import rounded_chunk_attention

    rng, tokens = _rng(21), 70
    q = torch.randn(tokens, 64, 512, generator=rng).bfloat16()
    keys = torch.randn(900, 512, generator=rng).bfloat16()
    index = torch.randint(0, 900, (tokens, 640), generator=rng, dtype=torch.int32)
    index[torch.rand(tokens, 640, generator=rng) < 0.3] = -1
    index[::3, 290:] = -1
    listed = (index >= 0).int() * torch.arange(1, 641)
    args = (q, keys, index, torch.randn(64, generator=rng))
    if device.type == "cpu":
        return {"out": rounded_chunk_attention(*args, 512**-0.5)}
    q, keys, index, sink = (part.to(device) for part in args)
    return {"out": chunk_attention(q, keys, index, sink, 512**-0.5, listed.amax(1).int().to(device))}


def _scored(device: torch.device, tokens: int) -> tuple[Tensor, Tensor]:
    codes, exponent = quantise(torch.randn(tokens, 64, 128, generator=_rng(31)), 128)
    weights = torch.randn(tokens, 64, generator=_rng(32)) * scale_value(exponent)[..., 0] * 0.01
    return codes.to(device), weights.to(device)


def _paged_scores(device: torch.device) -> Outputs:
    from worker_svc.ops.index_scores import ScorePlan, paged_scores
    from worker_svc.ops.kv_rows import allocate_index, insert_index_rows

    pool = allocate_index(64 * 40, "cpu")
    insert_index_rows(torch.randn(64 * 40, 128, generator=_rng(33)), pool, torch.arange(64 * 40, dtype=torch.int32))
    table = torch.randperm(40, generator=_rng(34)).to(torch.int32).view(4, 10).contiguous().to(device)
    lengths = torch.tensor([640, 1, 100, 0, 65], dtype=torch.int32)
    slots = torch.tensor([2, 0, 1, 3, 3], dtype=torch.int32, device=device)
    codes, folded = _scored(device, 5)
    scores = paged_scores(codes, folded, pool.to(device), table, slots, lengths.to(device), 640, ScorePlan())[:, :640]
    scores = scores.cpu()
    return {"scores": scores.masked_fill(torch.arange(640) >= lengths.unsqueeze(1), 0)}


def _ragged_scores(device: torch.device) -> Outputs:
    from worker_svc.ops.index_scores import ragged_scores

    keys, exponent = quantise(torch.randn(1000, 128, generator=_rng(35)), 128)
    first = torch.tensor([0, 0, 0, 301, 301, 301, 301], dtype=torch.int32)
    last = torch.tensor([1, 200, 301, 301, 302, 700, 1000], dtype=torch.int32)
    codes, folded = _scored(device, 7)
    scale = scale_value(exponent)[:, 0].contiguous()
    scores = ragged_scores(codes, folded, keys.to(device), scale.to(device), first.to(device), last.to(device), 699)
    seen = torch.arange(699) < (last - first).unsqueeze(1)
    return {"scores": scores[:, :699].cpu().masked_fill(~seen, 0)}


def _slot_step(device: torch.device) -> Outputs:
    from worker_svc.ops.slot_step import FIELDS, Field, StepRows, begin_step, end_step

    rng = _rng(41)
    table = torch.randint(0, 50, (FIELDS, 100), generator=rng, dtype=torch.int32)
    table[Field.FINISHED] = torch.randint(0, 2, (100,), generator=rng, dtype=torch.int32)
    table[Field.MAX_TOKENS] = torch.randint(1, 90, (100,), generator=rng, dtype=torch.int32)
    rows = torch.randperm(99, generator=rng)[:80].to(torch.int32)
    rows[::7] = -1
    tokens = torch.randint(0, 300, (80,), generator=rng, dtype=torch.int32)
    faults = (torch.arange(80) % 11 == 3).to(torch.int32)
    table, rows, tokens, faults = (part.to(device) for part in (table, rows, tokens, faults))
    at, out = StepRows.empty(80, device), torch.empty_like(tokens)
    begin_step(rows, table, at)
    end_step(at, tokens, faults, table, out)
    return {"rows": at.slots, "rows_positions": at.positions, "ids": at.ids, "ids_out": out, "rows_table": table}


# The whole forward


@dataclass(frozen=True, slots=True)
class Text:
    """A model, what it reads, and the two references: the CPU model, and weights for the GPU forward on any device."""

    config: Any
    ids: list[int]
    cpu: Any
    weights: Callable[[torch.device], Any]


def nano_text(tokens: int = 900) -> Text:
    """V4-nano on text that it was not trained on."""
    from benchmarks._gpu_agreement import CpuModel
    from benchmarks._gpu_model import NUMERICS
    from gateway.text.tokenizer import Tokenizer
    from meshkit.models import DEFAULT_MODEL
    from worker_svc.checkpoint.loader import load_checkpoint
    from worker_svc.executor import CpuExecutor
    from worker_svc.gpu.weights import WeightLoader

    ids = unseen(Tokenizer.load(DEFAULT_MODEL), tokens)
    cpu = CpuModel(CpuExecutor.load(DEFAULT_MODEL, numerics=NUMERICS, slots=2, pages=8, tails=2, max_verify=1).model)
    checkpoint = load_checkpoint(DEFAULT_MODEL)
    return Text(checkpoint.config, ids, cpu, lambda where: WeightLoader(checkpoint, where).model())


def check_nano(device: torch.device, report: Any) -> None:
    """V4-nano on text against both references, free and forced: logits of every token, greedy choices, decode too."""
    _check("nano", nano_text(), device, report)


def _check(name: str, text: Text, device: torch.device, report: Any) -> None:
    from benchmarks._gpu_agreement import GpuForward, compare

    mirror = GpuForward(text.weights(HOST), text.config, HOST, graphs=False)
    weights = text.weights(device)
    for reference, side in ((f"{name}_mirror", mirror), (name, text.cpu)):
        free, forced = (GpuForward(weights, text.config, device, graphs=on) for on in (True, False))
        compare(side, {reference: free, f"{reference}_forced": forced}, text.ids, report)


def unseen(tokenizer: Any, tokens: int) -> list[int]:
    """Documents of the kinds that v4-nano was trained on, from a seed that training did not use."""
    from tools.nano.corpus import Corpus, Sources
    from tools.nano.document import tokenize

    corpus, ids = Corpus(Sources.load(None), NANO_SEED), list[int]()
    while len(ids) < tokens:
        ids += tokenize(corpus.draw(0.5), tokenizer).ids.tolist()
    return ids[:tokens]


def flash_text(device: torch.device, *, experts: int = 8, tokens: int = 200) -> Text:
    """Four layers of real Flash width, fewer experts, a small vocabulary, weights drawn on `device`.

    All layers route by table: a random router's near-ties would choose other experts on either side of a rounding.
    """
    from benchmarks._gpu_agreement import CpuModel
    from benchmarks._gpu_model import NUMERICS, RandomSource
    from worker_svc.checkpoint.census import preset
    from worker_svc.gpu.weights import WeightLoader
    from worker_svc.kv.layout import KvLayout
    from worker_svc.kv.pools import KvPools
    from worker_svc.model.weights import ModelBuilder

    config = replace(
        preset("flash"),
        num_hidden_layers=4,
        compress_ratios=(0, 4, 128, 4),
        num_nextn_predict_layers=0,
        num_hash_layers=4,
        n_routed_experts=experts,
        vocab_size=4096,
    )
    source = Remembered(RandomSource(config, device))
    pools = KvPools(KvLayout(config=config, numerics=NUMERICS, max_verify=1), slots=2, pages=8, tails=2)
    builder: Any = ModelBuilder(OnHost(source), pools.layout, max_context=2048, deterministic=False)  # type: ignore[arg-type]
    ids = torch.randint(3, 4096, (tokens,), generator=_rng(51)).tolist()
    cpu = CpuModel(builder.transformer(pools))
    return Text(config, ids, cpu, lambda where: WeightLoader(source, where).model())


def check_flash(device: torch.device, report: Any, *, experts: int = 8, tokens: int = 200) -> None:
    """The same for four layers of Flash width. What rounding alone comes to there: `python -m benchmarks rounding`."""
    _check("flash4", flash_text(device, experts=experts, tokens=tokens), device, report)


class OnHost:
    """The same weights for the CPU model, dequantised where they are."""

    def __init__(self, source: "Remembered") -> None:
        self.config, self.expert_format, self._source = source.config, source.expert_format, source

    def experts(self, layer: int, name: str) -> Any:
        """Something that dequantises to the host."""
        return _Routed(self._source.experts(layer, name))

    def dense(self, name: str) -> Any:
        """See RandomSource."""
        return self._source.dense(name).cpu()

    def float32(self, name: str) -> Tensor:
        """See RandomSource."""
        return self._source.float32(name).cpu()


@dataclass(frozen=True, slots=True)
class _Routed:
    weight: Any

    def dequantise(self) -> Tensor:
        """FP32 [E, out, in]."""
        values: Tensor = self.weight.dequantise()
        return values.cpu()


class Remembered:
    """A random source whose weights are the same each time they are read."""

    def __init__(self, source: Any) -> None:
        self.config, self.expert_format, self._source = source.config, source.expert_format, source
        self._kept: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def __getitem__(self, name: str) -> Any:
        return self._once(name, lambda: self._source[name])

    def experts(self, layer: int, name: str) -> Any:
        """See RandomSource."""
        return self._once((layer, name), lambda: self._source.experts(layer, name))

    def dense(self, name: str) -> Any:
        """See RandomSource."""
        return self[name]

    def float32(self, name: str) -> Tensor:
        """See RandomSource."""
        weight = self[name]
        return weight.float() if isinstance(weight, Tensor) else weight.dequantise()
