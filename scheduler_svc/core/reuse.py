"""What a request does with what a pool has of its prompt: resume by a tail, load one, replay exactly, or nothing.

Pages alone do not resume a prefix: the window and the states before it are needed too. They come from a tail in the
worker's memory, from a tail in a lower tier, or from an exact replay, which computes the tokens of one receptive field
again with everything older read from the retained pages. The cheapest by price wins; nothing approximate is offered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from meshkit.types import PAGE_TOKENS
from scheduler_svc.core.keymap import I64
from scheduler_svc.core.prefix import Match, PoolId
from scheduler_svc.core.tails import NO_TAIL

WINDOW = 128


class Action(IntEnum):
    """How a prefill starts."""

    NOTHING = 0
    TAIL = 1
    LOAD = 2
    REPLAY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Nanoseconds, from live averages; `layers` sets the length of a replay."""

    layers: int
    token_ns: float  # one token of prefill
    context_ns: float = 0.0  # ... and per token of context before it
    resume_ns: float = 0.0  # loading a tail within the worker's memory
    load_ns: float = 0.0  # starting a load from a lower tier
    load_tail_ns: float = 0.0
    load_page_ns: float = 0.0

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers: {self.layers} is not positive; take num_hidden_layers of the checkpoint")
        if self.token_ns <= 0:
            raise ValueError(f"token_ns: {self.token_ns} is not positive; without a price every option costs the same")

    @property
    def replay_tokens(self) -> int:
        """Tokens whose window keys reach the last layer: each layer moves the receptive field back by one window."""
        return WINDOW + (WINDOW - 1) * (self.layers - 1)

    def prefill(self, start: int, end: int) -> float:
        """Price of computing tokens start..end-1."""
        return (end - start) * (self.token_ns + self.context_ns * (start + end) / 2)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a prefill starts and what it holds."""

    pool: PoolId
    action: Action
    start: int  # first token computed: so many count as cached
    write_from: int  # pages before this position are the published ones: read, not written
    tails_after: int  # a tail may be saved at positions beyond this: within a replay, windows are not exact yet
    pages: int  # leading pages to hold
    tail: int  # to load within the worker's memory, or NO_TAIL
    load_pages: int  # pages to load from a lower tier, after the held ones
    load_tail: int  # position of the tail to load from there, or 0
    price_ns: float


def decide(match: Match, tokens: int, prices: Prices, *, share: bool = True) -> Decision:
    """The cheapest way to a prompt of so many tokens, given one pool's match.

    `share`: published pages behind the place of resumption are held too and not written again, though their tokens are
    computed; otherwise the request writes its own copies.
    """
    base = match.base * PAGE_TOKENS
    tail = match.tail_pages * PAGE_TOKENS

    def way(action: Action, start: int, price: float, tail: int = NO_TAIL) -> Decision:
        kept = match.base if share or action is Action.REPLAY else start // PAGE_TOKENS
        after = base - 1 if action is Action.REPLAY else start
        return Decision(match.pool, action, start, kept * PAGE_TOKENS, after, kept, tail, 0, 0, price)

    best = way(Action.NOTHING, 0, prices.prefill(0, tokens))
    if tail:
        best = _cheaper(best, way(Action.TAIL, tail, prices.resume_ns + prices.prefill(tail, tokens), match.tail))
    replay = base - prices.replay_tokens
    if replay > tail:
        best = _cheaper(best, way(Action.REPLAY, replay, prices.prefill(replay, tokens)))
    loaded = match.lower_tail_pages * PAGE_TOKENS
    if loaded > tail:
        held = min(match.base, match.lower_tail_pages)
        pages = match.lower_tail_pages - held
        price = prices.load_ns + prices.load_tail_ns + pages * prices.load_page_ns + prices.prefill(loaded, tokens)
        kept = max(match.base, match.lower_tail_pages) if share else match.lower_tail_pages
        held = min(match.base, kept)
        write_from = kept * PAGE_TOKENS
        load = Decision(match.pool, Action.LOAD, loaded, write_from, loaded, held, NO_TAIL, pages, loaded, price)
        best = _cheaper(best, load)
    return best


def choose(
    matches: Sequence[Match], tokens: int, prices: Prices, waits_ns: Sequence[float], *, share: bool = True
) -> Decision:
    """The pool that serves soonest: price of the prefill plus what is waited for there; the first of equal ones."""
    assert matches and len(matches) == len(waits_ns), "one wait per pool, one pool at least"
    options = [decide(match, tokens, prices, share=share) for match in matches]
    at = min(range(len(options)), key=lambda i: (options[i].price_ns + waits_ns[i], -options[i].start, i))
    return options[at]


def shared_pages(one: I64, other: I64) -> int:
    """Leading pages that two chains of keys have in common: where the later one leaves, a tail serves both."""
    n = min(len(one), len(other))
    same = (one[:n] == other[:n]).all(axis=1)
    return n if same.all() else int(same.argmin())


def _cheaper(old: Decision, new: Decision) -> Decision:
    return new if new.price_ns < old.price_ns else old
