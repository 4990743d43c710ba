"""Events and effects of the scheduler core beyond those every core has (`meshkit.core`)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop admitting. Requests already accepted go on; resubmissions of them are still answered."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Effect, once, after Drain: no request is left."""


@dataclass(frozen=True, slots=True)
class Flush:
    """Empty the prefix cache; what running choices hold stays."""
