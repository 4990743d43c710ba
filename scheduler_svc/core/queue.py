"""The waiting choices, in order of service: priority, then arrival, then choice index.

Preempted and moved choices keep their arrival, so they wait in front of younger ones. Bounds are checked by whoever
admits new requests; choices that were accepted once always find room here.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_svc.core.request import Phase, Seq


def _key(seq: Seq) -> tuple[int, int, int]:
    return seq.key


class WaitQueue:
    """Sorted list of queued choices and the bytes of their ids."""

    __slots__ = ("_seqs", "nbytes")

    def __init__(self) -> None:
        self._seqs: list[Seq] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Seq]:
        return iter(self._seqs)

    def head(self, n: int) -> list[Seq]:
        return self._seqs[:n]

    def add(self, seq: Seq) -> None:
        seq.phase = Phase.QUEUED
        seq.bypassed = 0
        insort(self._seqs, seq, key=_key)
        self.nbytes += seq.nbytes

    def remove(self, seq: Seq) -> None:
        """Take out a queued choice; its ids must not have changed since `add`."""
        at = bisect_left(self._seqs, seq.key, key=_key)
        assert self._seqs[at] is seq, "the choice is not where its key says"
        del self._seqs[at]
        self.nbytes -= seq.nbytes
