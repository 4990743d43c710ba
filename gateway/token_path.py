"""The short way of a streamed token: from the mesh's answer to its event in one call, and no task wakes for it.

Most answers bring one id whose text is whole and released at once, for a chunk that holds nothing but text. A `Lane`
keeps what such a token needs in one place: with hundreds of streams every other object is a miss in the processor's
caches. Any other id takes `Generation.take_in` and the renderer, still in the same call. Ends and what a slow client
has not taken are left to the mailbox's reader.
"""

import time
from collections.abc import Mapping
from typing import Protocol

from gateway.generation import Choice, Generation, Job, Update
from gateway.journal.events import Emit
from gateway.mesh import Answer
from gateway.sse import EventStream, json_text
from gateway.text.deltas import Kind

Around = Mapping[Kind, tuple[bytes, bytes]]
"""Of each part that is sent as plain chunks: the bytes of a chunk before its text and after it."""


class Rendering(Protocol):
    """What is needed of a renderer here."""

    def around(self, index: int) -> Around:
        """Of the choice with this index; empty where its chunks hold more than text, or depend on earlier ones."""

    def render(self, updates: list[Update]) -> bytes: ...


def open_path(generation: Generation, renderer: Rendering, stream: EventStream) -> None:
    """From now on the answers to a request take this way while its stream keeps up. Its first event has been sent."""
    lanes = {
        job.request_id: [Lane(generation, job, choice, renderer, stream) for choice in job.choices]
        for job in generation.jobs
    }
    every = [lane for of_job in lanes.values() for lane in of_job]
    mailbox = generation.mailbox

    def take(answer: Answer) -> bool:
        return isinstance(answer, Emit) and lanes[answer.request_id][answer.choice].take(answer)

    direct = take if len(every) > 1 else every[0].take

    def anew(answer: Answer) -> bool:
        """The first since the reader took some itself."""
        for lane in every:
            lane.look_ahead()
        mailbox.direct = direct
        return direct(answer)

    mailbox.direct = mailbox.anew = anew


class Lane:
    """One choice's."""

    __slots__ = (
        "_after",
        "_around",
        "_before",
        "_choice",
        "_free",
        "_gaps",
        "_generation",
        "_ids",
        "_job",
        "_marks",
        "_output",
        "_plain",
        "_reasoning",
        "_renderer",
        "_stream",
        "_texts",
    )

    def __init__(
        self, generation: Generation, job: Job, choice: Choice, renderer: Rendering, stream: EventStream
    ) -> None:
        self._stream = stream
        self._plain = False  # the next id may take the short way
        self._free = False  # and the parser need not be asked
        self._reasoning = False
        self._output = choice.output
        self._texts = choice.output.texts
        self._marks = choice.output.marks
        self._choice = choice
        self._ids = choice.ids
        self._gaps = generation.gaps
        self._before = self._after = b""
        self._generation = generation
        self._job = job
        self._renderer = renderer
        self._around = renderer.around(choice.index)

    def take(self, answer: Answer) -> bool:
        """True if that was all the answer needed. Never waits."""
        stream = self._stream
        if type(answer) is not Emit or not stream.keeps_up:
            return False
        ids = answer.ids
        if not self._plain or len(ids) != 1:
            return self._take_long(answer)
        token = ids[0]
        if self._free:
            text = self._texts.get(token)
            if not text or token in self._marks or (self._reasoning and text[-1] == "\n"):
                return self._take_long(answer)
        elif (text := self._output.whole_text(token)) is None:
            return self._take_long(answer)
        now = time.monotonic()
        choice = self._choice
        self._gaps.observe(now - choice.last_emit_s)
        choice.last_emit_s = now
        self._ids.append(token)
        stream.send(self._before, json_text(text), self._after)
        return True

    def _take_long(self, answer: Emit) -> bool:
        generation = self._generation
        update = generation.take_in(answer)
        if update is not None and (data := self._renderer.render([update])):
            self._stream.send(data)
        if generation.done:  # a stop string ended the last choice
            generation.mailbox.wake()
        self.look_ahead()
        return True

    def look_ahead(self) -> None:
        """Whether the next id may take the short way: all that is done once per choice or part has been done."""
        choice, output = self._choice, self._output
        around = self._around.get(output.kind)
        begun = choice.last_emit_s > 0 and self._generation.first_token_s is not None and self._job.scores is None
        self._plain = begun and around is not None and choice.finish is None
        self._free, self._reasoning = output.free, output.kind == "reasoning"
        if around is not None:
            self._before, self._after = around
