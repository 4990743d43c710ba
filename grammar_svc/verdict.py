"""What Compile answers: a typed verdict, never an exception for bad input or a broken child.

`place` is a JSON pointer into the source (or a character position), empty for the whole of it.
"""

from dataclasses import dataclass
from enum import IntEnum


class Outcome(IntEnum):
    """The numbers are those of GrammarVerdict on the wire."""

    OK = 1
    INVALID = 2
    TOO_LARGE = 3
    TIMEOUT = 4
    CRASHED = 5
    BUSY = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`grammar_id` is set with OK only, `retry_after_ms` with BUSY only; times are microseconds of the child's wall."""

    outcome: Outcome
    grammar_id: bytes = b""
    message: str = ""
    place: str = ""
    retry_after_ms: int = 0
    cached: bool = False
    compile_us: int = 0
    compiled_bytes: int = 0


class SourceError(ValueError):
    """The source is refused before any compile; `outcome` is INVALID or TOO_LARGE."""

    def __init__(self, message: str, place: str = "", outcome: Outcome = Outcome.INVALID) -> None:
        super().__init__(message)
        self.message, self.place, self.outcome = message, place, outcome

    def verdict(self) -> Verdict:
        """The answer that this refusal means."""
        return Verdict(outcome=self.outcome, message=self.message, place=self.place)
