"""The device side of a worker on a GPU: launches steps behind one another and never waits for them.

Decode rows run as one captured graph per batch bucket; rows whose ids the host has (chunks) run as a second part of the
step. Next tokens, lengths and ends live on the device, so step t + 1 is launched while step t runs. `collect` waits.
"""
# mypy: disallow-untyped-calls=False

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshkit.types import PAGE_TOKENS, ModelInfo
from worker_svc.core.work import SAMPLING_FAULT, Fault, RowOutcome, RowWork, StepOutcome, StepWork
from worker_svc.gpu.chunk_graphs import ChunkGraphs
from worker_svc.gpu.constrained import EVERYTHING, ConstrainedSlots, Masked
from worker_svc.gpu.graphs import Batch, DecodeGraphs, buckets
from worker_svc.gpu.logits import LogitEdits, LogprobsAsked
from worker_svc.gpu.pools import GpuPools
from worker_svc.gpu.send import send
from worker_svc.gpu.slots import DeviceSlots
from worker_svc.gpu.step import ChunkRow, chunk_step
from worker_svc.gpu.transformer import Boundary, Transformer
from worker_svc.kernel_cache import CompileWatch
from worker_svc.masks.source import MaskSource
from worker_svc.ops.sample import Params, sample
from worker_svc.ops.slot_step import SAMPLER_FIELDS, Field, StepRows, end_step
from worker_svc.sampling import VocabRules

_WATCH_EVERY_NS = 1_000_000_000
_FAULTS = {1: "the model's logits held NaN", 2: "no token was allowed"}


@dataclass(slots=True)
class _Part:
    """Rows of a step that ran together: their places in the work, their tokens on the way to the host."""

    places: list[int]
    tokens: Tensor
    logprobs: LogprobsAsked | None = None
    failed: dict[int, Fault] = field(default_factory=dict)  # by number in the part: no mask will ever come


@dataclass(frozen=True, slots=True)
class _Begun:
    """Chunks of a step before anything else of it: ids int32 [T] of all rows; on the device, and the first layer's
    input made of them, where no graph does that."""

    ids: npt.NDArray[np.int32]
    rows: list[ChunkRow]
    embedded: tuple[Tensor, Boundary] | None = None


@dataclass(slots=True)
class Flight:
    """A launched step."""

    work: StepWork
    parts: list[_Part]
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
        self.chunk_graphs = ChunkGraphs(model, pools, self.slots.tables, on=graphs)
        self.buckets = buckets(max_rows)
        self._constrained = ConstrainedSlots(self.device)
        self._last_rows: dict[int, list[int]] = {}
        self._ended_ns, self._step_s = 0, 0.0
        self._watch: CompileWatch | None = None
        self._watched_ns = 0

    def use_masks(self, masks: MaskSource) -> None:
        """Where the masks of constrained slots come from; before the first step."""
        self._constrained.use(masks)

    def watch(self, compiles: CompileWatch) -> None:
        """From here on everything is compiled: what appears in the caches is reported with the steps."""
        compiles.ready()
        self._watch = compiles

    @torch.inference_mode()
    def warm_masks(self, counts: Sequence[int]) -> None:
        """Draw once under masks with so many rows each: no step in front of serving has any."""
        vocab = self.info.vocab_size
        for rows in counts:
            at = StepRows.empty(rows, self.device)
            at.slots.fill_(self.pools.slots)  # the scratch slot
            tokens, faults = (torch.empty_like(at.slots) for _ in range(2))
            masks = torch.full((rows, -(-vocab // 32)), EVERYTHING, dtype=torch.int32, device=self.device)
            self._draw(torch.zeros(rows, vocab, device=self.device), at, tokens, faults, masks)

    def capture(self) -> None:
        """Make all graphs now, the largest first, so that serving captures nothing."""
        with torch.inference_mode():
            for size in reversed(self.buckets):
                self.graphs.bucket(size)
            self.chunk_graphs.capture()

    @torch.inference_mode()
    def launch(self, work: StepWork) -> Flight:
        """Queue one step on the device. An exception means that it did not happen."""
        started = time.monotonic_ns()
        decodes = [place for place, row in enumerate(work.rows) if not row.ids]
        chunks = [place for place, row in enumerate(work.rows) if row.ids]
        begun = self._begin(work, chunks) if chunks else None
        self._prepare(work)
        most = self.buckets[-1]
        samplings = [self._decode(work, decodes[first : first + most]) for first in range(0, len(decodes), most)]
        if begun is not None:
            samplings.append(self._chunks(work, chunks, begun))
        if self._constrained.any(work.rows):
            self._constrained.tell()
        parts = [sampling() for sampling in samplings]
        flight = Flight(work, parts, self._record(), started)
        self._constrained.launched(work.rows, lambda: self._outcomes(flight))
        return flight

    def collect(self, handle: Flight) -> StepOutcome:
        """Wait for a launched step."""
        outcomes = self._outcomes(handle)
        start, end = max(handle.t_start_ns, self._ended_ns), time.monotonic_ns()
        self._ended_ns, self._step_s = end, (end - start) / 1e9
        self.sampling_faults += sum(o.fault is not None and o.fault.code == SAMPLING_FAULT for o in outcomes)
        return StepOutcome(rows=tuple(outcomes), t_start_ns=start, t_end_ns=end, jit_compiles=self._compiles_since(end))

    def _outcomes(self, flight: Flight) -> list[RowOutcome]:
        """Of every row, once the device has done it; any thread may ask."""
        if flight.done is not None:
            flight.done.synchronize()
        outcomes = [RowOutcome(())] * len(flight.work.rows)
        for part in flight.parts:
            for number, (place, token) in enumerate(zip(part.places, part.tokens.tolist())):
                outcomes[place] = _outcome(part, number, token)
        return outcomes

    def _compiles_since(self, now_ns: int) -> int:
        """Kernels compiled since last asked, asked once a second."""
        if self._watch is None or now_ns - self._watched_ns < _WATCH_EVERY_NS:
            return 0
        self._watched_ns = now_ns
        return self._watch.new()

    def run(self, work: StepWork) -> StepOutcome:
        """One step, start to end: for tests and warm-up."""
        return self.collect(self.launch(work))

    # Before the forward

    def _begin(self, work: StepWork, places: list[int]) -> _Begun:
        """Chunks' ids go to the device first of all and are embedded while the host lays out the rest; where a graph
        runs, it does that."""
        saves: dict[int, list[tuple[int, int]]] = {}
        for save in work.saves:
            saves.setdefault(save.slot, []).append((save.pos, save.tail))
        rows = [work.rows[place] for place in places]
        ids = np.concatenate([np.array(row.ids, dtype=np.int32) for row in rows])
        chunks = [_chunk_row(row, tuple(saves.get(row.slot, ()))) for row in rows]
        if self.chunk_graphs.on and self.chunk_graphs.fits(chunks):
            return _Begun(ids, chunks)
        (sent,) = send(self.device, ids)
        return _Begun(ids, chunks, (sent, self.model.begin(sent)))

    def _prepare(self, work: StepWork) -> None:
        for row in work.rows:
            if row.sample_last > 1:
                raise ValueError(f"slot {row.slot}: this backend verifies no drafts, sample_last is {row.sample_last}")
        self._constrained.begin(work.inits)
        if work.inits:
            self.slots.init(work.inits)
            for init in work.inits:
                self.edits.init(init)
        for copy in work.copies:
            self.slots.copy(copy.src, copy.dst)
            self.pools.copy_slot(copy.src, copy.dst)
            if copy.src_page >= 0:
                self.pools.copy_page(copy.src_page, copy.dst_page)
        for load in work.tail_loads:
            self.pools.load_tail(load.slot, load.pos, load.tail)
        self.slots.take_pages(work.rows)
        self.slots.set_bounds([row for row in work.rows if row.ids])

    # The two parts of a step: each queues its forward and returns what is to be done when masks have come

    def _decode(self, work: StepWork, places: list[int]) -> Callable[[], _Part]:
        rows = [work.rows[place] for place in places]
        size = next(size for size in self.buckets if size >= len(rows))
        bucket = self.graphs.bucket(size)
        numbers = [row.slot for row in rows] + [-1] * (size - len(rows))
        if self._last_rows.get(size) != numbers:
            bucket.rows.copy_(send(self.device, numbers)[0])
            self._last_rows[size] = numbers
        self.graphs.forward(bucket)

        def sampling() -> _Part:
            part, parked = self._sample(work, places, bucket, lambda: self.graphs.sample(bucket))
            for number, row in enumerate(rows):
                if number not in parked:
                    self.slots.moved(row.slot, self.slots.length(row.slot) + 1, on_device=True)
                    self._refresh(row, bucket.streams[number])
            return part

        return sampling

    def _chunks(self, work: StepWork, places: list[int], begun: _Begun) -> Callable[[], _Part]:
        rows = [work.rows[place] for place in places]
        ends = (np.cumsum([len(row.ids) for row in rows]) - 1).tolist()
        sampling_rows = [number for number, row in enumerate(rows) if row.sample_last]
        sampled = [ends[number] for number in sampling_rows]
        if begun.embedded is None:
            logits, streams = self.chunk_graphs.forward(begun.ids, begun.rows, sampled)
        else:
            ids, edge = begun.embedded
            step = chunk_step(ids, begun.rows, sampled, self.slots.tables, self.pools)
            logits, streams = self.model.forward(step, edge)
            for save in step.state_saves:
                self.pools.streams[save.tail] = streams[save.last_token]
        for row in rows:
            self.slots.moved(row.slot, row.start + len(row.ids), on_device=bool(row.sample_last))

        def sampling() -> _Part:
            if not sampling_rows:
                return _Part([], torch.empty(0, dtype=torch.int32))
            columns = [
                (row.slot, row.start + len(row.ids) - 1, row.ids[-1])
                for row in (rows[number] for number in sampling_rows)
            ]
            at = StepRows(*send(self.device, *zip(*columns)))
            drawn, faults, tokens = (torch.empty_like(at.slots) for _ in range(3))
            batch = Batch(at, drawn, faults, tokens, logits)
            part, parked = self._sample(work, [places[number] for number in sampling_rows], batch, None)
            for number in parked:  # it will decode its last id again
                row = rows[sampling_rows[number]]
                self.slots.stands(row.slot, row.start + len(row.ids) - 1, row.ids[-1])
            for place, number in enumerate(sampling_rows):
                if place not in parked:
                    self._refresh(rows[number], streams[ends[number]])
            return part

        return sampling

    def _sample(
        self, work: StepWork, places: list[int], batch: Batch, replay: Callable[[], None] | None
    ) -> tuple[_Part, list[int]]:
        """Draw for the rows at `places` and book it on the device. Also says which of them were parked."""
        rows, fields = [work.rows[place] for place in places], self.slots.tables.fields
        edited, masked = self.edits.wanted(rows), None
        asked = self.edits.logprobs(rows, batch.logits) if edited else None
        if edited:
            self.edits.apply(rows, batch.logits, fields)
        if self._constrained.any(rows):
            in_step = len(work.rows)
            masked = self._constrained.take(rows, in_step=in_step, step_s=self._step_s, ahead_s=self._step_s)
            self._leave_out(rows, batch.at, masked)
        if masked is None and replay is not None:
            replay()
        else:
            self._draw(batch.logits, batch.at, batch.drawn, batch.faults, None if masked is None else masked.masks)
            end_step(batch.at, batch.drawn, batch.faults, fields, batch.tokens)
        if edited:
            self.edits.accept(rows, batch.tokens)
        part = _Part(places, self._home(batch.tokens), asked and asked.home(batch.tokens))
        if masked is None:
            return part, []
        part.failed = masked.failed
        return part, masked.parked

    def _leave_out(self, rows: Sequence[RowWork], at: StepRows, masked: Masked) -> None:
        """Rows without a mask count as padding; those that never get one have ended."""
        if out := [*masked.parked, *masked.failed]:
            (numbers,) = send(self.device, out)
            at.positions.index_fill_(0, numbers.long(), -1)
        if masked.failed:
            (slots,) = send(self.device, [rows[number].slot for number in masked.failed])
            self.slots.tables.fields[Field.FINISHED].index_fill_(0, slots.long(), 1)

    def _draw(self, logits: Tensor, at: StepRows, tokens: Tensor, faults: Tensor, masks: Tensor | None = None) -> None:
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
        if masks is not None and len(masks) < len(logits):  # padding rows of a bucket
            masks = torch.nn.functional.pad(masks, (0, 0, 0, len(logits) - len(masks)), value=EVERYTHING)
        sample(logits, params, tokens, faults, never=self.edits.never, masks=masks)

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


def _outcome(part: _Part, number: int, token: int) -> RowOutcome:
    """Of one row: -1 nothing, below that a fault."""
    if number in part.failed:
        return RowOutcome((), fault=part.failed[number])
    if token == -1:
        return RowOutcome(())
    if token < -1:
        return RowOutcome((), fault=Fault(SAMPLING_FAULT, _FAULTS[-1 - token]))
    logprobs = part.logprobs.of_row(number) if part.logprobs is not None else ()
    return RowOutcome((token,), logprobs)


def _chunk_row(row: RowWork, saves: tuple[tuple[int, int], ...]) -> ChunkRow:
    for pos, tail in saves:
        if row.fresh_from and pos < row.write_from:
            raise ValueError(
                f"tail {tail} of slot {row.slot} at {pos}: a replay is exact only from {row.write_from} on"
            )
    return ChunkRow(
        slot=row.slot, start=row.start, length=len(row.ids), pages=row.pages, fresh_from=row.fresh_from, saves=saves
    )
