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
        self._tokenizer = tokenizer
        self._whole = tokenizer.whole_texts
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _DECODER(errors="replace")
        self._pending = b""

    def push(self, ids: Sequence[int]) -> str:
        """Text that has become whole with these ids."""
        push_one, hidden = self.push_one, self._hidden
        return "".join([push_one(token_id) for token_id in ids if token_id not in hidden])

    def push_one(self, token_id: int) -> str:
        """Text that has become whole with this id, special or not."""
        if not self._pending:
            text = self._whole.get(token_id)
            if text is not None:
                return text
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._pending = self._decoder.getstate()[0]
        return text

    @property
    def pending(self) -> bytes:
        """Bytes of an unfinished scalar value, at most three."""
        return self._pending

    def cut(self) -> str:
        """End of a part inside the sequence: an unfinished character is invalid now, so it is U+FFFD."""
        self._pending = b""
        return self._decoder.decode(b"", final=True)

    def finish(self) -> str:
        """End of the sequence: the unfinished tail is dropped, so this is always empty."""
        self._pending = b""
        self._decoder.reset()
        return ""
