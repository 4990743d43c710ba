"""Output ids of one choice to reasoning, content and tool calls, with stop strings and the tokens of each piece.

A state machine driven by token ids: `<think>`, `</think>` and `｜DSML｜` count as markers only as their own tokens;
spelled with ordinary tokens they are text. The same ids give the same text however they are cut into pushes. Ending a
sequence on ids is the scheduler's work. Where tools are offered, calls are told from prose by `tool_calls`; elsewhere
their markup is plain content.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from gateway.text import prompt as markers
from gateway.text.chat_messages import ToolSpec
from gateway.text.deltas import CallPiece as CallPiece
from gateway.text.deltas import Delta as Delta
from gateway.text.deltas import Kind as Kind
from gateway.text.detokenizer import IncrementalDetokenizer
from gateway.text.stop_patterns import StopPatterns
from gateway.text.stop_strings import StopStrings
from gateway.text.tokenizer import Tokenizer
from gateway.text.tool_calls import Event, ToolCallParser
from gateway.text.tool_tags import MARK


class _Waiting(NamedTuple):
    """A token whose text is not released yet; `start` counts characters of the current part."""

    start: int
    position: int
    entry: Any


class _Fed(NamedTuple):
    """A token given to the tool call parser: its characters there, with one more where an unfinished one begins."""

    start: int
    end: int
    position: int
    entry: Any


@dataclass(slots=True)
class _Call:
    """What a delta in the making says of a call."""

    index: int
    opens: bool = False
    closes: bool = False


class OutputParser:
    """Parser of one choice.

    `starts_in` and `fresh_turn` come from the encoded prompt. `raw` means no markers and no states: everything is
    content and stop strings apply to all of it; otherwise they apply to content alone. `stop_ids` (EOS and the
    request's stop tokens) are never text, unless `include_stop` keeps stop tokens other than EOS. Before `min_tokens`
    ids no stop string counts. `tools` are those offered; without any, calls are not looked for. With tools, newlines
    that markup may follow are held back from the stop strings too. Unless `parallel_calls`, what follows the first
    complete call is dropped. `exact` leaves the content's first newlines in place: the request says what it looks like.
    With `spelled_calls` a grammar shapes the calls, so markup spelled with ordinary tokens is markup.
    """

    __slots__ = (
        "_calls",
        "_clear",
        "_detokenizer",
        "_dsml",
        "_end_think",
        "_exact",
        "_fed",
        "_hidden",
        "_include_stop",
        "_length",
        "_min_tokens",
        "_newlines",
        "_out",
        "_released",
        "_scanner",
        "_searched",
        "_stop_ids",
        "_think",
        "_tools",
        "_trimming",
        "_waiting",
        "complete_calls",
        "kept_ids",
        "kind",
        "marks",
        "matched_stop",
        "reasoning_tokens",
        "texts",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        starts_in: Kind = "content",
        fresh_turn: bool = True,
        raw: bool = False,
        stop: StopStrings | StopPatterns | Sequence[str] = (),
        include_stop: bool = False,
        stop_ids: Collection[int] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        tools: Sequence[ToolSpec] = (),
        parallel_calls: bool = True,
        exact: bool = False,
        spelled_calls: bool = False,
    ) -> None:
        self.kind: Kind = "content" if raw else starts_in
        """The part the next token belongs to."""
        self._think = None if raw else tokenizer.id_of(markers.THINK)
        self._end_think = None if raw else tokenizer.id_of(markers.END_THINK)
        self._hidden = _hidden_ids(tokenizer, raw, skip_special_tokens)
        self._stop_ids = frozenset(() if include_stop else stop_ids) | _ids(tokenizer, [markers.EOS])
        stops = stop if isinstance(stop, StopStrings | StopPatterns) else StopStrings(stop)
        self._scanner = stops.scanner()
        self._searched = stops.any
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.texts = tokenizer.whole_texts
        """Texts of the ids that have a whole one; the same for all parsers."""
        self.marks = _shared(self._hidden | self._stop_ids | frozenset(stop_ids) | {self._think, self._end_think})
        """Ids that mean more than their text."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self._exact = exact
        self._trimming = fresh_turn and not raw and not (exact and starts_in == "content")
        self._newlines = 0  # of reasoning, held back
        self._length = 0
        self._released = 0
        self._waiting: deque[_Waiting] = deque()
        self._out: list[tuple[Kind, list[str], list[_Waiting], _Call | None]] = []
        self._dsml = tokenizer.id_of(markers.DSML)
        with_tools = tools and not raw and self._dsml is not None
        self._tools = ToolCallParser(tools, parallel=parallel_calls, spelled=spelled_calls) if with_tools else None
        self._fed: deque[_Fed] = deque()
        self._clear = not self._trimming  # nothing is held back: as `_holds_nothing` says
        self._calls: list[tuple[str, str]] = []  # id and name
        self.complete_calls = 0
        """Tool calls that the model has closed."""
        self.kept_ids = 0
        """Output ids used so far; with a matched stop string, up to the one that completed it."""
        self.reasoning_tokens = 0
        """Ids of the reasoning part, markers and end of sequence not counted."""
        self.matched_stop: str | None = None
        """The stop string or expression that ended the output; ids after it are ignored."""

    def push(self, ids: Sequence[int], entries: Sequence[Any] | None = None) -> list[Delta]:
        """Text released by these ids. `entries`, one an id, come back on the delta that has the token's text."""
        if len(ids) == 1 and (text := self.whole_text(ids[0])) is not None:
            return [Delta(self.kind, text, (self.kept_ids - 1,), (None if entries is None else entries[0],))]
        for index, token_id in enumerate(ids):
            if self.matched_stop is not None:
                break
            position = self.kept_ids
            self.kept_ids += 1
            self._take(token_id, position, None if entries is None else entries[index])
        self._clear = self._holds_nothing()
        return self._deltas()

    def whole_text(self, token_id: int) -> str | None:
        """The short way of most tokens: the text of an id that is released at once and alone; it counts as pushed.

        None, with nothing done, if the id must go the long way: what is held back by it or before it, markers, ends.
        """
        text = self.texts.get(token_id)
        if not text or not self._clear or token_id in self.marks:
            return None
        if self.kind == "reasoning":
            if text[-1] == "\n":
                return None
        elif self._searched and not self._scanner.passes(text):
            return None
        if self._tools is not None and (token_id == self._dsml or not self._tools.passes(text)):
            return None
        if self.kind == "reasoning":
            self.reasoning_tokens += 1
        self.kept_ids += 1
        return text

    @property
    def free(self) -> bool:
        """Whether, until the next push, an id with a whole text and none of `marks` is sure to be released at once.

        In reasoning the text must not end in a newline. Such ids need no push, but `took` must tell of them before one.
        """
        unsearched = self.kind == "reasoning" or not self._searched
        return self._clear and unsearched and self._tools is None

    def took(self, count: int) -> None:
        """So many ids were released unasked, while `free`."""
        self.kept_ids += count
        if self.kind == "reasoning":
            self.reasoning_tokens += count

    def _holds_nothing(self) -> bool:
        """Whether everything pushed is released, and nothing but the next token's own text decides about it."""
        held = self._waiting or self._fed or self._newlines or self._trimming or self._detokenizer.pending
        return not held and self._length == self._released and self.matched_stop is None

    def finish(self) -> list[Delta]:
        """End of the output: what was held back comes out, an unfinished character is dropped."""
        if self.matched_stop is None:
            self._flush_tools()
            if self.kind == "reasoning":
                self._emit("\n" * self._newlines)
                self._newlines = 0
            elif self.kind == "content":
                self._emit(self._scanner.finish())
        self._waiting.clear()
        return self._deltas()

    def _take(self, token_id: int, position: int, entry: Any) -> None:
        if self._tools is not None:
            self._take_with_tools(self._tools, token_id, position, entry)
            return
        if token_id == self._end_think:
            if self.kind == "reasoning":
                self._end_reasoning()
            return
        if token_id in self._stop_ids:
            return
        if self.kind == "reasoning":
            self.reasoning_tokens += 1
        if token_id == self._think or token_id in self._hidden:
            return
        text = self._detokenizer.push_one(token_id)
        if self._trimming and text:
            rest = text.lstrip("\n")
            if not rest and not self._detokenizer.pending:
                return
            self._trimming = not rest
            text = rest
        self._waiting.append(_Waiting(self._length, position, entry))
        self._length += len(text)
        if self.kind == "reasoning":
            self._reasoning_text(text)
        else:
            self._content_text(text)

    def _end_reasoning(self) -> None:
        """`</think>`: newlines before and after it belong to the markup."""
        broken = self._detokenizer.cut()
        if self._tools is not None:
            self._heed(self._tools.feed(broken))
            self._flush_tools()
        elif broken:
            self._length += len(broken)
            self._reasoning_text(broken)
        self._start_part("content")
        self._trimming = not self._exact

    def _start_part(self, kind: Kind) -> None:
        self.kind = kind
        self._newlines = 0
        self._waiting.clear()
        self._length = self._released = 0

    def _reasoning_text(self, text: str) -> None:
        """Release all but the newlines at the end, which `</think>` may follow."""
        kept = text.rstrip("\n")
        if kept:
            self._emit("\n" * self._newlines + kept)
            self._newlines = 0
        self._newlines += len(text) - len(kept)

    def _content_text(self, text: str) -> None:
        safe, match = self._scanner.feed(text, armed=self.kept_ids >= self._min_tokens)
        if match is not None:
            self.matched_stop = match
            safe += self._scanner.matched_text if self._include_stop else ""
        self._emit(safe)

    def _emit(self, text: str) -> None:
        if not text:
            return
        if not self._out or self._out[-1][0] != self.kind:
            self._out.append((self.kind, [], [], None))
        _, texts, tokens, _ = self._out[-1]
        texts.append(text)
        self._released += len(text)
        while self._waiting and self._waiting[0].start < self._released:
            tokens.append(self._waiting.popleft())

    # ---- with tools -------------------------------------------------------------------------------------------------

    def _take_with_tools(self, tools: ToolCallParser, token_id: int, position: int, entry: Any) -> None:
        """Text goes through the tool call parser first; what it calls prose belongs to the current part.

        In a block only special tokens are no text: a value may well speak of `</think>`.
        """
        in_calls = self.kind == "tool_call"
        if token_id == self._end_think and not in_calls:
            if self.kind == "reasoning":
                self._end_reasoning()
            return
        if token_id in self._stop_ids:
            self._flush_tools()
            return
        if self.kind == "reasoning":
            self.reasoning_tokens += 1
        if (token_id == self._think and not in_calls) or token_id in self._hidden:
            return
        if token_id == self._dsml:
            if self._detokenizer.pending:
                self._heed(tools.feed(self._detokenizer.cut()))
            text = MARK
        else:
            text = self._detokenizer.push_one(token_id)
        if not in_calls:
            end = tools.fed + len(text) + bool(self._detokenizer.pending)
            self._fed.append(_Fed(tools.fed, end, position, entry))
        if text:
            self._heed(tools.feed(text))

    def _flush_tools(self) -> None:
        if self._tools is not None:
            self._heed(self._tools.flush())

    def _heed(self, events: Sequence[Event]) -> None:
        for kind, text, at in events:
            if self.matched_stop is not None:
                return
            if kind == "prose":
                self._prose(text, at)
            elif kind == "block":
                self._begin_block(at)
            elif kind != "block_end":
                self._call_event(kind, text)

    def _prose(self, text: str, at: int) -> None:
        """Text of the current part, at this place of the text fed to the tool call parser."""
        if self._trimming:
            rest = text.lstrip("\n")
            at += len(text) - len(rest)
            self._trimming = not rest
            text = rest
        while self._fed and self._fed[0].start < at + len(text):
            start, end, position, entry = self._fed.popleft()
            if end > at:
                self._waiting.append(_Waiting(self._length + max(0, start - at), position, entry))
        if text:
            self._length += len(text)
            (self._reasoning_text if self.kind == "reasoning" else self._content_text)(text)

    def _begin_block(self, at: int) -> None:
        """The part ends; tokens of the markup, which begins at `at`, are not its own."""
        if self.kind == "reasoning":
            self.reasoning_tokens -= sum(token.start >= at for token in self._fed)
        else:
            self._emit(self._scanner.finish())
        self._start_part("tool_call")
        self._fed.clear()

    def _call_event(self, kind: str, text: str) -> None:
        if kind == "call":
            self._calls.append((f"call_{len(self._calls):02d}_{uuid.uuid4().hex}", text))
        index = len(self._calls) - 1
        known = self._out[-1][3] if self._out else None
        if known is None or known.index != index:
            known = _Call(index)
            self._out.append(("tool_call", [], [], known))
        if kind == "call":
            known.opens = True
        elif kind == "call_end":
            known.closes = True
            self.complete_calls += 1
        else:
            self._out[-1][1].append(text)

    def _deltas(self) -> list[Delta]:
        out, self._out = self._out, []
        return [
            Delta(
                kind,
                "".join(texts),
                tuple([t.position for t in tokens]),
                tuple([t.entry for t in tokens]),
                None if call is None else self._call_piece(call),
            )
            for kind, texts, tokens, call in out
        ]

    def _call_piece(self, call: _Call) -> CallPiece:
        return CallPiece(call.index, *self._calls[call.index], call.opens, call.closes)


@lru_cache(64)
def _shared(ids: frozenset[int | None]) -> frozenset[int | None]:
    """One object for equal sets: what all streams have alike stays in the processor's caches."""
    return ids


def _ids(tokenizer: Tokenizer, tokens: Collection[str]) -> frozenset[int]:
    """Ids of those tokens that the vocabulary has."""
    return frozenset(i for i in map(tokenizer.id_of, tokens) if i is not None)


def _hidden_ids(tokenizer: Tokenizer, raw: bool, skip_special_tokens: bool) -> frozenset[int]:
    """Ids without text. In chat that includes the turn markers, which V4's file does not flag as special."""
    if not skip_special_tokens:
        return frozenset()
    if raw:
        return tokenizer.special_ids
    turns = [markers.USER, markers.ASSISTANT, markers.REMINDER, *markers.TASKS.values()]
    return (tokenizer.special_ids | _ids(tokenizer, turns)) - _ids(tokenizer, [markers.DSML])
