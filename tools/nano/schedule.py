"""What training does when, as a function of the share of its time that has passed (0..1).

Wall clock, not steps: a borrowed machine is paid by the minute, and its speed is known only once training runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Shares of the training time at which things change, and the learning rate's course."""

    peak: float = 3e-3
    final: float = 0.02
    warmup_steps: int = 200
    level_start: float = 0.0
    level_full: float = 0.3
    guide: float = 0.1
    guide_until: float = 0.6
    sparse_from: float = 0.25
    rounding_from: float = 0.4
    decay_from: float = 0.5

    def rate(self, share: float, step: int) -> float:
        """Learning rate: a short climb, a plateau, a straight line down to `final` of the peak."""
        climb = min(1.0, (step + 1) / self.warmup_steps)
        if share <= self.decay_from:
            return self.peak * climb
        left = max(0.0, 1 - (share - self.decay_from) / (1 - self.decay_from))
        return self.peak * climb * (self.final + (1 - self.final) * left)

    def level(self, share: float) -> float:
        """How long lists and texts are, 0..1."""
        return min(1.0, self.level_start + (1 - self.level_start) * share / self.level_full)

    def guidance(self, share: float) -> float:
        """Weight of the C4 guide: full at first, then a reminder."""
        return self.guide if share < self.guide_until else 0.1 * self.guide


SCHEDULES = {
    "whole": Schedule(),
    "resumed": Schedule(
        peak=2e-3,
        warmup_steps=100,
        level_start=0.1,
        level_full=0.5,
        sparse_from=0.4,
        rounding_from=0.5,
        decay_from=0.45,
    ),
}
