"""Prefill beside decode: how many tokens of a frame prefills get, how they share them, and who may join.

The step is to take no longer than `itl_factor` times its decode rows alone, and never longer than `step_ms`; a lone
prefill takes what `step_ms` allows. Beside few rows that would leave prefill only steps that read all weights for a few
tokens, and the waiting could never become a batch: `prefill_floor` times the cost of reading them is allowed always.
A waiting choice joins when it would get tokens now: because what is left of shorter prefills leaves some, or because it
is older than every prefill that runs.
"""

from dataclasses import dataclass, field

from scheduler_svc.core.chunk import chunk
from scheduler_svc.core.cost import CostModel
from scheduler_svc.core.policy import GRAIN, Work, split
from scheduler_svc.core.request import Phase, Seq
from scheduler_svc.core.rows import Draft, decode_load, prefilling
from scheduler_svc.core.state import MS, State, Worker

_MARGIN = 0.04  # steps vary; the target is for nearly all of them
_DEEP = 8  # a chunk token at a deep context costs as much as so many at none, or more
_GIANT = 64  # steps: where all prefills take longer than so many, ...
_GIANTS_PART = 0.5  # ... theirs are kept shorter, because whoever arrives waits for those in the worker's hands


def target_ns(st: State, cost: CostModel, rows: int, row_context: int) -> float:
    """How long a step with these decode rows may take."""
    limits = st.limits
    most = limits.step_ms * MS
    if not rows:
        return float(most)
    alone = cost.alone(rows, row_context)
    doubt = 1 + _MARGIN + min(cost.error, 0.2)
    wanted = max(limits.itl_factor * alone, limits.prefill_floor * cost.fixed) / doubt
    return min(max(wanted, limits.itl_floor_ms * MS), max(most, 1.25 * alone))


@dataclass(slots=True, eq=False)
class Sharing:
    """The prefill part of one frame. `tokens`: its cost limit, in prefill tokens at no context; `room`: real ones."""

    tokens: float
    room: int
    context_weight: float
    running: list[tuple[float, tuple[int, int, int]]] = field(default_factory=list)  # cost left and key of each
    fresh: int = 0  # tokens promised to those placed in this frame

    def open(self) -> bool:
        """Whether the frame can take one more prefill at all."""
        return self.room > self.fresh and (not self.fresh or self.fresh + GRAIN <= self.tokens)

    def has_tokens_for(self, seq: Seq, start: int) -> bool:
        """Whether this waiting choice would get some, were it placed with `start` tokens cached."""
        cost = Work(seq.total - start, start).cost(self.context_weight)
        if sum(c for c, _ in self.running if c <= cost) < self.tokens:
            return True
        return all(seq.key < key for _, key in self.running)

    def placed(self, seq: Seq) -> None:
        work = _work(seq)
        self.fresh += min(GRAIN, work.remaining)
        self.running.append((work.cost(self.context_weight), seq.key))


def share_of(st: State, worker: Worker, draft: Draft) -> Sharing:
    """What this frame leaves to prefills, beside the decode rows it holds."""
    rows, row_context = decode_load(draft)
    if not len(st.queue) and not prefilling(worker):
        return Sharing(0.0, 0, 0.0)
    cost = worker.cost
    room = min(draft.budget, cost.most_chunk)
    tokens = cost.chunk_for(rows, row_context, target_ns(st, cost, rows, row_context), _DEEP * room)
    sharing = Sharing(float(max(tokens, GRAIN)), room, cost.context_weight)
    for seq in prefilling(worker):
        sharing.running.append((_work(seq).cost(sharing.context_weight), seq.key))
    if rows and sharing.running and min(sharing.running)[0] > _GIANT * sharing.tokens and not len(st.queue):
        sharing.tokens = max(float(GRAIN), _GIANTS_PART * sharing.tokens)
    return sharing


def chunk_rows(st: State, worker: Worker, draft: Draft, sharing: Sharing) -> None:
    """Give the running prefills, those placed in this frame included, their tokens."""
    seqs = prefilling(worker)
    works = [_work(s, fresh=s.planned_step == draft.step) for s in seqs]
    grants = split(
        sharing.tokens, sharing.room, works, share=st.limits.prefill_share, context_weight=sharing.context_weight
    )
    forks = [f for s, n in zip(seqs, grants, strict=True) if n for f in s.followers if s.fed == len(s.req.prompt) - 1]
    for seq, n in zip(seqs, grants, strict=True):
        if n and seq.phase is Phase.PREFILL:
            chunk(st, worker, draft, seq, n)
    for seq in forks:  # their leader's prefill is theirs now: each computes the prompt's last token
        if draft.budget and seq.phase is Phase.PREFILL:
            chunk(st, worker, draft, seq, 1)


def _work(seq: Seq, *, fresh: bool = False) -> Work:
    end = len(seq.req.prompt) - 1 if seq.followers else seq.total
    return Work(max(1, end - seq.fed), seq.fed, fresh)
