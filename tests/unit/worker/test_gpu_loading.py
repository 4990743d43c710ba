"""Choosing the GPU: what is refused, and in which words, before anything is read or allocated."""

from dataclasses import replace

import pytest
import torch

from meshkit.errors import GpuError, MemoryShort
from meshkit.types import SamplingParams
from worker_svc.checkpoint.census import preset
from worker_svc.checkpoint.errors import CheckpointError
from worker_svc.config import WorkerConfig
from worker_svc.core.work import RowWork, SlotInit, StepWork
from worker_svc.gpu import ahead, loading
from worker_svc.gpu.layout import GpuSizes, check_shapes
from worker_svc.gpu.loading import gpu_numerics, pool_sizes
from worker_svc.kv.layout import KvLayout
from worker_svc.loading import load


class Source:
    """A checkpoint's config and format, without weights."""

    def __init__(self, name="nano", expert_format="fp4"):
        self.config, self.expert_format = preset(name), expert_format


def layout(**options):
    numerics = gpu_numerics(Source(), WorkerConfig(**options))
    return KvLayout(config=preset("nano"), numerics=numerics, max_verify=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_with_the_way_out():
    with pytest.raises(GpuError, match="--device cpu"):
        load(WorkerConfig(device="cuda"))


def test_the_default_is_fp8_throughout_and_bf16_keys_are_the_check():
    assert layout().numerics.describe() == "activations fp8, KV fp8_e4m3, indexer fp8"
    assert layout(kv_cache_dtype="bf16").numerics.kv == "bf16"
    assert GpuSizes(layout(kv_cache_dtype="bf16")).bytes_per_page > GpuSizes(layout()).bytes_per_page


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "exact"}, "CPU"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e4m3, bf16"),
        ({"kv_cache_dtype": "fp32"}, "fp8_e4m3, bf16"),
        ({"indexer_dtype": "fp4"}, "fp8"),
    ],
)
def test_formats_without_a_kernel_are_refused_naming_those_with_one(options, words):
    with pytest.raises(CheckpointError, match=words):
        layout(**options)


def test_models_of_other_shapes_and_fp8_experts_are_refused():
    with pytest.raises(CheckpointError, match="head_dim is 64"):
        gpu_numerics(Source("tiny"), WorkerConfig())
    with pytest.raises(CheckpointError, match="FP8 experts"):
        gpu_numerics(Source(expert_format="fp8"), WorkerConfig())
    check_shapes(preset("flash"))
    check_shapes(preset("pro"))


def test_pools_fill_their_share_or_say_what_does_not_fit():
    pages, tails = pool_sizes(layout(), WorkerConfig(), slots=4, free=10**9)
    sizes = GpuSizes(layout())
    used = 4 * sizes.bytes_per_slot + tails * sizes.bytes_per_tail + pages * sizes.bytes_per_page
    assert tails == 16 and used <= 0.75 * 10**9
    with pytest.raises(MemoryShort, match="fewer slots or tails"):
        pool_sizes(layout(), WorkerConfig(), slots=4, free=10**6)


def test_flash_memory_is_what_its_formats_say():
    flash = KvLayout(config=preset("flash"), numerics=layout().numerics, max_verify=1)
    # 21 C4 layers of a kernel page and an index page, 20 C128 layers of two rows of a kernel page.
    assert GpuSizes(flash).bytes_per_page == 21 * (37_440 + 8_448) + 20 * 2 * 37_440 // 64
    wide = replace(flash, max_verify=2)
    assert GpuSizes(wide).bytes_per_slot > GpuSizes(flash).bytes_per_slot


def test_loading_ends_with_a_warm_executor_and_its_pools(monkeypatch, request):
    """On CPU tensors: everything but the kernels is what a GPU worker does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two would wait for each other most of the time
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    monkeypatch.setattr(loading, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(loading, "prepare_kernels", lambda config, folder: True)  # has tests of its own
    monkeypatch.setattr(ahead, "WARM_SIZES", (16,))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a processor")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (10**11, 10**11))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    loaded = load(WorkerConfig(device="cuda", slots=2, pages=4, tails=2, max_step_tokens=16))
    assert loaded.info.max_context == 1024 and loaded.info.kv_layout_id.endswith("-gpu")
    assert (loaded.pools.slots, loaded.pools.pages, loaded.pools.max_step_tokens) == (2, 4, 16)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    init = SlotInit(slot=1, params=params, seed=1, choice=0, n_emitted=0)
    row = RowWork(slot=1, ids=(5, 6, 7), pages=[2])
    outcome = loaded.executor.collect(loaded.executor.launch(StepWork(inits=(init,), rows=(row,))))
    assert len(outcome.rows[0].tokens) == 1 and outcome.t_end_ns > outcome.t_start_ns
