"""What the exit status of every v4mesh process means, and the one shape of a refusal.

A refusal carries a code, a fact and a fix: `PORT  127.0.0.1:8000 is in use by pid 4121 (python -m http.server)` and
what to do about it. Several may be reported at once. Statuses 3 to 7 are permanent: the same command on the same
machine fails again, so nothing restarts it. Nothing here prints or exits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """Exit statuses; the numbers are part of the command line's interface."""

    OK = 0
    BUG = 1
    USAGE = 2
    CONFIG = 3
    GPU = 4
    PORT = 5
    MODEL = 6
    MEMORY = 7
    PEER = 8
    THRESHOLD = 9  # a bench or doctor limit was missed
    INTERRUPTED = 130


PERMANENT = frozenset({Exit.CONFIG, Exit.GPU, Exit.PORT, Exit.MODEL, Exit.MEMORY})


def is_permanent(status: int) -> bool:
    """True if starting the same process again cannot help."""
    return status in PERMANENT


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, said so that the reader can act: `fact` states it, `fix` says what to type."""

    code: str
    exit: Exit
    fact: str
    fix: str = ""
    details: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The text form: the code and the fact, then details and fix under it."""
        rows = [f"{self.code}  {self.fact}"]
        rows += [f"  {line}" for line in self.details]
        if self.fix:
            rows.append(f"  fix: {self.fix}")
        return rows

    def as_json(self) -> dict[str, object]:
        """The same object for `--json`."""
        return {
            "code": self.code,
            "exit": int(self.exit),
            "fact": self.fact,
            "fix": self.fix,
            "details": list(self.details),
        }


class ProblemsError(Exception):
    """A command cannot go on, for one or more reasons; the first one decides the exit status."""

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        assert self.problems, "a refusal names at least one problem"
        super().__init__("; ".join(f"{p.code}: {p.fact}" for p in self.problems))

    @property
    def exit(self) -> Exit:
        """The status of the first problem."""
        return self.problems[0].exit
