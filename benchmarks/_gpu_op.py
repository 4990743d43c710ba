"""What the kernel benchmarks share: Flash's sizes, the card's peaks, and how a result is poisoned, timed and compared.

A `Bench` on the CPU is for compiling alone: tensors are empty and launches do not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

BANDWIDTH, FP8_PEAK, BF16_PEAK = 4.3e12, 1.58e15, 7.9e14  # one H200: bytes/s read + written, FLOP/s
D, INNER, EXPERTS, K, VOCAB = 4096, 2048, 256, 6, 129280
EXPERT_BYTES = 3 * D * INNER // 2 + 3 * D * INNER // 32
L2_BYTES = 200 << 20


@dataclass
class Bench:
    """Where tensors live, and what was measured. On the CPU everything is empty and launches only compile.

    rows: inputs of each operation where batches of all sizes are cut from the same ones.
    """

    device: str
    seed: int = 0
    rows: int = 256
    metrics: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def warming(self) -> bool:
        """True while kernels are only compiled."""
        return self.device == "cpu"

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Fresh normal numbers."""
        if self.warming:
            return torch.empty(shape, dtype=dtype)
        return (torch.randn(shape, device=self.device, dtype=torch.float32) * scale).to(dtype)

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Poisoned room for a result."""
        if self.warming:
            return torch.empty(shape, dtype=dtype)
        poison = torch.full(shape, 255, dtype=torch.uint8, device=self.device)
        if dtype.itemsize > 1:
            poison = poison.repeat_interleave(dtype.itemsize, -1)
        return poison.view(dtype)

    def codes(self, *shape: int) -> Tensor:
        """FP8 numbers as weights and activations are distributed."""
        return self.randn(*shape, scale=40.0).to(torch.float8_e4m3fn)

    def time(self, calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
        """Median microseconds of one call, from replays of a graph of all of them. Warming: runs them once, 0."""
        for call in calls[:1] if self.warming else calls:
            call()
        if self.warming:
            return 0.0
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        times: list[float] = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
        return sorted(times)[len(times) // 2]

    def record(self, name: str, micros: float, moved: float = 0.0, flops: float = 0.0, peak: float = FP8_PEAK) -> None:
        """One line of the table."""
        if self.warming:
            return
        floor = max(moved / BANDWIDTH, flops / peak) * 1e6
        line = f"{name:44} {micros:9.1f} us"
        self.metrics[f"{name}_us"] = round(micros, 2)
        if moved:
            self.metrics[f"{name}_tb_s"] = round(moved / micros / 1e6, 3)
            self.metrics[f"{name}_of_floor"] = round(floor / micros, 3)
            line += f"  {moved / micros / 1e6:5.2f} TB/s  {floor / micros:5.2f} of floor"
        if flops:
            line += f"  {flops / micros / 1e6:6.0f} TFLOP/s"
            self.metrics[f"{name}_tflops"] = round(flops / micros / 1e6, 1)
        print(line, flush=True)

    def check(self, name: str, got: Tensor, truth: Tensor) -> None:
        """Relative Frobenius error; the result was poisoned, so NaN means something was not written."""
        if self.warming:
            return
        error = float((got.float() - truth.float()).norm() / truth.float().norm().clamp(min=1e-30))
        self.metrics[f"error_{name}"] = round(error, 6) if math.isfinite(error) else "NaN"
        mark = "" if error <= 2e-3 else "  <-- above 2e-3"
        print(f"error {name:38} {error:.6f}{mark}", flush=True)

    def exact(self, name: str, same: bool) -> None:
        """A result that has to be equal bit for bit."""
        if not self.warming:
            self.metrics[f"exact_{name}"] = int(same)
            print(f"exact {name:38} {'yes' if same else 'NO'}", flush=True)
