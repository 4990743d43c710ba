"""The hash model: what a request's output must be, as a pure function of seed, choice, position and all earlier ids.

Any wrong context, seed, choice or output position changes every later token, so errors show at once. Penalised rows
also depend on the counted history, rows with logprobs on exact values, constrained rows on every bit of their mask:
that is made of the grammar's text and of all ids emitted since it armed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshkit.pages import namespace_key, page_keys
from meshkit.types import PAGE_TOKENS, FinishReason, SamplingParams, TokenLogprobs

VOCAB = 97
EOS = 1
_PRIME = (1 << 61) - 1
_BASE = 0x1B873593_9E3779B9
_M64 = (1 << 64) - 1
START_DIGEST = 0x5EED
THINK_END = 2  # a constrained output that begins in thinking is free up to this id
ALL = (1 << VOCAB) - 1
WORDS = -(-VOCAB // 32)


def fold(digest: int, ids: Iterable[int]) -> int:
    """Digest of a sequence extended by ids."""
    for token in ids:
        digest = (digest * _BASE + token + 1) % _PRIME
    return digest


def mix(*values: int) -> int:
    """64 well-mixed bits of a few integers."""
    state = 0
    for value in values:
        state = (state ^ value) * 0xBF58476D1CE4E5B9 & _M64
        state ^= state >> 29
        state = state * 0x94D049BB133111EB & _M64
        state ^= state >> 32
    return state


@dataclass(slots=True)
class Sampler:
    """Sampler state of one slot, as slot_init gives it."""

    seed: int
    choice: int
    params: SamplingParams
    history: int = 0  # digest of emitted ids, if a penalty reads them
    prompt: int = 0  # digest of the prompt, if a penalty reads it

    def sample(self, digest: int, out_pos: int, mask: int | None = None) -> tuple[int, TokenLogprobs | None]:
        """Token at this output position, given the digest of everything before it. `mask`: bits of the allowed ids.

        Every bit of a mask counts, so a mask of another position or sequence shows at once.
        """
        params = self.params
        bits = mix(self.seed, self.choice, out_pos, digest, self.history, self.prompt)
        stops = params.stop_ids if params.ignore_eos else (*params.stop_ids, EOS)
        if mask is None:
            token = EOS if (bits >> 40) % 48 == 0 else 2 + bits % (VOCAB - 2)
            while out_pos < params.min_tokens and token in stops:
                token = 2 + (token + 1) % (VOCAB - 2)
        else:
            bits = mix(bits, mask & _M64, mask >> 64)
            token = _masked(bits, mask, stops if out_pos < params.min_tokens else ())
        if params.reads_output:
            self.history = fold(self.history, (token,))
        if params.top_logprobs < 0:
            return token, None
        others = tuple((token + 1 + i) % VOCAB for i in range(params.top_logprobs))
        values = tuple(-((bits >> i) % 4096) / 256 for i in range(1 + params.top_logprobs))
        return token, TokenLogprobs((token, *others), values)


def _masked(bits: int, mask: int, banned: Iterable[int]) -> int:
    """One of the allowed ids; the banned ones only if there is nothing else."""
    allowed = mask
    for token in banned:
        allowed &= ~(1 << token)
    allowed = allowed or mask
    turn = bits % VOCAB
    above = allowed >> turn << turn
    low = above or allowed
    return (low & -low).bit_length() - 1


def new_sampler(
    seed: int, choice: int, params: SamplingParams, emitted: Iterable[int], prompt: Iterable[int]
) -> Sampler:
    """As the executor builds it from slot_init: history and prompt only if a penalty reads them."""
    history = fold(3, emitted) if params.reads_output else 0
    return Sampler(seed, choice, params, history, fold(5, prompt) if params.reads_prompt else 0)


# ---- constraints ----------------------------------------------------------------------------------------------------


def start_of(text: str) -> int:
    """State of a grammar before its first id."""
    return fold(7, text.encode())


def may_end(state: int) -> bool:
    """Whether the grammar is complete here."""
    return mix(state, 11) % 8 == 0


def allowed(state: int, ends: Iterable[int]) -> int:
    """Bits of the ids that a grammar in this state allows, never none; EOS and stop ids only where it may end."""
    found = (mix(state, 1) | mix(state, 2) << 64) & ALL
    stops = 0
    for token in ends:
        stops |= 1 << token
    found = found | stops if may_end(state) else found & ~stops
    if not found & ~stops:
        found |= (ALL & ~stops) & -(ALL & ~stops)
    return found


@dataclass(slots=True)
class Constraint:
    """What a session of the grammar service must come to, by other means: state by state, undisturbed."""

    text: str
    ends: frozenset[int]
    state: int | None = None  # None: not armed yet
    done: bool = False

    def mask(self) -> int:
        if self.done:
            return sum(1 << token for token in self.ends)
        if self.state is None:
            return ALL & ~sum(1 << token for token in self.ends)
        return allowed(self.state, self.ends)

    def take(self, token: int) -> None:
        """An id of the output."""
        if self.state is not None:
            self.done = self.done or token in self.ends
            self.state = fold(self.state, (token,))
        elif token == THINK_END:
            self.state = start_of(self.text)


@dataclass(slots=True)
class Expected:
    """The one right output of a choice."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason = FinishReason.LENGTH


def expected_output(
    prompt: list[int], seed: int, choice: int, params: SamplingParams, grammar: str = "", *, thinking: bool = False
) -> Expected:
    """Run the model undisturbed."""
    result = Expected()
    digest = fold(START_DIGEST, prompt)
    sampler = new_sampler(seed, choice, params, (), prompt)
    constraint = Constraint(grammar, frozenset((EOS, *params.stop_ids)), None if thinking else start_of(grammar))
    stops = params.stop_ids if params.ignore_eos else (*params.stop_ids, EOS)
    while len(result.ids) < params.max_tokens:
        token, logprobs = sampler.sample(digest, len(result.ids), constraint.mask() if grammar else None)
        constraint.take(token)
        result.ids.append(token)
        if logprobs is not None:
            result.logprobs.append(logprobs)
        if token in stops:
            result.finish = FinishReason.STOP
            break
        digest = fold(digest, (token,))
    return result


def namespace(tenant: str) -> bytes:
    """As gateway and scheduler compute it for the simulated model."""
    return namespace_key(tenant, "", MODEL_REVISION, KV_LAYOUT)


def page_names(ids: list[int], tenant: str) -> dict[int, bytes]:
    """Digest at each page end -> the key that page must have."""
    names = {}
    digest = START_DIGEST
    for index, key in enumerate(page_keys(ids, namespace(tenant))):
        digest = fold(digest, ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])
        names[digest] = key
    return names


MODEL_REVISION = "rev"
KV_LAYOUT = "kv"
