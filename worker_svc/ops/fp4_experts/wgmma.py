"""The grouped product of FP4 experts in steps of many rows: CUDA for Hopper's tensor cores, on humming's weights.

out[slot] = residual[e] * W_e (x[slot / divisor] * x_scale): E4M3 rows with one scale each (see `row_scales`), weights
as humming packs them for FP8 rows, so both share one copy. A block takes as many of an expert's rows as there are, up
to ROWS, in steps of 8: little padding at any routing. Compiled with NVRTC into humming's cache.
"""
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import ctypes
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from worker_svc.ops.expert_sort import Sorted

ROWS, STAGES = 144, 6
SORT_BLOCK = 16
MOST_EXPERTS = 512
SIZES = (32, 64, 80, 88, 96, 104, 112, 120, 128, 136, 144)
"""Rows for which there is code; a block runs the next one."""
THREADS = 384


def source(width: int, out: int) -> str:
    """CUDA of the product of inner width `width` and `out` weight rows."""
    names = {
        "WIDTH": width,
        "TILES": out // 256,
        "ROWS": ROWS,
        "STAGES": STAGES,
        "MOST_EXPERTS": MOST_EXPERTS,
        "SHARED_BYTES": shared_bytes(),
    }
    text = resources.files(__package__).joinpath("wgmma.cu").read_text()
    text = text.replace("//PRODUCTS//", "\n".join(_instruction(n) for n in SIZES)).replace("//CASES//", cases())
    return "".join(f"#define {name} {value}\n" for name, value in names.items()) + text


def cases() -> str:
    """Which code runs a block of (rows + 7) / 8 eights."""
    lines, covered = [], 0
    for size in SIZES:
        labels = " ".join(f"case {eights}:" for eights in range(covered + 1, size // 8 + 1))
        lines.append(f"        {labels} consume<{size}>(s, p, t, parity, it); break;")
        covered = size // 8
    return "\n".join(lines)


def _instruction(n: int) -> str:
    """The tensor cores' product of 64 weight rows, n token rows and 32 channels, weights from registers."""
    half = n // 2
    sums = ", ".join(f"%{i}" for i in range(half))
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(half))
    left = ", ".join(f"%{half + i}" for i in range(4))
    return (
        f"template <> struct Mma<{n}> {{\n"
        f"  static DEV void run(float (&d)[{half}], u32 a0, u32 a1, u32 a2, u32 a3, u64 rows) {{\n"
        f'    asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{sums}}}, {{{left}}}, %{half + 4}, '
        f'1, 1, 1;"\n'
        f'                 : {outs} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(rows));\n'
        "  }\n};"
    )


def shared_bytes() -> int:
    """Shared memory of a thread block: as `Shared` in the source, rounded up."""
    stages = STAGES * (ROWS * 128 + 256 * 64 + 256 * 4 + 16)
    return -(-(stages + 8 * 512 + 3 * 2 * ROWS * 4 + (2 * MOST_EXPERTS + 1) * 4 + 8) // 1024) * 1024


class _Args(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "x_scale", "w", "w_scale", "residual", "slots", "layout", "out")),
        ("experts", ctypes.c_int),
        ("divisor", ctypes.c_int),
    )


def fits(width: int, out: int, experts: int) -> bool:
    """True if there can be code for such a product."""
    return width % 128 == 0 and out % 256 == 0 and 1 <= experts <= MOST_EXPERTS


@cache
def compiled(width: int, out: int) -> str:
    """Path of the cubin; compiles it (seconds) unless humming's cache has it."""
    from humming.jit.compiler import NVRTCCompiler  # type: ignore[import-not-found, unused-ignore]

    return str(NVRTCCompiler.compile(source(width, out), sm_version="90a", kernel_expr=None))


@cache
def _loaded(width: int, out: int, device: int) -> tuple[Any, Any, int]:
    """(module, function, multiprocessors) on one GPU."""
    from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the context exists
        module = _checked(driver.cuModuleLoad(compiled(width, out).encode()))
        function = _checked(driver.cuModuleGetFunction(module, b"v4mesh_experts"))
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, most, shared_bytes()))
    return module, function, torch.cuda.get_device_properties(device).multi_processor_count


def _checked(result: Any) -> Any:
    if int(result[0]):
        raise RuntimeError(f"CUDA: {result[0]}")
    return result[1] if len(result) > 1 else None


def load(width: int, out: int, device: torch.device) -> None:
    """Compile and load, so that the first product need not."""
    _loaded(width, out, device.index or 0)


def product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    residual: Tensor,
    order: Sorted,
    k: int,
    out: Tensor,
) -> None:
    """x E4M3 [R, WIDTH], x_scale FP32 [R] -> out BF16 [slots, OUT], the source row of a slot being slot // k.

    humming's weight [E, WIDTH / 64, OUT * 8] int32, weight_scale [E, WIDTH / 32, OUT] bytes, residual FP32 [E]; `order`
    sorted in blocks of SORT_BLOCK. Rows of slots of no expert stay as they are. Does not wait; may be captured.
    """
    from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]

    experts, width, columns = weight.shape[0], weight.shape[1] * 64, weight.shape[2] // 8
    assert fits(width, columns, experts) and x.shape[1] == width and out.shape[1] == columns, (x.shape, weight.shape)
    assert order.block == SORT_BLOCK and order.layout.numel() == experts + 1, order.block
    assert x.numel() < 1 << 32, "the kernel counts bytes of x in 32 bits"
    assert x.is_contiguous() and x_scale.is_contiguous() and x_scale.shape == (x.shape[0],) and out.is_contiguous()
    _, function, processors = _loaded(width, columns, x.device.index or 0)
    tensors = (x, x_scale, weight, weight_scale, residual, order.slots, order.layout, out)
    args = _Args(*(t.data_ptr() for t in tensors), experts, k)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
    stream = torch.cuda.current_stream(x.device).cuda_stream
    sizes = (processors, 1, 1, THREADS, 1, 1, shared_bytes())
    _checked(driver.cuLaunchKernel(function, *sizes, stream, ctypes.addressof(pointers), 0))


def unpacked(weight: Tensor, weight_scale: Tensor, residual: Tensor) -> Tensor:
    """FP32 [OUT, WIDTH] of one expert's packed weight: the layout that the kernel reads, in plain torch."""
    words = weight.view(torch.int32).long() & 0xFFFFFFFF
    steps, columns = words.shape[0], words.shape[1] // 8
    words = words.view(steps, columns // 16, 8, 4, 2, 2)  # 64 channels, tile, row in 8, lane in 4, 32 channels, 8 rows
    i = torch.arange(8, device=words.device)
    magnitude = (words[..., None] >> (4 * i)) & 7
    sign = (words[..., None] >> (8 * (i % 4) + 3 + 4 * (i // 4))) & 1
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=words.device)
    value = (table[magnitude] * (1 - 2 * sign)).view(*words.shape, 2, 4)
    value = value.permute(1, 5, 2, 0, 4, 6, 3, 7).reshape(columns, steps * 64)
    scale = weight_scale.view(torch.uint8).view(steps * 2, columns // 64, 8, 4, 2)
    scale = scale.permute(1, 3, 4, 2, 0).reshape(columns, steps * 2)
    return value * torch.exp2(scale.float()).repeat_interleave(32, 1) * residual
