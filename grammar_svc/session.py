"""One bound slot: a matcher that has seen exactly the slot's output ids, and the mask rows of its next position. Pure.

Nothing is ever rolled back: the matcher accepts sampled tokens only, drafts are looked through on the side. In thinking
mode the constraint arms after `</think>`; before that, and until the grammar may end, EOS and stop ids are not allowed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Matchers:
    """How matchers are made and driven; `grammar_svc.compiler.MATCHERS` is XGrammar's own.

    `fill` writes the mask of matcher i to row indices[i], in one call for many.
    """

    new: Callable[[Any, list[int]], Matcher]  # compiled grammar, stop ids with EOS
    fill: Callable[[list[Any], Rows, list[int]], None]


class Session:
    """`think_end` is the id after which the constraint holds, None to hold at once. Until `give` ids are only kept.

    `live` is the matcher while the constraint holds. `plain` sessions need nothing of their own in a mask: no stop ids
    beside EOS.
    """

    def __init__(
        self, grammar_id: bytes, eos_ids: Sequence[int], stop_ids: Sequence[int], think_end: int | None
    ) -> None:
        self.grammar_id = grammar_id
        self.position = 0  # output position of the next sampled token
        self.error = ""
        self.done = False
        self.live: Matcher | None = None
        self.ends = frozenset((*eos_ids, *stop_ids))
        self.plain = len(self.ends) == len(set(eos_ids))
        self._stops = sorted(self.ends)
        self._think_end = think_end
        self._armed = think_end is None
        self._pending: list[int] = []  # armed ids that came before the grammar
        self._grammar: Any = None
        self._matchers: Matchers | None = None

    def give(self, grammar: Any, matchers: Matchers) -> None:
        """The compiled grammar has come: replay what it must have seen."""
        self._grammar, self._matchers = grammar, matchers
        if self._armed:
            self._start()

    def fail(self, why: str) -> None:
        """From now on every entry says so; the first reason stays."""
        self.error = self.error or why
        self.live = None

    @property
    def has_grammar(self) -> bool:
        return self._matchers is not None

    def advance(self, ids: Sequence[int]) -> None:
        """Sampled tokens, in order. After the end, and after a failure, they are only counted."""
        for token in ids:
            if not self._armed:
                if token in self.ends:
                    self.fail(f"token {token} ends the output at position {self.position}, before </think>")
                elif token == self._think_end:
                    self._armed = True
                    if self._matchers is not None:
                        self._start()
            elif self._matchers is None:
                self._pending.append(token)
            elif self.live is not None:
                self.accept(self.live, token)
                continue
            self.position += 1

    def accept(self, live: Matcher, token: int) -> None:
        """Give the token of this position to the live matcher."""
        if not live.accept_token(token):
            self.fail(f"token {token} at output position {self.position} is outside the grammar")
        elif token in self.ends:
            self.done, self.live = True, None
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
        if self._matchers is None:
            return None
        matcher, free = self.live, 0
        if matcher is None:
            assert self._think_end is not None
            free = list(drafts).index(self._think_end) + 1
            rows[:free] = ALL
            for stop in self._stops:
                rows[:free, stop >> 5] &= ~_bit(stop)
            matcher = self._matchers.new(self._grammar, self._stops)
        self._fill(matcher, rows[free : 1 + len(drafts)], list(drafts[free:]))
        if not rows[0].any():
            self.stuck()
            return Kind.FAILED, 0
        return Kind.MASKED, 1 + len(drafts)

    def stuck(self) -> None:
        """The mask of this position is empty."""
        self.fail(f"no token of the vocabulary can continue the output at position {self.position}")

    # ---- matcher ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        assert self._matchers is not None
        self.live = self._matchers.new(self._grammar, self._stops)
        pending, self._pending = self._pending, []
        if pending:
            self.position -= len(pending)
            self.advance(pending)

    def _fill(self, matcher: Matcher, rows: Rows, drafts: list[int]) -> None:
        if not drafts:
            self._fill_one(matcher, rows, 0)
            return
        if self.plain:
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
        if not self.plain and not matcher.is_completed():
            for stop in self._stops:
                rows[index, stop >> 5] &= ~_bit(stop)


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).astype(np.int32)  # wraps: bit 31 is the sign
