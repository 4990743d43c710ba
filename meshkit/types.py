"""Values that every service speaks of: sampling parameters, finish reasons, identifiers.

Plain frozen data without behaviour beyond range-free defaults; ranges are checked once, at the gateway's edge.
No protobuf, numpy or I/O here: `meshkit.wire` turns these into messages and back.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

RequestId = NewType("RequestId", bytes)
"""128-bit random name of a request, minted by the gateway; client-supplied ids are labels only."""

PAGE_TOKENS = 256
"""Tokens of compressed KV in one page: lcm(4 * 64, 128), so no compression window is open at a page boundary."""

PROTO_REV = 2
"""Refused at Hello when two processes disagree."""

NO_GRAMMAR_SERVICE = "scheduler.grammar"
"""The place that a scheduler without a grammar service names in its BAD_GRAMMAR: the source is not at fault."""

NO_PAGE = -1
NO_LOGPROBS = -1


class FinishReason(IntEnum):
    """Why a choice ended. NONE means it has not."""

    NONE = 0
    STOP = 1  # EOS, a stop id, or (decided in the gateway) a stop string
    LENGTH = 2  # max_tokens or the context is used up
    ABORT = 3  # an operator or the client took it back
    ERROR = 4  # typed error; `message` says what


class GrammarKind(IntEnum):
    """How the text of a grammar source reads; see common.proto."""

    JSON_SCHEMA = 1
    JSON_OBJECT = 2
    REGEX = 3
    EBNF = 4
    CHOICE = 5
    STRUCTURAL_TAG = 6
    DSML_TOOLS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSource:
    """What a request's output must look like. The grammar service checks, canonicalises and compiles it."""

    kind: GrammarKind
    text: str
    thinking: bool = False  # the output begins inside <think>: the constraint arms after </think>
    grammar_rev: str = ""  # revision that the ids emitted so far were made under; empty: none were


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one choice draws its tokens. Resolved: every default is filled in, max_tokens fits the context."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()  # (token id, addend)
    top_logprobs: int = NO_LOGPROBS  # -1 none, 0 the chosen token only, 1..20 alternatives beside it
    logprob_ids: tuple[int, ...] = ()  # more ids whose values follow the alternatives'
    allowed_ids: tuple[int, ...] = ()  # nothing else is drawn; empty = off
    bad_words: tuple[tuple[int, ...], ...] = ()  # ids that the output must not hold in a row
    given_ids: tuple[int, ...] = ()  # the output begins with these, whatever else is asked: their values are wanted

    @property
    def reads_prompt(self) -> bool:
        """True if a penalty counts prompt tokens, so slot_init must carry them."""
        return self.repetition_penalty != 1.0

    @property
    def reads_output(self) -> bool:
        """True if emitted tokens decide about the next ones, so a resume must carry them."""
        return self.counts_output or any(len(word) > 1 for word in self.bad_words)

    @property
    def counts_output(self) -> bool:
        """True if a penalty counts emitted tokens."""
        return self.reads_prompt or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-softmax values for one sampled token: `ids[0]` is the token itself, then the alternatives."""

    ids: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a worker serves, told to the scheduler in Hello and by the scheduler to gateways."""

    name: str
    revision: str  # digest of config and weight file sizes: two workers of one group must agree
    vocab_size: int
    max_context: int  # prompt + output tokens
    eos_ids: tuple[int, ...]
    kv_layout_id: str  # any change of page contents' meaning changes it
    layers: int = 0  # window layers: they set the length of an exact replay; 0 = unknown, nothing is replayed
