"""Launches that overlap: a kernel of ours starts while the one before it ends (programmatic dependent launch).

A `chained` kernel may be on the chip before its predecessor is done. Its programs wait in `after_others` (or
`after_others_alone`) before they touch what others write, and only then let the next kernel come. So whatever was
written two launches back is complete for everybody, and a kernel that waits sees all of its predecessor. Constants may
be read before the wait. Library kernels that start early read some of their inputs before they wait (humming: the
expert sort), so who writes these lets nobody come early.
Interpreted kernels, and those of a Triton without such launches, run one after the other.
"""

# ruff: noqa: ANN201
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import triton
import triton.language as tl

Kernel = TypeVar("Kernel")
INTERPRETED = bool(triton.knobs.runtime.interpret)
_options: dict[str, Any] = {}
_switches: list[Callable[[bool], object]] = []


def chained(kernel: Kernel) -> Kernel:
    """Launch this kernel overlapped, where that is on; its first lines must call `after_others`."""
    if INTERPRETED:
        return kernel

    def run(*args: Any, **kwargs: Any) -> Any:
        return type(kernel).run(kernel, *args, **_options, **kwargs)  # type: ignore[attr-defined]

    kernel.run = run  # type: ignore[attr-defined]
    return kernel


def overlap(wanted: bool) -> None:
    """From now on launch `chained` kernels, and whoever follows, overlapped or not. What a graph captured stays."""
    _options.clear()
    if wanted and _known():
        _options["launch_pdl"] = True
    for switch in _switches:
        switch(bool(_options))


def follow(switch: Callable[[bool], object]) -> None:
    """A library's own switch for such launches, told now and whenever it changes."""
    _switches.append(switch)
    switch(bool(_options))


@contextmanager
def overlapped(wanted: bool) -> Iterator[None]:
    """`overlap` inside a block."""
    before = bool(_options)
    overlap(wanted)
    try:
        yield
    finally:
        overlap(before)


def _known() -> bool:
    """True if this Triton has such launches."""
    options = importlib.import_module("triton.backends.nvidia.compiler").CUDAOptions
    return not INTERPRETED and "launch_pdl" in options.__dataclass_fields__


if INTERPRETED:

    @triton.jit
    def after_others():
        """Nothing to wait for."""
        tl.static_assert(True)

    @triton.jit
    def after_others_alone():
        """Nothing to wait for."""
        tl.static_assert(True)

else:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    @triton.jit
    def after_others():
        """Wait for the kernel before this one, then let the next one come."""
        gdc_wait()
        gdc_launch_dependents()

    @triton.jit
    def after_others_alone():
        """Wait for the kernel before this one; the next one comes when this one has ended."""
        gdc_wait()


overlap(True)
