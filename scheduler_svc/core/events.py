"""Events and effects of the scheduler core beyond those every core has (`meshkit.core`)."""

from dataclasses import dataclass
from enum import IntEnum

from meshkit.types import GrammarKind


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop admitting. Requests already accepted go on; resubmissions of them are still answered."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Effect, once, after Drain: no request is left."""


@dataclass(frozen=True, slots=True)
class Flush:
    """Empty the prefix cache; what running choices hold stays."""


# ---- the grammar service --------------------------------------------------------------------------------------------


class Outcome(IntEnum):
    """Verdicts of the grammar service; see GrammarVerdict in grammar.proto."""

    UNSPECIFIED = 0
    OK = 1
    INVALID = 2
    TOO_LARGE = 3
    TIMEOUT = 4
    CRASHED = 5
    BUSY = 6


@dataclass(frozen=True, slots=True)
class Compile:
    """Effect: have a grammar compiled. Answered by one `Compiled` with this ticket, within the timeout."""

    ticket: int
    kind: GrammarKind
    text: str
    tenant: str
    grammar_rev: str  # empty, or the revision it must be compiled under
    timeout_ms: int
    traceparent: str = ""  # of a sampled request that waits for it


@dataclass(frozen=True, slots=True)
class CompileAnswer:
    outcome: Outcome
    grammar_id: bytes = b""
    grammar_rev: str = ""
    message: str = ""
    place: str = ""
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compile ended: with an answer, or with None (not reachable, or lost on the way)."""

    ticket: int
    answer: CompileAnswer | None


@dataclass(frozen=True, slots=True)
class GrammarStarted:
    """The grammar service says which process it is: after start, and whenever its stream was opened anew."""

    boot: int
