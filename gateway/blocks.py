"""An answer as a row of blocks, one after the other: reasoning, text, and a block per tool call.

Dialects that number their parts (Responses, Messages) stream and collect through this one class, so that what they
stream adds up to what they answer whole. It holds one choice; it knows no JSON.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.text.deltas import Delta, Kind
from meshkit.types import TokenLogprobs


@dataclass(slots=True)
class Block:
    """One part of the answer. `complete` is false while it is open, and for good where the output was cut inside it."""

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    complete: bool = False

    @property
    def text(self) -> str:
        """All of it: of a call, the JSON text of its arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Step:
    """What happened to a block: it began, it grew by `text`, it ended."""

    what: Literal["open", "grow", "close"]
    block: Block
    text: str = ""
    entries: Sequence[TokenLogprobs] = ()


class Blocks:
    """Gathers the deltas of one choice."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._call = -1  # the output's number of the call that is open

    def take(self, deltas: Sequence[Delta]) -> Iterator[Step]:
        """Steps of new deltas, in order; to be consumed whole."""
        for delta in deltas:
            call = delta.call
            if self._open is None or self._open.kind != delta.kind or (call is not None and call.index != self._call):
                yield from self._close(complete=self._open is not None and self._open.kind != "tool_call")
                yield self._begin(delta)
            block = self._open
            assert block is not None
            if delta.text:
                block.pieces.append(delta.text)
                block.entries += delta.logprobs
                yield Step("grow", block, delta.text, delta.logprobs)
            if call is not None and call.closes:
                yield from self._close(complete=True)

    def end(self, *, cut: bool) -> Iterator[Step]:
        """The output is over; `cut` says that it broke off. A call that is still open was never finished."""
        yield from self._close(complete=not cut and self._open is not None and self._open.kind != "tool_call")

    def _begin(self, delta: Delta) -> Step:
        block = Block(len(self.all), delta.kind)
        if delta.call is not None:
            block.call_id, block.name, self._call = delta.call.id, delta.call.name, delta.call.index
        self.all.append(block)
        self._open = block
        return Step("open", block)

    def _close(self, *, complete: bool) -> Iterator[Step]:
        block, self._open = self._open, None
        if block is not None:
            block.complete = complete
            yield Step("close", block)
