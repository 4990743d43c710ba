"""A second stream for work that does not depend on what runs beside it; inside a graph it becomes a parallel branch."""
# mypy: disallow-untyped-calls=False

import contextlib
from collections.abc import Iterator

import torch


class Overlap:
    """`with beside(): ...` runs on the side stream, after everything queued so far; `join` makes the main stream wait.

    On a CPU, or switched off, both do nothing. Tensors made on the side are used after `join` only.
    """

    def __init__(self, device: torch.device, *, on: bool) -> None:
        self._side = torch.cuda.Stream(device) if on and device.type == "cuda" else None

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """See the class."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """The main stream waits for what was put beside it."""
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
