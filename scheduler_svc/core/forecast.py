"""How long a new request would wait for its first token, and the refusals that follow: 429 now, not a timeout later.

The wait is that of the work ahead of it (its own tenant's, and of every other tenant as much as turn-taking lets pass)
at the pace the cost models predict, or that of slots and pages to come free, whichever is longer. Where it cannot know,
it says 0: a request is refused only for what was measured. Requests accepted once are never refused here.
"""

from dataclasses import dataclass

from scheduler_svc.core.cost import CostModel
from scheduler_svc.core.queue import WaitQueue

_LEAST_RETRY_MS, _MOST_RETRY_MS = 1_000, 600_000
# Under overload the queue stays where refusals begin: at this share of the deadline. What is accepted there must be in
# time though the forecast is a little short; measured, it was by 6 to 22 %.
_SHARE = 0.75


@dataclass(slots=True, eq=False)
class Outputs:
    """Mean length of an output, from running totals. `mean` is 0 until something finished."""

    mean: float = 0.0
    _tokens: int = 0
    _finished: int = 0

    def learn(self, tokens: int, finished: int) -> None:
        """Totals so far. A look at fewer than 16 new ends waits for more."""
        new = finished - self._finished
        if new < 16 and (self.mean or not new):
            return
        fresh = (tokens - self._tokens) / new
        self.mean += (1.0 if not self.mean else 0.2) * (fresh - self.mean)
        self._tokens, self._finished = tokens, finished

    def expected(self, max_tokens: int) -> float:
        """Ids a choice will likely emit."""
        return min(float(max_tokens), self.mean) if self.mean else float(max_tokens)


@dataclass(slots=True, eq=False)
class Site:
    """One serving worker at this moment."""

    cost: CostModel
    running: int  # placed choices
    prefills: list[int]  # remaining tokens of running prefills
    free_slots: int
    free_pages: int
    used_pages: int
    target_ns: float  # of a step while rows decode
    most_tokens: int  # of a frame


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What asks to be admitted."""

    tenant: str
    priority: int
    tokens: int
    choices: int = 1
    pages: int = 1


@dataclass(slots=True, eq=False)
class Ahead:
    """Waiting work that would be served before a newcomer."""

    tokens: float = 0.0
    choices: float = 0.0


def ahead_of(queue: WaitQueue, new: Newcomer) -> Ahead:
    """More urgent lanes and its own tenant's wholly; of others of its priority as much as turn-taking lets pass.

    Of lanes whose choices are longer, as much as if they were as long as the newcomer, which passes them.
    """
    out = Ahead()
    for priority, tenants in queue.lanes().items():
        if priority > new.priority:
            break
        own = tenants.get(new.tenant) if priority == new.priority else None
        mine = new.tokens + (own.tokens if own is not None else 0)
        count = new.choices + (len(own.seqs) if own is not None else 0)
        for tenant, lane in tenants.items():
            whole = priority < new.priority or tenant == new.tenant
            passed = min(
                1.0, new.tokens * len(lane.seqs) / max(1, lane.tokens)
            )  # a short one need not wait for long ones
            out.tokens += passed * (lane.tokens if whole else min(lane.tokens, mine))
            out.choices += passed * (len(lane.seqs) if whole else min(len(lane.seqs), count))
    return out


def delay_ns(sites: list[Site], ahead: Ahead, new: Newcomer, mean_output: float) -> float:
    """Time to the newcomer's first token; 0 where no model is warm yet."""
    if not sites or any(not s.cost.chunk_steps or not s.cost.decode_steps for s in sites):
        return 0.0
    pace = sum(_prefill_pace(site) for site in sites)
    if pace <= 0:
        return 0.0
    running = sum(min(left, new.tokens) for site in sites for left in site.prefills)  # longer ones let it pass
    own = new.tokens / pace
    return max((ahead.tokens + running) / pace, _places(sites, ahead, new, mean_output)) + own


def _prefill_pace(site: Site) -> float:
    """Prefill tokens per nanosecond beside the rows of its last step."""
    last = site.cost.last
    tokens = site.cost.chunk_for(last.rows, last.row_context, site.target_ns, site.most_tokens)
    took = site.cost.predict(last.with_chunk(max(tokens, 1)))
    return max(tokens, 1) / took if took > 0 else 0.0


def _places(sites: list[Site], ahead: Ahead, new: Newcomer, mean_output: float) -> float:
    """Until enough running choices have ended to give slots and pages to those ahead and to it."""
    running = sum(s.running for s in sites)
    if not running or not mean_output:
        return 0.0
    slots = ahead.choices + new.choices - sum(s.free_slots for s in sites)
    per_choice = max(1.0, sum(s.used_pages for s in sites) / running)
    pages = ahead.choices * per_choice + new.pages - sum(s.free_pages for s in sites)
    ends = max(slots, pages / per_choice)
    if ends <= 0:
        return 0.0
    step = max(s.cost.predict(s.cost.last) for s in sites)
    together = running + sum(min(s.free_slots, s.free_pages / per_choice) for s in sites)
    return ends * step * mean_output / together


def retry_after_ms(forecast_ns: float, deadline_ms: int) -> int | None:
    """None if the deadline is surely met; else when to ask again: once what is ahead has shrunk enough."""
    forecast_ms, bearable_ms = forecast_ns / 1e6, deadline_ms * _SHARE
    if forecast_ms <= bearable_ms:
        return None
    return int(min(_MOST_RETRY_MS, max(_LEAST_RETRY_MS, forecast_ms - bearable_ms)))
