"""The device side of a worker on a CPU: runs one `StepWork` after the other over model, KV pools and sampler.

Knows slot, page and tail numbers, never requests; holds per slot what the sampler needs. Calls come one at a time,
from one thread. In deterministic mode it computes on one thread, so that a row's bits do not depend on the number of
cores either.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshkit.types import PAGE_TOKENS, ModelInfo
from meshkit.vocab import unsampleable_ids
from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.loader import Checkpoint, load_checkpoint
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.core.resident import ResidentSlots
from worker_svc.core.work import SAMPLING_FAULT, Fault, RowOutcome, RowWork, SlotInit, StepOutcome, StepWork, TailWork
from worker_svc.kv.layout import KvLayout
from worker_svc.kv.pools import KvPools
from worker_svc.masks.constraints import UNMASKED, Constraints, Place, SlotMask
from worker_svc.masks.source import MaskSource
from worker_svc.model.glue import Glue
from worker_svc.model.mtp import DraftLayer
from worker_svc.model.step import ForwardInputs, Row
from worker_svc.model.transformer import V4Transformer
from worker_svc.model.weights import ModelBuilder
from worker_svc.ops.matmul import rows_agree
from worker_svc.sampling import RowSampling, RowState, SamplerState, VocabRules, sample

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total): stages `read` (bytes) and `build` (layers)."""

ONE_THREAD_BELOW = 64_000_000
"""Multiply-adds of a step below which threads cost more than they save: decode of a small model, a few rows."""

log = logging.getLogger(__name__)


class CpuExecutor:
    """Implements `worker_svc.core.work.Executor`. Build with `load`."""

    def __init__(
        self,
        *,
        model: V4Transformer,
        draft: DraftLayer | None,
        pools: KvPools,
        info: ModelInfo,
        rules: VocabRules,
        threads: int | None = None,
    ) -> None:
        self.model, self.draft, self.pools, self.info, self.rules = model, draft, pools, info, rules
        self.threads = 1 if model.deterministic else threads or torch.get_num_threads()
        self._work_per_token = _work_per_token(pools.layout.config)
        self._samplers: dict[int, SamplerState] = {}
        self._resident = ResidentSlots()
        self._constraints = Constraints()
        self.sampling_faults = 0  # rows whose logits held NaN or infinity or allowed nothing

    def use_masks(self, masks: MaskSource) -> None:
        """Where the masks of constrained slots come from; before the first step."""
        self._constraints.source = masks

    @staticmethod
    def load(
        folder: str | Path,
        *,
        name: str | None = None,
        numerics: Numerics | None = None,
        deterministic: bool = False,
        slots: int,
        pages: int,
        tails: int,
        max_verify: int = 8,
        threads: int | None = None,
        progress: Progress | None = None,
        glue: Glue | None = None,
    ) -> "CpuExecutor":
        """Read a checkpoint folder and allocate the pools. Raises CheckpointError or ModelDirError.

        `tails` counts spares too; `max_verify` is 1 + drafts of the longest verify row; `threads` serve large steps
        (None: as many as torch found; deterministic mode always computes on one); `glue` None: plain torch.
        """
        assert slots > 0 and pages > 0 and tails >= 0 and max_verify > 0, (slots, pages, tails, max_verify)
        folder = Path(folder)
        stage = _staged(progress)
        checkpoint = load_checkpoint(folder, progress=stage("read"))
        config = checkpoint.config
        layout = KvLayout(config=config, numerics=numerics or Numerics(), max_verify=max_verify)
        max_context = min(config.max_position_embeddings, pages * PAGE_TOKENS)
        pools = KvPools(layout, slots=slots, pages=pages, tails=tails)
        builder = ModelBuilder(checkpoint, layout, max_context=max_context, deterministic=deterministic, glue=glue)
        model = builder.transformer(pools, stage("build"))
        draft = builder.draft_layer(model)
        if deterministic:
            _check_repeatable(model)
        info = ModelInfo(
            name=name or folder.resolve().name,
            revision=revision_of(folder),
            vocab_size=config.vocab_size,
            max_context=max_context,
            eos_ids=(config.eos_token_id,),
            # Pages of the other mode differ in their last bits: they must not be shared with one that promises bits.
            kv_layout_id=layout.layout_id + ("-d" if deterministic else ""),
            layers=len(layout.ratios),
        )
        rules = rules_of(folder, checkpoint)
        return CpuExecutor(model=model, draft=draft, pools=pools, info=info, rules=rules, threads=threads)

    def launch(self, work: StepWork) -> StepOutcome:
        """All of the step: a CPU has nothing to compute in the background with."""
        return self.run(work)

    def collect(self, handle: StepOutcome) -> StepOutcome:
        """What `launch` came to."""
        return handle

    @torch.inference_mode()
    def run(self, work: StepWork) -> StepOutcome:
        """Run one step, in the order of `StepWork`. An exception means that the step did not happen."""
        started = time.monotonic_ns()
        self._set_threads(work)
        self._constraints.begin(work.inits)
        for init in work.inits:
            self._samplers[init.slot] = self._sampler(init)
            self._resident.init(init)
        for copy in work.copies:
            self._resident.copy(copy.src, copy.dst)
            self.pools.copy_slot(copy.src, copy.dst)
            if copy.src_page >= 0:
                self.pools.copy_page(copy.src_page, copy.dst_page)
        for load in work.tail_loads:
            self.pools.load_tail(load.slot, load.pos, load.tail)
        rows = self._forward(work) if work.rows else ()
        return StepOutcome(rows=rows, t_start_ns=started, t_end_ns=time.monotonic_ns())

    def _forward(self, work: StepWork) -> tuple[RowOutcome, ...]:
        """Compute, sample, and only then move slots and spare tails on."""
        resolved = [self._resident.resolve(row) for row in work.rows]
        live = [row for row in resolved if row is not None]
        sampled = self._sample_rows(live, work.saves) if live else []
        for row, outcome in zip(live, sampled, strict=True):
            if pos := self._resident.advance(row, outcome.tokens, failed=outcome.fault is not None):
                self.pools.refresh_tail(row.slot, pos, row.spare)
        ended = self._resident.ended
        self._constraints.tell((r.slot, r.out_pos, o, ended(r.slot)) for r, o in zip(live, sampled, strict=True))
        outcomes = iter(sampled)
        return tuple(RowOutcome(()) if row is None else next(outcomes) for row in resolved)

    def _sample_rows(self, rows: Sequence[RowWork], tail_saves: Sequence[TailWork]) -> list[RowOutcome]:
        saves: dict[int, list[tuple[int, int]]] = {}
        for save in tail_saves:
            saves.setdefault(save.slot, []).append((save.pos, save.tail))
        ids = torch.tensor([token for row in rows for token in row.ids], dtype=torch.int64)
        inputs = tuple(_model_row(row, tuple(saves.get(row.slot, ()))) for row in rows)
        began = time.monotonic()
        logits = self.model.forward(ForwardInputs(ids, inputs))
        sampling = (Place(row.slot, row.out_pos, row.sample_last) for row in rows if row.sample_last)
        masks = self._constraints.take(sampling, rows=len(rows), forward_s=time.monotonic() - began)
        outcomes, first = [], 0
        for row in rows:
            outcomes.append(self._sample(row, logits[first : first + row.sample_last], masks.get(row.slot, UNMASKED)))
            first += row.sample_last
        # Booked only now: if anything above fails, the step did not happen.
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome.tokens:
                self._samplers[row.slot].accept(outcome.tokens)
        return outcomes

    def _sample(self, row: RowWork, logits: Tensor, mask: SlotMask) -> RowOutcome:
        """Tokens of one row: a draft is accepted iff it equals the token sampled before it, and the first that
        does not ends the row. A fault behind accepted drafts is left for the step that starts there."""
        if not row.sample_last:
            return RowOutcome(())
        if not mask.answer.ready:
            return RowOutcome((), fault=mask.answer.fault)
        state = self._samplers[row.slot]
        drafts = row.ids[len(row.ids) - row.sample_last + 1 :]
        tokens: list[int] = []
        logprobs = []
        for place in range(row.sample_last):
            allowed = None if mask.rows is None else mask.rows[place]
            asked = RowState(state=state, position=row.out_pos + place, mask=allowed, ahead=tuple(tokens))
            (drawn,) = sample(logits[place : place + 1], [asked])
            if drawn.fault is not None:
                if tokens:
                    break
                self.sampling_faults += 1
                log.error("slot %d at output %d: %s; the row ends", row.slot, row.out_pos, drawn.fault)
                return RowOutcome((), fault=Fault(SAMPLING_FAULT, f"output position {row.out_pos}: {drawn.fault}"))
            tokens.append(drawn.token)
            if drawn.logprobs is not None:
                logprobs.append(drawn.logprobs)
            if place < len(drafts) and drafts[place] != drawn.token:
                break
        return RowOutcome(tuple(tokens), tuple(logprobs))

    def _sampler(self, init: SlotInit) -> SamplerState:
        sampling = RowSampling(params=init.params, seed=init.seed, choice=init.choice, rules=self.rules)
        return SamplerState(sampling, prompt=init.prompt, emitted=init.emitted)

    def _set_threads(self, work: StepWork) -> None:
        """Waking a second thread for a microsecond of work, in every one of hundreds of products, only costs."""
        tokens = sum(len(row.ids) or 1 for row in work.rows)
        wanted = 1 if tokens * self._work_per_token < ONE_THREAD_BELOW else self.threads
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)


def _model_row(row: RowWork, saves: tuple[tuple[int, int], ...]) -> Row:
    for pos, tail in saves:
        if row.fresh_from and pos < row.write_from:
            raise ValueError(
                f"tail {tail} of slot {row.slot} at {pos}: a replay is exact only from {row.write_from} on"
            )
    return Row(
        slot=row.slot,
        start=row.start,
        length=len(row.ids),
        pages=row.pages,
        write_from=row.write_from,
        fresh_from=row.fresh_from,
        num_samples=row.sample_last,
        saves=saves,
    )


def _check_repeatable(model: V4Transformer) -> None:
    """Deterministic mode rests on one property of the machine's BLAS; look, once per shape, whether it holds."""
    torch.set_num_threads(1)
    shapes = {weight_t.shape: weight_t for weight_t in model.matrices()}
    broken = [tuple(shape) for shape, weight_t in shapes.items() if not rows_agree(weight_t)]
    if broken:
        log.error(
            "this machine's BLAS computes a row by its place for shapes %s: answers may depend on the batch", broken
        )


def _work_per_token(config: V4Config) -> int:
    """Multiply-adds of one token through all weights that it meets; attention apart."""
    c = config
    heads_dim, grouped = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
    attention = c.hidden_size * (c.q_lora_rank + c.head_dim + grouped) + heads_dim * (c.q_lora_rank + c.o_lora_rank)
    experts = 3 * (c.num_experts_per_tok + 1) * c.hidden_size * c.moe_intermediate_size
    return c.num_hidden_layers * (attention + experts) + c.vocab_size * c.hidden_size


def rules_of(folder: Path, checkpoint: Checkpoint) -> VocabRules:
    """Ids that are no token are never sampled; a folder without a tokenizer (generated weights) masks none."""
    vocab = checkpoint.config.vocab_size
    masked = unsampleable_ids(folder, vocab) if (folder / "tokenizer.json").exists() else []
    return VocabRules(vocab_size=vocab, eos_ids=(checkpoint.config.eos_token_id,), masked_ids=tuple(masked))


def revision_of(folder: Path) -> str:
    """Digest of the config's bytes and of the weight files' names and sizes."""
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=8)
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
    return digest.hexdigest()


def _staged(progress: Progress | None) -> Callable[[str], Callable[[int, int], None] | None]:
    """Bind a stage name to the progress callback."""

    def bind(stage: str) -> Callable[[int, int], None] | None:
        if progress is None:
            return None
        report = progress
        return lambda done, total: report(stage, done, total)

    return bind
