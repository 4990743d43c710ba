"""One bound slot: a matcher that has seen exactly the slot's output ids, and the mask rows of its next position. Pure.

Nothing is ever rolled back: the matcher accepts sampled tokens only, drafts are looked through on the side. In thinking
mode the constraint arms after `</think>`; before that, and until the grammar may end, EOS and stop ids are not allowed.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]  # [n, words]
ALL: Final = np.int32(-1)


class Kind(IntEnum):
    """What an entry says of its position; the numbers travel."""

    FREE = 0  # anything but EOS and stop ids, for the drafts' positions too
    MASKED = 1
    DONE = 2  # the grammar has ended with a stop token: nothing follows
    FAILED = 3  # the output left the grammar, or can never be served; `error` says why


class Matcher(Protocol):
    """The part of xgrammar.GrammarMatcher that is used."""

    def accept_token(self, token_id: int) -> bool: ...

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool: ...

    def traverse_draft_tree(self, first: Any, sibling: Any, tokens: Any, bitmask: Any) -> bool: ...

    def is_terminated(self) -> bool: ...

    def is_completed(self) -> bool: ...

    def fork(self) -> "Matcher": ...


NewMatcher = Callable[[Any, list[int]], Matcher]  # compiled grammar, stop ids with EOS


class Session:
    """`think_end` is the id after which the constraint holds, None to hold at once. Until `give` ids are only kept."""

    def __init__(
        self, grammar_id: bytes, eos_ids: Sequence[int], stop_ids: Sequence[int], think_end: int | None
    ) -> None:
        self.grammar_id = grammar_id
        self.position = 0  # output position of the next sampled token
        self.error = ""
        self.done = False
        self._eos = list(eos_ids)
        self._stops = sorted({*eos_ids, *stop_ids})
        self._only_eos = len(self._stops) == len(self._eos)
        self._think_end = think_end
        self._armed = think_end is None
        self._pending: list[int] = []  # armed ids that came before the grammar
        self._grammar: Any = None
        self._new: NewMatcher | None = None
        self._matcher: Matcher | None = None

    def give(self, grammar: Any, new: NewMatcher) -> None:
        """The compiled grammar has come: replay what it must have seen."""
        self._grammar, self._new = grammar, new
        if self._armed:
            self._start()

    def fail(self, why: str) -> None:
        """From now on every entry says so; the first reason stays."""
        self.error = self.error or why

    @property
    def has_grammar(self) -> bool:
        return self._new is not None

    def advance(self, ids: Sequence[int]) -> None:
        """Sampled tokens, in order. After the end, and after a failure, they are only counted."""
        for token in ids:
            if not self._armed:
                if token in self._stops:
                    self.fail(f"token {token} ends the output at position {self.position}, before </think>")
                elif token == self._think_end:
                    self._armed = True
                    if self._new is not None:
                        self._start()
            elif self._matcher is None:
                self._pending.append(token)
            else:
                self._accept(self._matcher, token)
            self.position += 1

    def write(self, rows: Rows, drafts: Sequence[int] = ()) -> tuple[Kind, int] | None:
        """Fill row i with what may follow drafts[:i]; returns kind and row count, None while the grammar is missing.

        Rows after an illegal draft allow everything: no sample can reach them.
        """
        if self.error:
            return Kind.FAILED, 0
        if self.done:
            return Kind.DONE, 0
        if not self._armed and self._think_end not in drafts:
            return Kind.FREE, 0
        if self._new is None:
            return None
        matcher, free = self._matcher, 0
        if matcher is None:
            assert self._think_end is not None
            free = list(drafts).index(self._think_end) + 1
            rows[:free] = ALL
            for stop in self._stops:
                rows[:free, stop >> 5] &= ~_bit(stop)
            matcher = self._new(self._grammar, self._stops)
        self._fill(matcher, rows[free : 1 + len(drafts)], list(drafts[free:]))
        if not rows[0].any():
            self.fail(f"no token of the vocabulary can continue the output at position {self.position}")
            return Kind.FAILED, 0
        return Kind.MASKED, 1 + len(drafts)

    # ---- matcher ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        assert self._new is not None
        self._matcher = self._new(self._grammar, self._stops)
        at = self.position - len(self._pending)
        for offset, token in enumerate(self._pending):
            self._accept(self._matcher, token, at + offset)
        self._pending.clear()

    def _accept(self, matcher: Matcher, token: int, position: int | None = None) -> None:
        if self.done or self.error:
            return
        if not matcher.accept_token(token):
            where = self.position if position is None else position
            self.fail(f"token {token} at output position {where} is outside the grammar")
        elif matcher.is_terminated():
            self.done = True

    def _fill(self, matcher: Matcher, rows: Rows, drafts: list[int]) -> None:
        if not drafts:
            self._fill_one(matcher, rows, 0)
            return
        if self._only_eos:
            rows[1:] = ALL
            n = len(drafts) + 1
            first = np.arange(1, n + 1, dtype=np.int64)
            first[-1] = -1
            matcher.traverse_draft_tree(first, np.full(n, -1, np.int64), np.array([0, *drafts], np.int64), rows)
            for index in range(1, n):
                if not rows[index].any():  # the traversal leaves an illegal draft's own row empty
                    rows[index:] = ALL
                    break
            return
        branch = matcher.fork()  # the native traversal knows no stop ids of a request's own
        for index, draft in enumerate(drafts):
            self._fill_one(branch, rows, index)
            if branch.is_terminated() or not branch.accept_token(draft):
                rows[index + 1 :] = ALL
                return
        self._fill_one(branch, rows, len(drafts))

    def _fill_one(self, matcher: Matcher, rows: Rows, index: int) -> None:
        if matcher.is_terminated():
            rows[index] = ALL
            return
        matcher.fill_next_token_bitmask(rows, index)
        if not self._only_eos and not matcher.is_completed():
            for stop in self._stops:
                rows[index, stop >> 5] &= ~_bit(stop)


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).astype(np.int32)  # wraps: bit 31 is the sign
