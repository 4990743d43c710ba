"""What a choice says, in pieces: text of a part, or of a tool call's arguments, with the tokens that it covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Kind = Literal["reasoning", "content", "tool_call"]


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Which tool call a delta belongs to: the `index`-th of the output. It begins with this delta, or ends, or both."""

    index: int
    id: str
    name: str
    opens: bool = False
    closes: bool = False


class Delta(msgspec.Struct, frozen=True, gc=False):
    """A piece of output text, not empty unless it opens or closes a tool call; of a call, a piece of its arguments.

    `tokens` are the positions (0 is the first output id) of the tokens whose text begins in this piece, `logprobs` the
    entries pushed with them. Tokens without visible text (markers, trimmed newlines, special ids) and those of tool
    calls appear in no delta.
    """

    kind: Kind
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Any, ...] = ()
    call: CallPiece | None = None

    def joined(self, later: Delta) -> Delta | None:
        """This and the piece right after it as one; None if they belong to different parts or calls."""
        call = self.call
        if self.kind != later.kind:
            return None
        if call is not None:
            assert later.call is not None
            if call.index != later.call.index:
                return None
            call = CallPiece(call.index, call.id, call.name, call.opens, later.call.closes)
        return Delta(
            self.kind, self.text + later.text, self.tokens + later.tokens, self.logprobs + later.logprobs, call
        )
