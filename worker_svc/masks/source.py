"""What an executor asks of the masks, in which order, and from which thread.

All three calls come from the thread that launches steps, in the order of the steps:

1. `bind` with the inits of a step, before its forward starts. The first mask is computed during the forward then.
2. `take` when the forward is under way or done, right before sampling starts, once what the step before sampled has
   been told. It copies one row of mask bits per sampled place into memory that the caller owns and waits a bounded time
   for those that have not come. Rows that are not READY are not sampled: PARKED rows run again in a later step, a fault
   ends the choice.
3. `tell` at once when the sampled tokens are known. The service computes the next masks while the next forward runs.

An executor whose device runs ahead of the host queues its forward first, waits for the ids of the step before, tells
them, takes the masks while the forward runs, and queues their copy and the sampling behind it: rows of unconstrained
slots get a row of ones, rows that are not READY count as padding. The copy starts from pinned memory, which may be
written again when it has ended. Steps without constrained rows are launched without any of that. Ranks that compute
the same batch must agree on the rows that are READY: one of them asks, and says so to the others.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from worker_svc.core.work import GRAMMAR_FAILED, Fault, SlotInit

MaskRows = NDArray[np.int32]  # [n, words]: bit i of word w allows token 32 * w + i


class Ask(NamedTuple):
    """A row about to be sampled at `places` output positions from `position` on."""

    slot: int
    slot_gen: int
    position: int
    places: int = 1


class Answer(NamedTuple):
    """`ready`: the mask rows are there. Otherwise a fault ends the choice; without one the row is parked."""

    ready: bool
    fault: Fault | None = None


READY: Final = Answer(True)
PARKED: Final = Answer(False)


class Told(NamedTuple):
    """What a row came to: tokens of output positions from `position` on. `ended`: nothing follows.

    `drafts` will be verified behind them: the next mask has a row for each.
    """

    slot: int
    slot_gen: int
    position: int
    tokens: tuple[int, ...]
    ended: bool = False
    drafts: tuple[int, ...] = ()


class MaskSource(Protocol):
    """See the module's docstring. `words` is the width of a row: ceil(vocab_size / 32)."""

    words: int

    def bind(self, inits: Sequence[SlotInit]) -> None:
        """Slots that start over; those with a grammar_id are constrained from now on, the others are not."""
        ...

    def take(self, asks: Sequence[Ask], out: MaskRows, *, wait_s: float, alone: bool) -> list[Answer]:
        """One answer per ask. `out` [sum of places, words] gets the rows of those that are READY, in order.

        Waits at most `wait_s`; longer, by up to `book.ALONE_S`, if no mask has come and `alone` says that the step
        does nothing but the rows asked for.
        """
        ...

    def tell(self, rows: Sequence[Told]) -> None:
        """Sampled tokens of constrained slots; rows that were parked are left out."""
        ...


class NoMasks:
    """The source of a worker without a grammar service: constrained rows fail."""

    words = 0
    _NONE: Final = Answer(False, Fault(GRAMMAR_FAILED, "this worker has no grammar service: set [worker] grammar"))

    def bind(self, inits: Sequence[SlotInit]) -> None:
        """Nothing to bind at."""

    def take(self, asks: Sequence[Ask], out: MaskRows, *, wait_s: float, alone: bool) -> list[Answer]:
        return [self._NONE] * len(asks)

    def tell(self, rows: Sequence[Told]) -> None:
        """Nobody to tell."""
