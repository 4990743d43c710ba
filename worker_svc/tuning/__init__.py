"""Choices of the GPU operations that were measured on this machine: the values in use, by name.

An operation asks `value` with its built-in constant beside the name, and gets that constant unless a measured value is
in use. `use` sets them for the process, once, before weights are loaded; `trial` for a block, which is how the tuner
times them. Who asks in deterministic mode (`ops.invariant`), or for tensors on the CPU, does not ask here.
Names, bounds and candidates are in `choices`, the file in `file`, the timing in `tuner`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

Value = int | tuple[int, ...]
T = TypeVar("T")

_in_use: dict[str, Value] = {}


def value(name: str, builtin: T) -> T:
    """The measured value of a choice, of the built-in one's type; the built-in one if none is in use."""
    return _in_use.get(name, builtin)  # type: ignore[return-value]


def use(values: Mapping[str, Value]) -> None:
    """These from now on, and no others. What a graph has captured stays as it is."""
    _in_use.clear()
    _in_use.update(values)


def in_use() -> dict[str, Value]:
    """What `use` was last told."""
    return dict(_in_use)


@contextmanager
def trial(values: Mapping[str, Value]) -> Iterator[None]:
    """These beside those in use, inside a block."""
    before = in_use()
    use(before | dict(values))
    try:
        yield
    finally:
        use(before)
