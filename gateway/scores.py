"""Log-probabilities of a prompt's own tokens, which come as the front of an output that is given.

The mesh gets the prompt up to the first token that is wanted; the rest of it is what the output begins with. So each
costs a decode step, and whatever holds for outputs (recovery, prefix cache, limits) holds for them. This module keeps
those values and passes on what is output indeed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gateway.constraints import Constraint
from gateway.errors import ApiError, invalid
from gateway.journal.events import Emit
from gateway.limits import Limits
from meshkit.types import NO_LOGPROBS, SamplingParams, TokenLogprobs


@dataclass(slots=True)
class PromptScores:
    """Of one prompt. `entries[i]` belongs to the token at `start` + i."""

    first: int  # position from which on values are wanted; that of the first token does not exist
    start: int  # ids of the prompt that are prompt to the mesh
    given: int  # ids after them
    top: int  # alternatives of each
    output_top: int  # of each output token; NO_LOGPROBS: none
    asked: int  # alternatives as the mesh tells them
    entries: list[TokenLogprobs] = field(default_factory=list)

    def take(self, emit: Emit) -> Emit:
        """Keep what is the prompt's; the answer is what is left, with the log-probabilities that were asked for."""
        count = min(self.given - len(self.entries), len(emit.ids))
        self.entries += [self._cut(entry, self.top) for entry in emit.logprobs[:count]]
        rest: tuple[TokenLogprobs, ...] = ()
        if self.output_top != NO_LOGPROBS:
            rest = tuple(self._cut(entry, self.output_top) for entry in emit.logprobs[count:])
        return Emit(emit.request_id, emit.choice, emit.base, emit.ids[count:], rest, emit.cached_tokens, emit.waited_ms)

    def _cut(self, entry: TokenLogprobs, top: int) -> TokenLogprobs:
        """The token, its first `top` alternatives, and what follows the alternatives."""
        if top == self.asked:
            return entry
        kept = slice(1 + top, 1 + self.asked)
        ids, values = list(entry.ids), list(entry.values)
        del ids[kept], values[kept]
        return TokenLogprobs(tuple(ids), tuple(values))


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """What a client wants to know of its prompt: values from position `first` on, with `top` alternatives each.

    `param` is the field that asks, for messages.
    """

    first: int
    top: int
    param: str

    def split(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        n: int,
        terminals: frozenset[int],
        constraint: Constraint | None,
        limits: Limits,
    ) -> tuple[SamplingParams, PromptScores]:
        """Parameters for the mesh, and where the values will be. Raises 400 for what cannot be had together."""
        start = min(max(1, self.first), len(prompt))  # nothing stands before the first token to tell it from
        given = tuple(prompt[start:])
        if len(given) > limits.scored:
            text = f"{self.param}: {len(given)} tokens of the prompt to score; allowed are {limits.scored}"
            raise invalid(self.param, text)
        for held, what in (
            (n != 1, "n above 1"),
            (constraint is not None, "a constraint on the output"),
            (params.presence_penalty or params.frequency_penalty, "presence_penalty or frequency_penalty"),
        ):
            if held:
                raise invalid(self.param, f"{self.param}: log-probabilities of the prompt cannot be had with {what}")
        if ends := terminals.intersection(given):
            text = f"the prompt holds id {min(ends)}, which would end an output; this version cannot score it"
            raise ApiError(501, f"{self.param}: {text}", param=self.param)
        asked = max(self.top, params.top_logprobs)
        scores = PromptScores(min(self.first, len(prompt)), start, len(given), self.top, params.top_logprobs, asked)
        least = params.min_tokens + len(given) if params.min_tokens else 0
        longer = params.max_tokens + len(given)
        return replace(params, given_ids=given, max_tokens=longer, min_tokens=least, top_logprobs=asked), scores
