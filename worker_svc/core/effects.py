"""Events and effects between the slot machine and its shell, beside the stream events of `meshkit.core`.

The shell hands each `Run` to the device in the order given, without waiting for the one before, and answers each with
one `Ran`, in the same order.
"""

from dataclasses import dataclass

from worker_svc.core.work import StepOutcome, StepWork


@dataclass(frozen=True, slots=True)
class Run:
    """Launch one step behind those launched before. After a failure no further step of its era may happen."""

    work: StepWork
    era: int = 0


@dataclass(frozen=True, slots=True)
class Freed:
    """A constrained slot of this generation is gone: its grammar session may end."""

    slot: int
    slot_gen: int


@dataclass(frozen=True, slots=True)
class Ran:
    """The oldest outstanding Run ended: `outcome`, or None and what went wrong; then the step did not happen."""

    outcome: StepOutcome | None
    error: str = ""
