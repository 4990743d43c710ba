"""`v4mesh plan`: what a model needs on a GPU, line by line, before anything is loaded. Reads config.json alone.

Exit 0 if one request fits, 7 if not, with the arithmetic and what would make it fit.
"""

import ctypes
import json

import click

from meshkit.cli.help_pages import command
from meshkit.cli.model_folder import find_model
from meshkit.cli.preflight import read_model_config
from meshkit.cli.screen import Screen, shared_options
from meshkit.config import parse_size
from meshkit.exit_codes import Exit, Problem, ProblemsError
from meshkit.memory_plan import GPUS, KV_PAGE_BYTES, Plan, Shape, plan


@command("plan")
@click.argument("model", required=False)
@click.option("--gpu", default="auto", metavar="NAME|BYTES", help=f"auto, {', '.join(GPUS)} or a size (150GB).")
@click.option("--gpus", default=1, type=click.IntRange(1, 1024), help="Cards that share the experts.")
@click.option("--slots", default=64, type=click.IntRange(1, 4096), help="Requests that run at once.")
@click.option("--tails", default=0, type=click.IntRange(0), help="Resumable prefix ends kept; 0 = 4 per slot.")
@click.option("--step-tokens", default=8192, type=click.IntRange(1), help="Most tokens in one step.")
@click.option("--pages", default=0, type=click.IntRange(0), help="KV pages of 256 tokens; 0 = as many as fit.")
@click.option("--kv-cache-dtype", "kv", default="fp8_e4m3", type=click.Choice(list(KV_PAGE_BYTES)), help="KV format.")
@click.option("--layers", default=0, type=click.IntRange(0), help="Only the first so many layers.")
@shared_options
@click.pass_obj
def plan_command(
    screen: Screen,
    /,
    *,
    model: str | None,
    gpu: str,
    gpus: int,
    slots: int,
    tails: int,
    step_tokens: int,
    pages: int,
    kv: str,
    layers: int,
) -> int:
    """Print the memory that MODEL needs on a GPU with these flags."""
    folder = find_model(model)
    config = read_model_config(folder)
    if layers:
        config["num_hidden_layers"] = min(layers, int(config.get("num_hidden_layers", layers)))
    name, total = card(gpu)
    try:
        shape = Shape.of(config)
    except ValueError as error:
        raise ProblemsError(Problem("MODEL", Exit.MODEL, str(error))) from None
    found = plan(shape, total, slots=slots, step_tokens=step_tokens, tails=tails, kv=kv, gpus=gpus, pages=pages)
    status = Exit.OK if found.fits else Exit.MEMORY
    if screen.as_json:
        screen.result(json.dumps(_as_json(found, name, int(status))))
        return int(status)
    for row in found.table(name):
        screen.result(row)
    if found.fits:
        return int(status)
    raise ProblemsError(refusal(found, folder.name, name, gpus))


def refusal(found: Plan, model: str, name: str, gpus: int) -> Problem:
    """Does not fit: by how much, and what would help."""
    largest = max(found.lines, key=lambda line: line.bytes)
    fixes = ["fewer --slots or --step-tokens"]
    if largest.name == "experts":
        need = -(-largest.bytes * gpus // max(1, found.usable - found.used + largest.bytes))
        if need > gpus:
            fixes.insert(0, f"--gpus {need} or more (to plan with: one worker serves on one GPU today)")
    return Problem(
        "MEMORY",
        Exit.MEMORY,
        f"{model} does not fit on {gpus} x {name}: {found.short / 1e9:.2f} GB too much",
        "; ".join(fixes),
        (f"largest: {largest.name}, {largest.bytes / 1e9:.2f} GB ({largest.how})",),
    )


def _as_json(found: Plan, name: str, status: int) -> dict[str, object]:
    return {
        "schema_version": 1,
        "exit": status,
        "gpu": name,
        "total_bytes": found.total,
        "usable_bytes": found.usable,
        "lines": [{"name": line.name, "bytes": line.bytes, "how": line.how} for line in found.lines],
        "pages": found.pages,
        "page_bytes": found.page_bytes,
        "tokens": found.tokens,
    }


def card(wanted: str) -> tuple[str, int]:
    """(name, bytes) of the card asked for; auto: the one in this machine, else an H200."""
    if wanted.upper() in GPUS:
        return wanted.upper(), GPUS[wanted.upper()]
    if wanted.lower() == "auto":
        return present() or ("H200", GPUS["H200"])
    try:
        return wanted, parse_size(wanted)
    except ValueError as error:
        known = ", ".join(GPUS)
        raise ProblemsError(Problem("USAGE", Exit.USAGE, f"--gpu {wanted}: {error}", f"one of {known}")) from None


def present() -> tuple[str, int] | None:
    """The first card that the driver shows, without torch."""

    class Memory(ctypes.Structure):
        _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), Memory()
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) != 0:
        return None
    nvml.nvmlDeviceGetName(handle, name, 96)
    failed = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0
    nvml.nvmlShutdown()
    return None if failed else (name.value.decode(errors="replace"), int(memory.total))
