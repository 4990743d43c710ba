"""Tool calls in the model's output: prose, calls and their arguments told apart while text arrives.

Reads text in which each `｜DSML｜` token is `MARK`, so markup spelled with ordinary tokens stays text. The events
depend on the text alone, not on how it was cut into pieces. No tag of broken markup reaches the prose; calls in it are
saved where their meaning is clear: a call needs no block, and an open value or call ends where a tag can only stand
behind it. A call that the output leaves open stays open. Reasoning, stop strings and tokens are `output_parser`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from gateway.text.chat_messages import ToolSpec
from gateway.text.prompt import DSML
from gateway.text.tool_arguments import ArgumentsWriter
from gateway.text.tool_tags import MARK, Pending, Tag, lead_of, open_end, read_tag

EventKind = Literal["prose", "block", "call", "arguments", "call_end", "block_end"]
_State = Literal["prose", "between", "call", "value", "done"]


class Event(NamedTuple):
    """What became certain. `text` is prose, a call's name, or a piece of its arguments.

    `at` is the place of prose, or of a block's first tag, in all text fed, in characters. A block comes before its
    first call, also when the model left its tag out.
    """

    kind: EventKind
    text: str = ""
    at: int = 0


class ToolCallParser:
    """Parser of one output.

    `tools` are those offered, for values whose tag does not tell their kind. Unless `parallel`, the block ends with
    its first complete call. `spelled`: the marker counts in ordinary text too. A grammar sees text alone, so what it
    forces the model may spell; places of prose behind a spelled marker are then a few characters off.
    """

    def __init__(self, tools: Sequence[ToolSpec] = (), *, parallel: bool = True, spelled: bool = False) -> None:
        self._parallel = parallel
        self._spelled = spelled
        self._schemas: dict[str, Mapping[str, Any] | None] = {tool.name: tool.parameters for tool in tools}
        self._state: _State = "prose"
        self._text = ""  # not decided yet, from `_at` on
        self._at = 0
        self._base = 0  # place of `_text[0]` in all text fed
        self._scan = 0  # where the next look at a pending tag starts
        self._newlines = 0  # held back before `_at`: a block may follow, whose markup they would be
        self._arguments = ArgumentsWriter()
        self._events: list[Event] = []

    @property
    def fed(self) -> int:
        """Characters fed so far."""
        return self._base + len(self._text)

    @property
    def inside(self) -> bool:
        """In a block or behind it: no text is prose any more."""
        return self._state != "prose"

    def passes(self, text: str) -> bool:
        """Whether a piece is prose as it stands, with nothing held back before it; then it counts as fed."""
        if self._state != "prose" or self._newlines or self._at < len(self._text) or "<" in text or "\n" in text:
            return False
        if self._spelled and DSML[0] in text:
            return False
        self._base += len(text)
        return True

    def feed(self, text: str) -> list[Event]:
        """Take a piece of text."""
        self._base += self._at
        self._text = self._text[self._at :] + text
        if self._spelled:
            self._text = self._text.replace(DSML, MARK)
        self._scan = max(0, self._scan - self._at)
        self._at = 0
        while self._advance():
            pass
        return self._taken()

    def flush(self) -> list[Event]:
        """What was held back can become no markup any more: it comes out, an unfinished tag is dropped."""
        rest = self._text[self._at :]
        if MARK in rest:
            self._newlines = 0
        else:
            self._plain(self._at, len(self._text))
        self._at, self._scan = len(self._text), 0
        self._release_newlines()
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _say(self, kind: EventKind, text: str = "", at: int = 0) -> None:
        if text or kind != "arguments":
            self._events.append(Event(kind, text, at))

    def _advance(self) -> bool:
        """Deal with the text up to the next tag and with the tag; False if more text is needed."""
        text = self._text
        mark = text.find(MARK, self._at)
        if mark < 0:
            end = open_end(text, self._at, spelled=self._spelled)
            self._plain(self._at, end)
            self._at = end
            return False
        lead = lead_of(text, self._at, mark)
        self._plain(self._at, mark - len(lead))
        self._at = mark - len(lead)
        literal = self._state == "done" or (self._state == "value" and not lead)
        found = mark + 1 if literal else read_tag(text, lead, mark, self._scan)
        if isinstance(found, Pending):
            self._scan = found.scan
            return False
        self._scan = 0
        if isinstance(found, int):
            self._stray(mark, found)
        else:
            _ON_TAG[self._state](self, found, mark)
        return True

    def _plain(self, start: int, end: int) -> None:
        """Text that is no markup, in whatever state."""
        text = self._text[start:end]
        if not text:
            return
        if self._state == "prose":
            kept = text.rstrip("\n")
            if kept:
                self._say("prose", "\n" * self._newlines + kept, self._base + start - self._newlines)
                self._newlines = 0
            self._newlines += len(text) - len(kept)
        elif self._state == "value":
            self._say("arguments", self._arguments.value(text))
        elif self._state == "call":
            self._arguments.body(text)

    def _release_newlines(self) -> None:
        if self._newlines:
            self._say("prose", "\n" * self._newlines, self._base + self._at - self._newlines)
            self._newlines = 0

    def _stray(self, mark: int, end: int) -> None:
        """A marker that belongs to no tag (or to none that makes sense here): text in a value, dropped elsewhere."""
        if self._state == "value":
            self._say("arguments", self._arguments.value(self._text[self._at : mark] + DSML))
            end = mark + 1
        self._release_newlines()
        self._at = end

    # ---- what tags do, by state -------------------------------------------------------------------------------------

    def _in_prose(self, tag: Tag, mark: int) -> None:
        if not tag.opens or tag.word == "parameter" or (tag.word == "invoke" and tag.name is None):
            self._stray(mark, tag.end)
            return
        self._newlines = 0
        self._say("block", at=self._base + self._at)
        self._state = "between"
        self._between(tag, mark)

    def _between(self, tag: Tag, mark: int) -> None:
        self._at = tag.end
        if self._state == "done":
            return
        if tag.word == "invoke" and tag.opens and tag.name is not None:
            self._arguments = ArgumentsWriter(self._schemas.get(tag.name))
            self._say("call", tag.name)
            self._state = "call"
            if tag.closed:
                self._end_call()
        elif tag.word == "tool_calls" and tag.closes:
            self._say("block_end")
            self._state = "done"

    def _in_call(self, tag: Tag, mark: int) -> None:
        if tag.word == "parameter":
            if tag.opens and tag.name is not None:
                self._begin_value(tag)
            else:
                self._stray(mark, tag.end)
            return
        if not tag.lead or (tag.opens and (tag.word == "tool_calls" or tag.name is None)):
            self._stray(mark, tag.end)
            return
        self._end_call()
        self._between(tag, mark)

    def _in_value(self, tag: Tag, mark: int) -> None:
        """The value's own closer ends it; so does a tag that can only stand behind one whose closer is missing."""
        if tag.closes and tag.word == "parameter":
            self._end_value()
            self._at = tag.end
        elif tag.closes or tag.name is not None:
            self._end_value()
            self._in_call(tag, mark)
        else:
            self._stray(mark, tag.end)

    def _begin_value(self, tag: Tag) -> None:
        assert tag.name is not None
        self._at = tag.end
        self._say("arguments", self._arguments.begin(tag.name, tag.string))
        self._state = "value"
        if tag.closed:
            self._end_value()

    def _end_value(self) -> None:
        self._say("arguments", self._arguments.end())
        self._state = "call"

    def _end_call(self) -> None:
        self._say("arguments", self._arguments.close())
        self._say("call_end")
        self._state = "between" if self._parallel else "done"


_ON_TAG: Final = {
    "prose": ToolCallParser._in_prose,
    "between": ToolCallParser._between,
    "call": ToolCallParser._in_call,
    "value": ToolCallParser._in_value,
}
