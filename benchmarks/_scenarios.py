"""Ways to compute the same logits: one chunk, token by token, random chunks, resumed, replayed, verified, mixed.

Each scenario drives one model over freshly poisoned pools (NaN wherever nothing was written) and returns the logits
of every position with that position, so that parity and repeatability checks can compare them with anything.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from meshkit.types import PAGE_TOKENS
from worker_svc.checkpoint.loader import Checkpoint
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.kv.layout import KvLayout
from worker_svc.kv.pools import KvPools
from worker_svc.model.step import ForwardInputs, Row
from worker_svc.model.transformer import V4Transformer
from worker_svc.model.weights import ModelBuilder
from worker_svc.solo import pages_for

MAX_CONTEXT = 2048
SLOTS, PAGES, TAILS = 4, 24, 4


@dataclass(frozen=True, slots=True)
class Piece:
    """Logits [n, V] of positions first.. of sequence number `of`."""

    of: int
    first: int
    logits: Tensor


Scenario = Callable[["Rig", list[Tensor]], Iterator[Piece]]


class Rig:
    """One model over small pools, fed rows of known sequences."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        numerics: Numerics | None = None,
        deterministic: bool = False,
        max_verify: int = 8,
    ) -> None:
        layout = KvLayout(config=checkpoint.config, numerics=numerics or Numerics(), max_verify=max_verify)
        self.max_verify = max_verify
        self.pools = KvPools(layout, slots=SLOTS, pages=PAGES, tails=TAILS)
        self.builder = ModelBuilder(checkpoint, layout, max_context=MAX_CONTEXT, deterministic=deterministic)
        self.model: V4Transformer = self.builder.transformer(self.pools)

    @torch.inference_mode()
    def forward(self, *parts: tuple[Tensor, Row]) -> list[Tensor]:
        """Run one batch of (ids of the row, row); logits of each row's sampled positions."""
        inputs = ForwardInputs(torch.cat([ids for ids, _ in parts]), tuple(row for _, row in parts))
        sizes = [row.num_samples for _, row in parts]
        logits: tuple[Tensor, ...] = torch.split(self.model.forward(inputs), sizes)
        return list(logits)

    def feed(self, ids: Tensor, slot: int, start: int, end: int, pages: list[int], **options: object) -> Tensor:
        """Run positions start..end-1 of one sequence alone; logits of all of them."""
        row = full_row(slot, start, end, pages, **options)
        return self.forward((ids[start:end], row))[0]

    def forget(self, *, pages: bool = True) -> None:
        """Poison the rings, states and boundary marks; with `pages`, everything."""
        if pages:
            self.pools.poison()
            return
        for layer in self.pools.layers:
            layer.window.poison()
            if layer.states is not None:
                layer.states.fill_(torch.nan)
        self.pools.streams[self.pools.tails :] = torch.nan


def full_row(slot: int, start: int, end: int, pages: list[int], **options: object) -> Row:
    """A row whose logits are wanted at every position."""
    return Row(slot=slot, start=start, length=end - start, pages=pages, num_samples=end - start, **options)  # type: ignore[arg-type]


def cuts(total: int, longest: int, rng: Random, start: int = 0) -> Iterator[tuple[int, int]]:
    """Random consecutive ranges of 1..longest positions from start to total."""
    while start < total:
        end = min(total, start + rng.randint(1, longest))
        yield start, end
        start = end


def prefill(rig: Rig, sequences: list[Tensor]) -> Iterator[Piece]:
    """The whole sequence as one chunk."""
    ids = sequences[0]
    yield Piece(0, 0, rig.feed(ids, 0, 0, len(ids), pages_for(len(ids), 3)))


def token_by_token(rig: Rig, sequences: list[Tensor]) -> Iterator[Piece]:
    """Every token as a decode row."""
    ids = sequences[0]
    pages = pages_for(len(ids))[::-1]
    for position in range(len(ids)):
        yield Piece(0, position, rig.feed(ids, 1, position, position + 1, pages))


def random_chunks(longest: int, seed: int) -> Scenario:
    """Chunks of 1..longest tokens at arbitrary boundaries."""

    def scenario(rig: Rig, sequences: list[Tensor]) -> Iterator[Piece]:
        ids = sequences[0]
        pages = pages_for(len(ids), 5)
        for start, end in cuts(len(ids), longest, Random(seed)):
            yield Piece(0, start, rig.feed(ids, 2, start, end, pages))

    return scenario


def resume_from_tail(rig: Rig, sequences: list[Tensor]) -> Iterator[Piece]:
    """Save a tail at 256 inside a chunk that crosses it, lose everything but pages and tail, go on in another slot."""
    ids, cut = sequences[0], PAGE_TOKENS
    shared = pages_for(len(ids), 2)
    rig.feed(ids, 0, 0, cut - 3, shared)
    rig.feed(ids, 0, cut - 3, min(cut + 40, len(ids)), shared, saves=((cut, 1),))
    rig.forget(pages=False)
    rig.pools.load_tail(3, cut, 1)
    pages = shared[:1] + pages_for(len(ids), 9)[: len(shared) - 1]
    for start, end in cuts(len(ids), 90, Random(5), cut):
        yield Piece(0, start, rig.feed(ids, 3, start, end, pages))


def resume_from_refresh(rig: Rig, sequences: list[Tensor]) -> Iterator[Piece]:
    """Cross 256 in decode, fill a tail from the ring afterwards, resume elsewhere."""
    ids, cut = sequences[0], PAGE_TOKENS
    shared = pages_for(len(ids), 2)
    rig.feed(ids, 0, 0, cut - 6, shared)
    for position in range(cut - 6, cut):
        rig.feed(ids, 0, position, position + 1, shared)
    rig.pools.refresh_tail(0, cut, 2)
    rig.forget(pages=False)
    rig.pools.load_tail(1, cut, 2)
    pages = shared[:1] + pages_for(len(ids), 9)[: len(shared) - 1]
    yield Piece(0, cut, rig.feed(ids, 1, cut, len(ids), pages))


def exact_replay(missing: int = 0) -> Scenario:
    """Keep the pages below a boundary, lose the rest, replay 128 + 127 (L - 1) tokens and go on.

    `missing` shortens the replay: then it is wrong, which shows that the check can fail.
    """

    def scenario(rig: Rig, sequences: list[Tensor]) -> Iterator[Piece]:
        ids = sequences[0]
        layout = rig.pools.layout
        need = layout.window + (layout.window - 1) * (len(layout.ratios) - 1)
        write_from = (len(ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
        begin = max(0, write_from - need) + missing
        kept = pages_for(len(ids))
        rig.feed(ids, 0, 0, write_from, kept)
        rig.forget(pages=False)
        pages = kept[: write_from // PAGE_TOKENS] + pages_for(PAGE_TOKENS, 15)
        for start, end in cuts(len(ids), 300, Random(6), begin):
            logits = rig.feed(ids, 2, start, end, pages, write_from=write_from, fresh_from=begin)
            if end > write_from:
                first = max(start, write_from)
                yield Piece(0, first, logits[first - start :])

    return scenario


def verify_rows(rig: Rig, sequences: list[Tensor]) -> Iterator[Piece]:
    """Rows of up to max_verify tokens of which a random number is right; the rest must leave no trace."""
    ids, rng = sequences[0], Random(7)
    pages = pages_for(len(ids) + rig.max_verify)
    start = 100
    yield Piece(0, 0, rig.feed(ids, 0, 0, start, pages))
    while start < len(ids):
        # Full rows of which one token stays are what the rings must be large enough for.
        size = min(rng.choice((rig.max_verify, rng.randint(1, rig.max_verify))), len(ids) - start)
        right = rng.choice((1, rng.randint(1, size)))
        fed = ids[start : start + size].clone()
        fed[right:] = (fed[right:] + 1) % 97  # garbage drafts
        row = full_row(0, start, start + size, pages)
        yield Piece(0, start, rig.forward((fed, row))[0][:right])
        start += right


def mixed_batch(rig: Rig, sequences: list[Tensor]) -> Iterator[Piece]:
    """Three sequences in every batch: decode rows, short and long chunks side by side."""
    assert len(sequences) >= 3
    rng, at = Random(8), [0, 0, 0]
    pages = [pages_for(len(ids), 4 + 5 * number) for number, ids in enumerate(sequences[:3])]
    while any(at[number] < len(sequences[number]) for number in range(3)):
        parts, named = [], []
        for number in rng.sample(range(3), 3):
            ids, start = sequences[number], at[number]
            end = min(len(ids), start + rng.choice((1, 1, 3, 40, 150)))
            if end > start:
                parts.append((ids[start:end], full_row(number, start, end, pages[number])))
                named.append((number, start))
                at[number] = end
        for (number, start), logits in zip(named, rig.forward(*parts)):
            yield Piece(number, start, logits)


SCENARIOS: dict[str, Scenario] = {
    "prefill": prefill,
    "token_by_token": token_by_token,
    "random_chunks_3": random_chunks(3, 1),
    "random_chunks_39": random_chunks(39, 2),
    "random_chunks_139": random_chunks(139, 3),
    "resume_from_tail": resume_from_tail,
    "resume_from_refresh": resume_from_refresh,
    "verify_rows": verify_rows,
    "mixed_batch": mixed_batch,
}
"""What runs on sequences of any length; `exact_replay` needs more tokens than one replay takes."""
