"""Token ids to text, incrementally and byte-exact.

Text is released as whole Unicode scalar values only: bytes of an unfinished UTF-8 sequence wait for the next token.
Bytes that can no longer become valid are U+FFFD, exactly where decoding the whole sequence at once would put it; an
unfinished tail is dropped at the end. What a token means (markers, stop strings) is decided elsewhere.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

from gateway.text.tokenizer import Tokenizer

_DECODER: Final = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """State of one output sequence."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _DECODER(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Text that has become whole with these ids."""
        hidden = self._hidden
        token_bytes = self._token_bytes
        return self._decoder.decode(b"".join([token_bytes(i) for i in ids if i not in hidden]))

    def push_bytes(self, data: bytes) -> str:
        """Text that has become whole with these bytes, for callers that look tokens up themselves."""
        return self._decoder.decode(data)

    @property
    def pending(self) -> bytes:
        """Bytes of an unfinished scalar value, at most three."""
        return self._decoder.getstate()[0]

    def cut(self) -> str:
        """End of a part inside the sequence: an unfinished character is invalid now, so it is U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def finish(self) -> str:
        """End of the sequence: the unfinished tail is dropped, so this is always empty."""
        self._decoder.reset()
        return ""
