"""The clock as a parameter: shells pass time into the cores, tests turn it by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic nanoseconds: differences mean something, absolute values do not."""

    def now_ns(self) -> int: ...


class MonotonicClock:
    """The machine's own monotonic clock. Stands still while the machine sleeps, never steps."""

    def now_ns(self) -> int:
        return time.monotonic_ns()
