"""Events and effects between the slot machine and its shell, beside the stream events of `meshkit.core`.

The shell carries `Run` and `Refresh` to the compute thread in the order given and answers each Run with one Ran.
"""

from dataclasses import dataclass

from worker_svc.core.work import StepOutcome, StepWork, TailWork


@dataclass(frozen=True, slots=True)
class Run:
    """Execute one step; never more than one is outstanding."""

    work: StepWork


@dataclass(frozen=True, slots=True)
class Refresh:
    """Save these tails after sampling and before the next Run. Answered only if it fails."""

    saves: tuple[TailWork, ...]


@dataclass(frozen=True, slots=True)
class Ran:
    """The outstanding Run ended: `outcome`, or None and what went wrong; then the step did not happen."""

    outcome: StepOutcome | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class RefreshFailed:
    """A Refresh raised: what these tails hold is unknown."""

    saves: tuple[TailWork, ...]
    error: str
