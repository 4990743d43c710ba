"""FlashInfer's selection: the same entries as our kernel's, lowest first among equals, in an order of its own.

Its library is compiled once per kernel cache, by nvcc and for minutes; `precache --kernel top_entries=flashinfer` does
that ahead. From there on it is loaded as it lies, so that a host without nvcc, or with newer files of the package,
does not compile it again. The functions called are the library's own (0.6.18): the package's Python in front of them
would look for nvcc at every start.
"""
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped,import-not-found"

import functools
import logging
import time
from typing import Any

import torch
from torch import Tensor

STATES_BYTES = 1 << 20  # what its programs that share a row meet in; zero between launches
SMALLEST_FIRST = 1  # its name for: among equal scores the lowest entry wins
PAGE = 64

log = logging.getLogger(__name__)


@functools.cache
def library() -> Any:
    """The compiled library of this kernel cache; compiles it if it is not there. RuntimeError says what that lacks."""
    from flashinfer.topk import gen_topk_module

    spec = gen_topk_module()
    if spec.is_compiled:
        return spec.load()
    log.info("FlashInfer compiles its selection with nvcc: minutes, once for a kernel cache")
    began = time.perf_counter()
    try:
        loaded = spec.build_and_load()
    except (RuntimeError, OSError) as error:
        why = " ".join(str(error).split())[:300]
        raise RuntimeError(
            f"--kernel top_entries=flashinfer: FlashInfer's selection does not compile ({why}); it needs nvcc and "
            "ninja, or a kernel cache in which `v4mesh precache MODEL --kernel top_entries=flashinfer` has built it"
        ) from error
    log.info("FlashInfer's selection is compiled: %.0f s", time.perf_counter() - began)
    return loaded


@functools.cache
def _states(device: torch.device) -> Tensor:
    """Not of any graph's memory: the first call is an eager one, before anything is captured."""
    return torch.zeros(STATES_BYTES, dtype=torch.uint8, device=device)


def top_rows(scores: Tensor, lengths: Tensor, slots: Tensor, block_table: Tensor, out: Tensor) -> None:
    """See the door."""
    rows = _dense(out)
    library().radix_topk_page_table_transform(
        scores, rows, block_table, slots, lengths, _states(scores.device), out.shape[1], False, SMALLEST_FIRST, PAGE,
        False, None, None, None,
    )  # fmt: skip
    _hand_over(rows, out)


def top_entries(scores: Tensor, lengths: Tensor, base: Tensor, out: Tensor) -> None:
    """See the door."""
    rows = _dense(out)
    library().radix_topk_ragged_transform(
        _whole_rows(scores), rows, base, lengths, _states(scores.device), out.shape[1], False, SMALLEST_FIRST, False,
        None,
    )  # fmt: skip
    _hand_over(rows, out)


def _whole_rows(scores: Tensor) -> Tensor:
    """The library takes no row stride here: the rows as far as they reach in memory, if they do; what lies beyond a
    row's length is not read."""
    tokens, stride = scores.shape[0], scores.stride(0)
    if scores.storage_offset() + tokens * stride <= scores.untyped_storage().nbytes() // scores.element_size():
        return scores.as_strided((tokens, stride), (stride, 1))
    return scores.contiguous()


def _dense(out: Tensor) -> Tensor:
    return out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)


def _hand_over(rows: Tensor, out: Tensor) -> None:
    if rows is not out:
        out.copy_(rows)
