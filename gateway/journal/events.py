"""What the gateway's HTTP side and its journal say to each other, beside the stream events of `meshkit.core`.

The journal knows token ids only. Stop strings, parsing and text live on the HTTP side, which tells the journal where a
choice ended (`StopChoice`) or that nobody listens any more (`ClientGone`).
"""

from dataclasses import dataclass

import msgspec

from meshkit.frames import I32, Verdict
from meshkit.types import FinishReason, GrammarSource, RequestId, SamplingParams, TokenLogprobs

# ---- events into the journal ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A validated request. `seed` is drawn already; choice c samples with the key (seed, c)."""

    request_id: RequestId
    prompt: I32
    page_keys: tuple[bytes, ...]
    params: SamplingParams
    seed: int
    n: int
    tenant: str
    priority: int
    deadline_ms: int  # from now
    traceparent: str = ""
    namespace: bytes = b""  # of page_keys
    grammar: GrammarSource | None = None
    # of a request that began at another scheduler:
    emitted: tuple[tuple[int, ...] | None, ...] = ()  # ids its client has of each choice, None for one that has ended
    attempts: int = 0
    kills: int = 0


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client closed its connection: cancel every open choice. No more effects name this request."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class StopChoice:
    """A stop string matched: the choice ended with `keep` output ids. Answered by no Ended for this choice."""

    request_id: RequestId
    choice: int
    keep: int


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """An operator takes the request back: each open choice ends with FinishReason.ABORT."""

    request_id: RequestId


# ---- effects out of the journal -------------------------------------------------------------------------------------


class Emit(msgspec.Struct, frozen=True, gc=False):
    """New ids of a choice, in order, gapless, once. `base` is the output position of the first.

    The one effect of every token: a Struct is made in a tenth of a frozen dataclass's time.
    """

    request_id: RequestId
    choice: int
    base: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per id when asked for
    cached_tokens: int = 0  # prompt tokens from the prefix cache, as the choice's first frame said
    waited_ms: int = -1  # of the request in its scheduler's queue, with its first id; -1: not told


@dataclass(frozen=True, slots=True)
class Ended:
    """A choice ended; exactly one per choice unless the client left or a StopChoice closed it first."""

    request_id: RequestId
    choice: int
    reason: FinishReason
    error_code: str = ""
    error_message: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The scheduler refused the request before any token; nothing of it is kept."""

    request_id: RequestId
    verdict: Verdict
    message: str
    retry_after_ms: int
    place: str = ""  # with BAD_GRAMMAR
