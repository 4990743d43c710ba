"""Output ids of one choice to reasoning and content text, with stop strings and the tokens each piece of text covers.

A state machine driven by token ids: `<think>` and `</think>` count as markers only as their own tokens; spelled with
ordinary tokens they are text. The same ids give the same text however they are cut into pushes. Ending a sequence on
ids is the scheduler's work; tool calls are not parsed here, their markup is plain content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gateway.text import prompt as markers
from gateway.text.detokenizer import IncrementalDetokenizer
from gateway.text.stop_strings import StopScanner, StopStrings
from gateway.text.tokenizer import Tokenizer

Kind = Literal["reasoning", "content"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of output text, never empty.

    `tokens` are the positions (0 is the first output id) of the tokens whose text begins in this piece, `logprobs` the
    entries pushed with them. Tokens without visible text (markers, trimmed newlines, special ids) appear in no delta.
    """

    kind: Kind
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Any, ...] = ()


class _Waiting(NamedTuple):
    """A token whose text is not released yet; `start` counts characters of the current part."""

    start: int
    position: int
    entry: Any


class OutputParser:
    """Parser of one choice.

    `starts_in` and `fresh_turn` come from the encoded prompt. `raw` means no markers and no states: everything is
    content and stop strings apply to all of it; otherwise they apply to content alone. `stop_ids` (EOS and the
    request's stop tokens) are never text, unless `include_stop` keeps stop tokens other than EOS. Before `min_tokens`
    ids no stop string counts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        starts_in: Kind = "content",
        fresh_turn: bool = True,
        raw: bool = False,
        stop: StopStrings | Sequence[str] = (),
        include_stop: bool = False,
        stop_ids: Collection[int] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._kind: Kind = "content" if raw else starts_in
        self._think = None if raw else tokenizer.id_of(markers.THINK)
        self._end_think = None if raw else tokenizer.id_of(markers.END_THINK)
        self._hidden = _hidden_ids(tokenizer, raw, skip_special_tokens)
        self._stop_ids = frozenset(() if include_stop else stop_ids) | _ids(tokenizer, [markers.EOS])
        self._scanner = StopScanner(stop if isinstance(stop, StopStrings) else StopStrings(stop))
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self._trimming = fresh_turn and not raw
        self._newlines = ""
        self._length = 0
        self._released = 0
        self._waiting: deque[_Waiting] = deque()
        self._out: list[tuple[Kind, list[str], list[_Waiting]]] = []
        self.kept_ids = 0
        """Output ids used so far; with a matched stop string, up to the one that completed it."""
        self.reasoning_tokens = 0
        """Ids of the reasoning part, markers and end of sequence not counted."""
        self.matched_stop: str | None = None
        """The stop string that ended the output; ids after it are ignored."""

    @property
    def kind(self) -> Kind:
        """The part the next token belongs to."""
        return self._kind

    def push(self, ids: Sequence[int], entries: Sequence[Any] | None = None) -> list[Delta]:
        """Text released by these ids. `entries`, one an id, come back on the delta that has the token's text."""
        for index, token_id in enumerate(ids):
            if self.matched_stop is not None:
                break
            position = self.kept_ids
            self.kept_ids += 1
            self._take(token_id, position, None if entries is None else entries[index])
        return self._deltas()

    def finish(self) -> list[Delta]:
        """End of the output: what was held back comes out, an unfinished character is dropped."""
        if self.matched_stop is None:
            if self._kind == "reasoning":
                self._emit(self._newlines)
                self._newlines = ""
            else:
                self._emit(self._scanner.finish())
        self._waiting.clear()
        return self._deltas()

    def _take(self, token_id: int, position: int, entry: Any) -> None:
        if token_id == self._end_think:
            if self._kind == "reasoning":
                self._end_reasoning()
            return
        if token_id in self._stop_ids:
            return
        if self._kind == "reasoning":
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
        if self._kind == "reasoning":
            self._reasoning_text(text)
        else:
            self._content_text(text)

    def _end_reasoning(self) -> None:
        """`</think>`: newlines before and after it belong to the markup."""
        broken = self._detokenizer.cut()
        if broken:
            self._length += len(broken)
            self._reasoning_text(broken)
        self._kind = "content"
        self._trimming = True
        self._newlines = ""
        self._waiting.clear()
        self._length = self._released = 0

    def _reasoning_text(self, text: str) -> None:
        """Release all but the newlines at the end, which `</think>` may follow."""
        whole = self._newlines + text
        kept = whole.rstrip("\n")
        self._newlines = whole[len(kept) :]
        self._emit(kept)

    def _content_text(self, text: str) -> None:
        safe, match = self._scanner.feed(text, armed=self.kept_ids >= self._min_tokens)
        if match is not None:
            self.matched_stop = match
            safe += match if self._include_stop else ""
        self._emit(safe)

    def _emit(self, text: str) -> None:
        if not text:
            return
        if not self._out or self._out[-1][0] != self._kind:
            self._out.append((self._kind, [], []))
        _, texts, tokens = self._out[-1]
        texts.append(text)
        self._released += len(text)
        while self._waiting and self._waiting[0].start < self._released:
            tokens.append(self._waiting.popleft())

    def _deltas(self) -> list[Delta]:
        out, self._out = self._out, []
        return [
            Delta(kind, "".join(texts), tuple([t.position for t in tokens]), tuple([t.entry for t in tokens]))
            for kind, texts, tokens in out
        ]


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
