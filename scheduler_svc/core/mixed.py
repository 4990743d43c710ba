"""Prefill beside decode: how many tokens of a frame prefills get, how they share them, and who may join.

The step is to take no longer than `itl_factor` times its decode rows alone, and never longer than `step_ms`; a lone
prefill takes what `step_ms` allows. Beside few rows that would leave prefill only steps that read all weights for a few
tokens, and the waiting could never become a batch: `prefill_floor` times the cost of reading them is allowed always.
A waiting choice joins when it would get tokens now: because what is left of shorter prefills leaves some, or because it
is older than every prefill that runs.

Shortest first alone starves: on a slow machine, where the decode rows fill `step_ms` by themselves, a middling prompt
was passed for minutes by short ones that kept coming. So the oldest prefill becomes late: `late_ms` after its request
came, or once it has waited as long as its share of the steps should have taken, if that is longer; a resumed one, whose
client is reading, as soon as it could have been done alone. Beside a late one steps may take the whole of `itl_factor`,
and `late_share` of their prefill tokens are its: prompts are through in the order of their coming, at no less than that
share of the pace.
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


def target_ns(st: State, cost: CostModel, rows: int, row_context: int, *, late: bool = False) -> float:
    """How long a step with these decode rows may take. `late`: a prefill waits that should be through."""
    limits = st.limits
    most = limits.step_ms * MS
    if not rows:
        return float(most)
    alone = cost.alone(rows, row_context)
    doubt = 1 + _MARGIN + min(cost.error, 0.2)
    wanted = max(limits.itl_factor * alone, limits.prefill_floor * cost.fixed) / doubt
    return min(max(wanted, limits.itl_floor_ms * MS), max(most, (limits.itl_factor if late else 1.25) * alone))


@dataclass(slots=True, eq=False)
class Sharing:
    """The prefill part of one frame. `tokens`: its cost limit, in prefill tokens at no context; `room`: real ones."""

    tokens: float
    room: int
    context_weight: float
    late: bool = False  # the oldest of them
    running: list[tuple[float, float, tuple[int, int, int]]] = field(default_factory=list)  # rank, cost left, key
    fresh: int = 0  # tokens promised to those placed in this frame

    def open(self) -> bool:
        """Whether the frame can take one more prefill at all."""
        if not self.fresh:
            return self.room > 0
        return self.fresh + GRAIN <= min(self.tokens, self.room)  # whoever is placed gets some, in whatever order

    def has_tokens_for(self, seq: Seq, start: int) -> bool:
        """Whether this waiting choice would get some, were it placed with `start` tokens cached."""
        rank = Work(seq.total - start, start, resumed=_is_resumed(seq)).rank(self.context_weight)
        if sum(cost for r, cost, _ in self.running if r <= rank) < self.tokens:
            return True
        return all(seq.key < key for _, _, key in self.running)

    def placed(self, seq: Seq) -> None:
        self.fresh += min(GRAIN, _work(seq).remaining)
        self.note(seq)

    def note(self, seq: Seq) -> None:
        """One more prefill that wants tokens."""
        work = _work(seq)
        self.running.append((work.rank(self.context_weight), work.cost(self.context_weight), seq.key))


def share_of(st: State, worker: Worker, draft: Draft) -> Sharing:
    """What this frame leaves to prefills, beside the decode rows it holds."""
    rows, row_context = decode_load(draft)
    running = prefilling(worker)
    if not len(st.queue) and not running:
        return Sharing(0.0, 0, 0.0)
    cost = worker.cost
    room = min(draft.budget, cost.most_chunk)
    late = bool(running) and _is_late(st, cost, running[0])
    tokens = cost.chunk_for(rows, row_context, target_ns(st, cost, rows, row_context, late=late), _DEEP * room)
    if not cost.steps:  # after a restart readers wait: the first step is theirs, whatever it takes to compute others'
        readers = sum(min(_work(seq).remaining, GRAIN) for seq in running if _is_resumed(seq))
        tokens = min(tokens, readers) if readers else tokens
    sharing = Sharing(float(max(tokens, GRAIN)), room, cost.context_weight, late)
    for seq in running:
        sharing.note(seq)
    if rows and running and min(left for _, left, _ in sharing.running) > _GIANT * sharing.tokens and not len(st.queue):
        sharing.tokens = max(float(GRAIN), _GIANTS_PART * sharing.tokens)
    return sharing


def chunk_rows(st: State, worker: Worker, draft: Draft, sharing: Sharing) -> None:
    """Give the running prefills, those placed in this frame included, their tokens."""
    seqs = prefilling(worker)
    works = [_work(s, fresh=s.planned_step == draft.step) for s in seqs]
    share = st.limits.late_share if sharing.late else st.limits.prefill_share
    grants = split(sharing.tokens, sharing.room, works, share=share, context_weight=sharing.context_weight)
    forks = [f for s, n in zip(seqs, grants, strict=True) if n for f in s.followers if s.fed == len(s.req.prompt) - 1]
    for seq, n in zip(seqs, grants, strict=True):
        if n and seq.phase is Phase.PREFILL:
            chunk(st, worker, draft, seq, n)
    for seq in forks:  # their leader's prefill is theirs now: each computes the prompt's last token
        if draft.budget and seq.phase is Phase.PREFILL:
            chunk(st, worker, draft, seq, 1)


def _work(seq: Seq, *, fresh: bool = False) -> Work:
    end = len(seq.req.prompt) - 1 if seq.followers else seq.total
    return Work(max(1, end - seq.fed), seq.fed, fresh, _is_resumed(seq))


def _is_resumed(seq: Seq) -> bool:
    """It has emitted ids and lost its place: its client is in the middle of the answer."""
    return seq.n_emitted > 0


def _is_late(st: State, cost: CostModel, oldest: Seq) -> bool:
    """Whether the oldest prefill should be through."""
    limits, waited = st.limits, st.now - oldest.req.submitted_ns
    alone = Work(oldest.total - oldest.cached, oldest.cached).cost(cost.context_weight) * cost.token_ns
    if _is_resumed(oldest):
        return waited > alone
    return waited > max(limits.late_ms * MS, alone / limits.prefill_share)
