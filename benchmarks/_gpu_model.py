"""Random weights of real Flash shapes, drawn on the device, and a worker's executor over them with full KV pools.

The statistics are those under which the peer was measured: FP8 codes N(0, 1) at block scale 2^-6, FP4 bytes uniform at
scales 2^-9 .. 2^-6, norms 1, mixers N(0, .01), embedding N(0, 1), everything else N(0, .0156).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshkit.types import PAGE_TOKENS, ModelInfo
from worker_svc.checkpoint import names
from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.loader import Fp4Weight, Fp8Weight, Weight
from worker_svc.checkpoint.names import ExpertFormat, WeightSpec, layer_prefix
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.gpu.executor import GpuExecutor
from worker_svc.gpu.pools import GpuPools
from worker_svc.gpu.transformer import Transformer
from worker_svc.gpu.weights import ModelWeights, WeightLoader
from worker_svc.kv.layout import KvLayout
from worker_svc.ops.fp4_experts import Activation
from worker_svc.ops.kv_rows import HEAD_DIM, KERNEL_PAGE, insert_rows
from worker_svc.sampling import VocabRules

NUMERICS = Numerics(activations="fp8", kv="fp8_e4m3", indexer="fp8")
_STD, _FP8_EXPONENT, _FP4_EXPONENTS = 0.0156, 127 - 6, (127 - 9, 127 - 6)


class RandomSource:
    """A checkpoint that is drawn when it is read; the same name gives the same values only in the same order."""

    def __init__(self, config: V4Config, device: torch.device, seed: int = 0) -> None:
        self.config, self.device = config, device
        self.expert_format: ExpertFormat = "fp4"
        self._specs = {spec.name: spec for spec in names.weights(config, "fp4")}
        self._rng = torch.Generator(device).manual_seed(seed)

    def __getitem__(self, name: str) -> Weight:
        """One weight."""
        spec = self._specs[name]
        if spec.kind == "fp8":
            codes = self._normal(spec.shape, 1.0).to(torch.float8_e4m3fn)
            tiles = (-(-spec.shape[0] // 128), -(-spec.shape[1] // 128))
            return Fp8Weight(codes, torch.full(tiles, _FP8_EXPONENT, dtype=torch.uint8, device=self.device))
        if spec.kind == "fp4":
            return self._fp4(spec.shape)
        return self._dense(spec)

    def experts(self, layer: int, name: str) -> Fp4Weight:
        """All experts of a layer."""
        spec = self._specs[f"{layer_prefix(self.config, layer)}.ffn.experts.0.{name}"]
        return self._fp4((self.config.n_routed_experts, *spec.shape))

    def dense(self, name: str) -> Tensor:
        """An unquantised weight."""
        weight = self[name]
        assert isinstance(weight, Tensor)
        return weight

    def float32(self, name: str) -> Tensor:
        """Exact values of any weight."""
        weight = self[name]
        return weight.float() if isinstance(weight, Tensor) else weight.dequantise()

    def _fp4(self, shape: tuple[int, ...]) -> Fp4Weight:
        packed = (*shape[:-1], shape[-1] // 2)
        low, high = _FP4_EXPONENTS
        scale = (*shape[:-1], shape[-1] // 32)
        return Fp4Weight(self._integers(0, 256, packed), self._integers(low, high + 1, scale))

    def _dense(self, spec: WeightSpec) -> Tensor:
        leaf, dtype = spec.name.rsplit(".", 1)[-1], torch.float32 if spec.dtype == "F32" else torch.bfloat16
        if spec.dtype == "I64":
            drawn = torch.rand(spec.shape[0], self.config.n_routed_experts, device=self.device, generator=self._rng)
            return drawn.topk(spec.shape[1], dim=1).indices
        if leaf.endswith(("norm", "_scale")):
            return torch.ones(spec.shape, dtype=dtype, device=self.device)
        if leaf.endswith("_base") or leaf in ("attn_sink", "bias"):
            return torch.zeros(spec.shape, dtype=dtype, device=self.device)
        return self._normal(spec.shape, 0.01 if leaf.endswith("_fn") else 1.0 if leaf == "embed" else _STD).to(dtype)

    def _normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self._rng) * std

    def _integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=self.device, generator=self._rng)


@dataclass(slots=True)
class Bench:
    """An executor on random weights with its parts at hand."""

    config: V4Config
    executor: GpuExecutor
    pools: GpuPools
    pages_per_slot: int

    def pages_of(self, slot: int) -> range:
        """The pages that belong to a slot here."""
        return range(slot * self.pages_per_slot, (slot + 1) * self.pages_per_slot)


def make(
    source: RandomSource,
    *,
    slots: int,
    context: int,
    max_tokens: int,
    expert_activation: Activation = "fp8",
    graphs: bool = True,
) -> Bench:
    """Load `source` and give every slot pages for `context` tokens."""
    weights = WeightLoader(source, source.device, expert_activation=expert_activation).model()
    return assemble(
        source.config, weights, source.device, slots=slots, context=context, max_tokens=max_tokens, graphs=graphs
    )


def assemble(
    config: V4Config,
    weights: ModelWeights,
    device: torch.device,
    *,
    slots: int,
    context: int,
    max_tokens: int,
    graphs: bool = True,
) -> Bench:
    """An executor over loaded weights."""
    per_slot = -(-context // PAGE_TOKENS)
    pools = GpuPools(
        KvLayout(config=config, numerics=NUMERICS, max_verify=1),
        slots=slots,
        pages=slots * per_slot,
        tails=4,
        device=device,
    )
    model = Transformer(weights, config, pools, max_context=context, max_tokens=max_tokens)
    info = ModelInfo(
        name="random",
        revision="r",
        vocab_size=config.vocab_size,
        max_context=context,
        eos_ids=(1,),
        kv_layout_id="bench",
    )
    rules = VocabRules(vocab_size=config.vocab_size, eos_ids=(1,))
    executor = GpuExecutor(model=model, pools=pools, info=info, rules=rules, max_rows=slots, graphs=graphs)
    return Bench(config, executor, pools, per_slot)


def fill(pools: GpuPools, seed: int = 1) -> None:
    """Random keys and states everywhere: times on zeros would lie."""
    rng, piece = torch.Generator(pools.device).manual_seed(seed), 1 << 16
    for layer in pools.layers:
        for cache in (layer.window, layer.entries):
            rows = 0 if cache is None else cache.shape[0] * KERNEL_PAGE
            for first in range(0, rows, piece):
                at = torch.arange(first, min(first + piece, rows), dtype=torch.int32, device=pools.device)
                assert cache is not None
                insert_rows(torch.randn(len(at), HEAD_DIM, device=pools.device, generator=rng).bfloat16(), cache, at)
        if layer.index_keys is not None:
            values = KERNEL_PAGE * 128
            drawn = torch.randn(layer.index_keys.shape[0], values, device=pools.device, generator=rng)
            layer.index_keys[:, :values] = drawn.to(torch.float8_e4m3fn).view(torch.uint8)
            layer.index_keys[:, values:] = torch.ones(1, KERNEL_PAGE, device=pools.device).view(torch.uint8)
        if layer.states is not None:
            layer.states.normal_(generator=rng)
