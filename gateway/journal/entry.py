"""One open request as the journal keeps it: everything a resubmission needs, and the bytes it counts for.

State only; the rules that move it are in `journal`.
"""

from array import array
from dataclasses import dataclass, field, replace
from enum import Enum

from gateway.journal.events import Start
from meshkit.frames import Submit, SubmitChoice
from meshkit.types import GrammarSource, RequestId

FIXED_BYTES = 1024
"""Counted per choice beside ids and keys: objects, parameters, map entries."""


class Phase(Enum):
    """Where a request stands between gateway and scheduler."""

    WAITING = "waiting"  # for an attachment
    DELAYED = "delayed"  # will be submitted at `submit_ns`
    CALLING = "calling"  # a Submit is out
    OPEN = "open"  # accepted


@dataclass(slots=True)
class Choice:
    """One choice. `ids` is the journal proper: what has been handed to the client, 4 bytes per id."""

    request_id: RequestId
    index: int
    reserved: int  # ids already counted in the journal's bytes
    plain: bool  # no log-probabilities are asked for
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    sent_logprobs: int = 0
    cached_tokens: int = -1  # as the first frame said; -1 before
    open: bool = True
    row: int = -1  # -1: not named on this attachment
    row_gen: int = 0


@dataclass(slots=True)
class Entry:
    """One request."""

    start: Start
    choices: list[Choice]
    deadline_ns: int
    bytes: int
    attempt: int = 0
    phase: Phase = Phase.WAITING
    kills: int = 0
    call: int = 0  # the outstanding Call, 0 = none
    submit: Submit | None = None  # of this attempt: an unknown outcome is retried with the same key
    submit_ns: int = 0
    accepted: bool = False  # some attempt was
    grammar_rev: str = ""  # under which the constrained ids so far were made
    wait_ns: int = 0  # WAITING: when a request that was never submitted is refused

    @property
    def request_id(self) -> RequestId:
        return self.start.request_id

    @property
    def is_open(self) -> bool:
        """True until every choice has ended."""
        return any(choice.open for choice in self.choices)

    @property
    def untouched(self) -> bool:
        """True while a refusal can still be answered as if nothing had happened: first attempt, no ids."""
        return self.attempt <= 1 and not any(choice.ids or not choice.open for choice in self.choices)

    @property
    def grammar(self) -> GrammarSource | None:
        """The constraint as it is submitted now; ids that must go on tie it to the revision they were made under."""
        source = self.start.grammar
        if source is None or not any(choice.ids for choice in self.choices if choice.open):
            return source
        return replace(source, grammar_rev=self.grammar_rev)


def new_entry(start: Start, reserve_tokens: int, now_ns: int) -> Entry:
    """An entry with bytes counted for prompt, keys and constraint, and up to `reserve_tokens` ids of each choice."""
    reserved = min(start.params.max_tokens, reserve_tokens)
    source = 0 if start.grammar is None else 4 * len(start.grammar.text)  # at most so many bytes
    cost = source + 4 * len(start.prompt) + 16 * len(start.page_keys) + start.n * (4 * reserved + FIXED_BYTES)
    plain = start.params.top_logprobs < 0
    choices = [Choice(start.request_id, index, reserved, plain) for index in range(start.n)]
    for choice, ids in zip(choices, start.emitted, strict=False):  # none of a request that begins here
        choice.open = ids is not None
        choice.ids.extend(ids or ())
        choice.reserved = max(reserved, len(choice.ids))
        cost += 4 * (choice.reserved - reserved)
    entry = Entry(start, choices, now_ns + start.deadline_ms * 1_000_000, cost, start.attempts, kills=start.kills)
    if start.emitted and start.grammar is not None:
        entry.grammar_rev = start.grammar.grammar_rev
    return entry


def resumed(entry: Entry, now_ns: int) -> Start:
    """The entry as a request that goes on at another scheduler; open choices keep the ids their clients have."""
    return replace(
        entry.start,
        deadline_ms=max(1, (entry.deadline_ns - now_ns) // 1_000_000),
        grammar=entry.grammar,
        emitted=tuple(tuple(choice.ids) if choice.open else None for choice in entry.choices),
        attempts=entry.attempt,
        kills=entry.kills,
    )


def build_submit(entry: Entry, attach_id: int, remaining_ms: int) -> Submit:
    """The Submit of the entry's current attempt; its open choices have been given rows."""
    start = entry.start
    return Submit(
        attach_id=attach_id,
        request_id=start.request_id,
        attempt=entry.attempt,
        choices=tuple(
            SubmitChoice(choice.index, choice.row, choice.row_gen, tuple(choice.ids))
            for choice in entry.choices
            if choice.open
        ),
        params=start.params,
        seed=start.seed,
        remaining_ms=remaining_ms,
        prompt=start.prompt,
        page_keys=start.page_keys,
        tenant=start.tenant,
        priority=start.priority,
        kill_count=entry.kills,
        traceparent=start.traceparent,
        namespace=start.namespace,
        grammar=entry.grammar,
    )
