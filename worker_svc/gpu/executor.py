"""The device side of a worker on a GPU: launches steps behind one another and never waits for them.

Decode rows run as one captured graph per batch bucket; rows whose ids the host has (chunks) run as a second part of the
step. Next tokens, lengths and ends live on the device, so step t + 1 is launched while step t runs. `collect` waits.
"""
# mypy: disallow-untyped-calls=False

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshkit.types import PAGE_TOKENS, ModelInfo
from worker_svc.core.work import GRAMMAR_FAILED, SAMPLING_FAULT, Fault, RowOutcome, RowWork, StepOutcome, StepWork
from worker_svc.gpu.graphs import DecodeGraphs, buckets
from worker_svc.gpu.logits import LogitEdits, LogprobsAsked
from worker_svc.gpu.pools import GpuPools
from worker_svc.gpu.send import send
from worker_svc.gpu.slots import DeviceSlots
from worker_svc.gpu.step import ChunkRow, chunk_step
from worker_svc.gpu.transformer import Transformer
from worker_svc.masks.source import MaskSource
from worker_svc.ops.sample import Params, sample
from worker_svc.ops.slot_step import SAMPLER_FIELDS, Field, StepRows, end_step
from worker_svc.sampling import VocabRules

_FAULTS = {1: "the model's logits held NaN", 2: "no token was allowed"}


@dataclass(slots=True)
class _Part:
    """Rows of a step that ran together: their places in the work, their tokens on the way to the host."""

    places: list[int]
    tokens: Tensor
    logprobs: LogprobsAsked | None = None


@dataclass(slots=True)
class Flight:
    """A launched step."""

    work: StepWork
    parts: list[_Part]
    failed: frozenset[int]  # places of rows of slots that asked for what this executor cannot do
    done: Any  # torch.cuda.Event, or None where everything is through
    t_start_ns: int


class GpuExecutor:
    """Implements `worker_svc.core.work.Executor`."""

    def __init__(
        self,
        *,
        model: Transformer,
        pools: GpuPools,
        info: ModelInfo,
        rules: VocabRules,
        max_rows: int,
        graphs: bool = True,
    ) -> None:
        self.model, self.pools, self.info, self.rules = model, pools, info, rules
        self.device, self.sampling_faults = pools.device, 0
        pages = -(-info.max_context // PAGE_TOKENS)
        self.slots = DeviceSlots(pools.slots, pages + 1, self.device)
        self.edits = LogitEdits(rules, self.device)
        self.graphs = DecodeGraphs(model, pools, self.slots.tables, self._draw, on=graphs)
        self.buckets = buckets(max_rows)
        self._constrained: set[int] = set()
        self._last_rows: dict[int, list[int]] = {}
        self._ended_ns = 0

    def use_masks(self, masks: MaskSource) -> None:
        """Not used: rows of slots with a grammar fail, saying so."""

    def capture(self) -> None:
        """Make all graphs now, the largest first, so that serving captures nothing."""
        with torch.inference_mode():
            for size in reversed(self.buckets):
                self.graphs.bucket(size)

    @torch.inference_mode()
    def launch(self, work: StepWork) -> Flight:
        """Queue one step on the device. An exception means that it did not happen."""
        started = time.monotonic_ns()
        self._prepare(work)
        parts, failed = [], [place for place, row in enumerate(work.rows) if row.slot in self._constrained]
        decodes = [place for place, row in enumerate(work.rows) if not row.ids and place not in failed]
        chunks = [place for place, row in enumerate(work.rows) if row.ids and place not in failed]
        for first in range(0, len(decodes), self.buckets[-1]):
            parts.append(self._decode(work, decodes[first : first + self.buckets[-1]]))
        if chunks:
            parts.append(self._chunks(work, chunks))
        return Flight(work, parts, frozenset(failed), self._record(), started)

    def collect(self, handle: Flight) -> StepOutcome:
        """Wait for a launched step."""
        if handle.done is not None:
            handle.done.synchronize()
        outcomes = [RowOutcome(())] * len(handle.work.rows)
        for place in handle.failed:
            outcomes[place] = RowOutcome((), fault=Fault(GRAMMAR_FAILED, "this backend applies no grammar masks"))
        for part in handle.parts:
            for number, (place, token) in enumerate(zip(part.places, part.tokens.tolist())):
                outcomes[place] = self._outcome(part, number, token)
        start, end = max(handle.t_start_ns, self._ended_ns), time.monotonic_ns()
        self._ended_ns = end
        return StepOutcome(rows=tuple(outcomes), t_start_ns=start, t_end_ns=end)

    def run(self, work: StepWork) -> StepOutcome:
        """One step, start to end: for tests and warm-up."""
        return self.collect(self.launch(work))

    def _outcome(self, part: _Part, number: int, token: int) -> RowOutcome:
        if token == -1:
            return RowOutcome(())
        if token < -1:
            self.sampling_faults += 1
            return RowOutcome((), fault=Fault(SAMPLING_FAULT, _FAULTS[-1 - token]))
        logprobs = part.logprobs.of_row(number) if part.logprobs is not None else ()
        return RowOutcome((token,), logprobs)

    # Before the forward

    def _prepare(self, work: StepWork) -> None:
        for row in work.rows:
            if row.sample_last > 1:
                raise ValueError(f"slot {row.slot}: this backend verifies no drafts, sample_last is {row.sample_last}")
        if work.inits:
            self.slots.init(work.inits)
            for init in work.inits:
                self.edits.init(init)
                (self._constrained.add if init.grammar_id else self._constrained.discard)(init.slot)
        for copy in work.copies:
            self.slots.copy(copy.src, copy.dst)
            self.pools.copy_slot(copy.src, copy.dst)
            if copy.src_page >= 0:
                self.pools.copy_page(copy.src_page, copy.dst_page)
        for load in work.tail_loads:
            self.pools.load_tail(load.slot, load.pos, load.tail)
        self.slots.take_pages(work.rows)
        self.slots.set_bounds([row for row in work.rows if row.ids])

    # The two parts of a step

    def _decode(self, work: StepWork, places: list[int]) -> _Part:
        rows = [work.rows[place] for place in places]
        size = next(size for size in self.buckets if size >= len(rows))
        bucket = self.graphs.bucket(size)
        numbers = [row.slot for row in rows] + [-1] * (size - len(rows))
        if self._last_rows.get(size) != numbers:
            bucket.rows.copy_(send(self.device, numbers)[0])
            self._last_rows[size] = numbers
        self.graphs.forward(bucket)
        edited = self.edits.wanted(rows)
        asked = self.edits.logprobs(rows, bucket.logits) if edited else None
        if edited:
            self.edits.apply(rows, bucket.logits, self.slots.tables.fields)
        self.graphs.sample(bucket)
        if edited:
            self.edits.accept(rows, bucket.tokens)
        for number, row in enumerate(rows):
            self.slots.moved(row.slot, self.slots.length(row.slot) + 1, on_device=True)
            self._refresh(row, bucket.streams[number])
        return _Part(places, self._home(bucket.tokens), asked and asked.home(bucket.tokens))

    def _chunks(self, work: StepWork, places: list[int]) -> _Part:
        """Rows with ids, sampling ones first among the outputs."""
        rows = [work.rows[place] for place in places]
        saves: dict[int, list[tuple[int, int]]] = {}
        for save in work.saves:
            saves.setdefault(save.slot, []).append((save.pos, save.tail))
        chunk_rows = [_chunk_row(row, tuple(saves.get(row.slot, ()))) for row in rows]
        ends = [sum(len(row.ids) for row in rows[: number + 1]) - 1 for number in range(len(rows))]
        sampling = [number for number, row in enumerate(rows) if row.sample_last]
        ids = [token for row in rows for token in row.ids]
        step = chunk_step(ids, chunk_rows, [ends[number] for number in sampling], self.slots.tables, self.pools)
        logits, streams = self.model.forward(step)
        for chunk in step.state_saves:
            self.pools.streams[chunk.tail] = streams[chunk.last_token]
        for row in rows:
            self.slots.moved(row.slot, row.start + len(row.ids), on_device=bool(row.sample_last))
        if not sampling:
            return _Part([], torch.empty(0, dtype=torch.int32))
        part = self._sample_chunks([rows[number] for number in sampling], logits)
        part.places = [places[number] for number in sampling]
        for number in sampling:
            self._refresh(rows[number], streams[ends[number]])
        return part

    def _sample_chunks(self, rows: Sequence[RowWork], logits: Tensor) -> _Part:
        columns = (
            [row.slot for row in rows],
            [row.start + len(row.ids) - 1 for row in rows],
            [row.ids[-1] for row in rows],
        )
        at = StepRows(*send(self.device, *columns))
        drawn, faults, tokens = (torch.empty_like(at.slots) for _ in range(3))
        edited = self.edits.wanted(rows)
        asked = self.edits.logprobs(rows, logits) if edited else None
        if edited:
            self.edits.apply(rows, logits, self.slots.tables.fields)
        self._draw(logits, at, drawn, faults)
        end_step(at, drawn, faults, self.slots.tables.fields, tokens)
        if edited:
            self.edits.accept(rows, tokens)
        return _Part([], self._home(tokens), asked and asked.home(tokens))

    def _draw(self, logits: Tensor, at: StepRows, tokens: Tensor, faults: Tensor) -> None:
        fields = self.slots.tables.fields[:SAMPLER_FIELDS].index_select(1, at.slots)
        params = Params(
            temperature=fields[Field.TEMPERATURE].view(torch.float32),
            top_k=fields[Field.TOP_K],
            top_p=fields[Field.TOP_P].view(torch.float32),
            min_p=fields[Field.MIN_P].view(torch.float32),
            seed_low=fields[Field.SEED_LOW],
            seed_high=fields[Field.SEED_HIGH],
            choice=fields[Field.CHOICE],
            position=fields[Field.EMITTED],
        )
        sample(logits, params, tokens, faults, never=self.edits.never)

    def _refresh(self, row: RowWork, streams: Tensor) -> None:
        """The row's spare tail takes the state at a page boundary, unless the slot has ended there."""
        pos = self.slots.length(row.slot)
        if row.spare >= 0 and pos > 0 and pos % PAGE_TOKENS == 0:
            alive = self.slots.tables.fields[Field.FINISHED, row.slot] == 0
            self.pools.refresh_tail(row.slot, pos, row.spare, streams, alive)

    # Home

    def _home(self, tensor: Tensor) -> Tensor:
        """A host copy that is filled when the step's event has come."""
        if self.device.type != "cuda":
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def _record(self) -> Any:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def _chunk_row(row: RowWork, saves: tuple[tuple[int, int], ...]) -> ChunkRow:
    for pos, tail in saves:
        if row.fresh_from and pos < row.write_from:
            raise ValueError(
                f"tail {tail} of slot {row.slot} at {pos}: a replay is exact only from {row.write_from} on"
            )
    return ChunkRow(
        slot=row.slot, start=row.start, length=len(row.ids), pages=row.pages, fresh_from=row.fresh_from, saves=saves
    )
