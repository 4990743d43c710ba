"""One executor driven by hand, without scheduler or wire: for tests, benchmarks and tuning.

A `Sequence` plans the rows that a scheduler would send for one choice; `generate` runs one to its end. Not used by
the serving path, which has its slot machine for this.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshkit.types import PAGE_TOKENS, SamplingParams, TokenLogprobs
from worker_svc.core.work import RowOutcome, RowWork, SlotInit, StepWork
from worker_svc.executor import CpuExecutor


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One choice in a slot with its pages: its ids, how far they are computed, and what was drawn.

    `computed` starts above zero where a tail was loaded, or with fresh_from and write_from for an exact replay.
    """

    slot: int
    pages: list[int]
    ids: list[int]
    params: SamplingParams
    seed: int
    choice: int = 0
    computed: int = 0
    write_from: int = 0
    fresh_from: int = 0
    drawn: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def init(self) -> SlotInit:
        """The order that starts the slot."""
        p = self.params
        return SlotInit(
            slot=self.slot,
            params=p,
            seed=self.seed,
            choice=self.choice,
            n_emitted=len(self.drawn),
            emitted=tuple(self.drawn) if p.reads_output else (),
            prompt=tuple(self.ids) if p.reads_prompt else (),
        )

    @property
    def finished(self) -> bool:
        """True once max_tokens were drawn; stop ids are not looked at."""
        return len(self.drawn) >= self.params.max_tokens

    def row(self, most: int) -> RowWork:
        """The next row, of at most `most` ids: a chunk of the prompt, or the token drawn last."""
        end = min(self.computed + most, len(self.ids))
        return RowWork(
            slot=self.slot,
            start=self.computed,
            ids=tuple(self.ids[self.computed : end]),
            pages=self.pages,
            write_from=self.write_from,
            fresh_from=self.fresh_from,
            sample_last=int(end == len(self.ids)),
            out_pos=len(self.drawn),
        )

    def verify_row(self, drafts: tuple[int, ...]) -> RowWork:
        """The token drawn last and drafts behind it, each of which is sampled at."""
        assert self.computed == len(self.ids) - 1, "drafts follow a drawn token"
        return RowWork(
            slot=self.slot,
            start=self.computed,
            ids=(self.ids[-1], *drafts),
            pages=self.pages,
            write_from=self.write_from,
            fresh_from=self.fresh_from,
            sample_last=1 + len(drafts),
            out_pos=len(self.drawn),
        )

    def book(self, row: RowWork, outcome: RowOutcome) -> None:
        """Take what the row came to: ids behind the last accepted one were rejected drafts."""
        self.computed = row.start + len(row.ids) - row.sample_last + len(outcome.tokens)
        self.ids.extend(outcome.tokens)
        self.drawn.extend(outcome.tokens)
        self.logprobs.extend(outcome.logprobs)


def pages_for(tokens: int, first: int = 0) -> list[int]:
    """Enough consecutive page numbers for `tokens` tokens."""
    return list(range(first, first - (-tokens // PAGE_TOKENS)))


def steps(executor: CpuExecutor, sequence: Sequence, *, chunk: int = 512) -> Iterator[Sequence]:
    """Run one sequence alone, step by step; yields it after each."""
    inits: tuple[SlotInit, ...] = (sequence.init(),)
    while not sequence.finished:
        row = sequence.row(chunk)
        outcome = executor.run(StepWork(inits=inits, rows=(row,)))
        sequence.book(row, outcome.rows[0])
        inits = ()
        yield sequence


def generate(
    executor: CpuExecutor, prompt: list[int], params: SamplingParams, seed: int, *, chunk: int = 512
) -> Sequence:
    """Run one choice in slot 0 over the first pages until max_tokens were drawn."""
    pages = pages_for(len(prompt) + params.max_tokens)
    sequence = Sequence(slot=0, pages=pages, ids=list(prompt), params=params, seed=seed)
    for _ in steps(executor, sequence, chunk=chunk):
        continue
    return sequence
