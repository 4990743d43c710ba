"""The GPU forward on CPU tensors: every kernel's torch reference in its place, the code around them the same.

The nano model (head_dim 512, the row formats of the kernels) against the CPU model under the same numerics. What is
asserted bit for bit is what must not depend on chunking, tails or batch companions beyond rounding of the products.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from meshkit.types import SamplingParams
from tests.model.conftest import NANO
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.core.work import CopyWork, Fault, RowWork, SlotInit, StepWork, TailWork
from worker_svc.executor import CpuExecutor
from worker_svc.gpu import ahead
from worker_svc.gpu.executor import GpuExecutor
from worker_svc.gpu.graphs import buckets
from worker_svc.gpu.layout import GpuSizes, ShapeError, check_shapes
from worker_svc.gpu.pools import GpuPools
from worker_svc.gpu.slots import DeviceSlots
from worker_svc.gpu.transformer import Transformer
from worker_svc.gpu.weights import WeightLoader
from worker_svc.kv.layout import KvLayout
from worker_svc.masks.source import PARKED, READY, Answer
from worker_svc.ops.slot_step import MAX_STOPS, Field

NUMERICS = Numerics(activations="fp8", kv="fp8_e4m3", indexer="fp8")
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
SLOTS, PAGES, TAILS = 3, 12, 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cpu():
    return CpuExecutor.load(NANO, numerics=NUMERICS, slots=SLOTS, pages=PAGES, tails=TAILS, max_verify=1)


@pytest.fixture(scope="module")
def loaded():
    checkpoint = load_checkpoint(NANO, check_values=False)
    return checkpoint.config, WeightLoader(checkpoint, CPU).model()


@pytest.fixture
def gpu(cpu, loaded):
    config, weights = loaded
    layout = KvLayout(config=config, numerics=NUMERICS, max_verify=1)
    pools = GpuPools(layout, slots=SLOTS, pages=PAGES, tails=TAILS, device=CPU)
    model = Transformer(weights, config, pools, max_context=PAGES * 256, max_tokens=512)
    return GpuExecutor(model=model, pools=pools, info=cpu.info, rules=cpu.rules, max_rows=SLOTS)


@pytest.fixture(scope="module")
def text():
    draw = torch.Generator().manual_seed(3)
    return torch.randint(20, 4000, (300,), generator=draw).tolist()


def init(slot, params=GREEDY, **more):
    return SlotInit(slot=slot, params=params, seed=7, choice=0, n_emitted=0, **more)


def chunk(slot, ids, start, pages, **more):
    return RowWork(slot=slot, start=start, ids=tuple(ids), pages=pages, **more)


def seen(executor):
    """Logits of each forward from now on."""
    kept, plain = [], executor.model.forward

    def forward(*args):
        result = plain(*args)
        kept.append((result[0] if isinstance(result, tuple) else result).clone())
        return result

    executor.model.forward = forward
    return kept


def test_prefill_decode_and_a_second_chunk_agree_with_the_cpu_model(cpu, gpu, text):
    ours, theirs = seen(gpu), seen(cpu)
    works = [
        StepWork(inits=(init(1),), rows=(chunk(1, text[:270], 0, [5, 2]),)),
        StepWork(rows=(chunk(1, text[270:], 270, [5, 2]),)),
        *[StepWork(rows=(RowWork(slot=1, pages=[5, 2]),))] * 5,
    ]
    for work in works:
        tokens = [executor.run(work).rows[0].tokens for executor in (gpu, cpu)]
        similar = torch.cosine_similarity(ours[-1][:1], theirs[-1]).item()
        assert similar > 0.99, (work.rows[0].start, similar)
        best = theirs[-1][0].topk(2).values
        if best[0] - best[1] > 0.3:
            assert tokens[0] == tokens[1]
        # Both go on with the same token, so that one flipped choice does not end the comparison.
        gpu.slots.tables.fields[Field.NEXT, 1] = cpu._resident.places[1].next


def test_bf16_keys_are_served_as_the_check(loaded, text):
    config, weights = loaded
    numerics = Numerics(activations="fp8", kv="bf16", indexer="fp8")
    theirs = CpuExecutor.load(NANO, numerics=numerics, slots=1, pages=2, tails=1, max_verify=1)
    pools = GpuPools(KvLayout(config=config, numerics=numerics, max_verify=1), slots=1, pages=2, tails=1, device=CPU)
    model = Transformer(weights, config, pools, max_context=512, max_tokens=512)
    ours = GpuExecutor(model=model, pools=pools, info=theirs.info, rules=theirs.rules, max_rows=1)
    found, wanted = seen(ours), seen(theirs)
    for executor in (ours, theirs):
        executor.run(StepWork(inits=(init(0),), rows=(chunk(0, text[:150], 0, [0]),)))
    ours.slots.tables.fields[Field.NEXT, 0] = theirs._resident.places[0].next
    for executor in (ours, theirs):
        executor.run(StepWork(rows=(RowWork(slot=0, pages=[0]),)))
    assert all(torch.cosine_similarity(a[:1], b).item() > 0.99 for a, b in zip(found, wanted, strict=True))


def test_a_tail_of_a_chunk_resumes_where_the_sequence_went_on(gpu, text):
    logits = seen(gpu)
    gpu.run(
        StepWork(inits=(init(0),), rows=(chunk(0, text[:260], 0, [1, 2], sample_last=0),), saves=(TailWork(0, 256, 1),))
    )
    gpu.run(StepWork(rows=(chunk(0, text[260:], 260, [1, 2]),)))
    resumed = StepWork(
        inits=(init(2, start=256),), tail_loads=(TailWork(2, 256, 1),), rows=(chunk(2, text[256:], 256, [1, 9]),)
    )
    gpu.run(resumed)
    assert torch.cosine_similarity(logits[-1], logits[-2]).item() > 0.9999


def test_a_spare_is_refreshed_by_the_decode_step_that_reaches_the_boundary(gpu, text):
    logits = seen(gpu)
    first = gpu.run(StepWork(inits=(init(0),), rows=(chunk(0, text[:254], 0, [1, 2]),))).rows[0].tokens
    drawn = [*first]
    for _ in range(4):
        drawn += gpu.run(StepWork(rows=(RowWork(slot=0, pages=[1, 2], spare=2),))).rows[0].tokens
    ids = [*text[:254], *drawn]
    resumed = StepWork(
        inits=(init(1, start=256),), tail_loads=(TailWork(1, 256, 2),), rows=(chunk(1, ids[256:258], 256, [1, 7]),)
    )
    gpu.run(resumed)
    assert torch.cosine_similarity(logits[-1], logits[-2][:1]).item() > 0.9999


def test_a_slot_that_ended_does_nothing_more(gpu, text):
    row = RowWork(slot=0, pages=[1])
    two = SamplingParams(temperature=0.0, max_tokens=2)
    gpu.run(StepWork(inits=(init(0, two),), rows=(chunk(0, text[:9], 0, [1]),)))
    counts = [len(gpu.run(StepWork(rows=(row,))).rows[0].tokens) for _ in range(3)]
    assert counts == [1, 0, 0]
    fields = gpu.slots.tables.fields[:, 0]
    assert fields[Field.FINISHED] == 1 and fields[Field.LENGTH] == 9 and fields[Field.EMITTED] == 2


def test_a_stop_id_ends_the_slot_and_is_emitted(gpu, text):
    ids = StepWork(inits=(init(0),), rows=(chunk(0, text[:20], 0, [1]),))
    (token,) = gpu.run(ids).rows[0].tokens
    stopped = init(1, stops=frozenset({token}))
    assert gpu.run(StepWork(inits=(stopped,), rows=(chunk(1, text[:20], 0, [2]),))).rows[0].tokens == (token,)
    assert gpu.run(StepWork(rows=(RowWork(slot=1, pages=[2]),))).rows[0].tokens == ()


def test_a_mixed_step_answers_its_rows_in_order(gpu, text):
    gpu.run(StepWork(inits=(init(0), init(1)), rows=(chunk(0, text[:30], 0, [1]), chunk(1, text[:40], 0, [2]))))
    alone = [gpu.run(StepWork(inits=(init(2),), rows=(chunk(2, text[50:90], 0, [3]),))).rows[0].tokens]
    mixed = (
        RowWork(slot=1, pages=[2]),
        chunk(2, text[50:90], 0, [3]),
        RowWork(slot=0, pages=[1]),
    )
    rows = gpu.run(StepWork(inits=(init(2),), rows=mixed)).rows
    assert [len(row.tokens) for row in rows] == [1, 1, 1] and rows[1].tokens == alone[0]


def test_a_copied_slot_goes_on_alike(gpu, text):
    gpu.run(StepWork(inits=(init(0),), rows=(chunk(0, text[:270], 0, [1, 2], sample_last=0),)))
    logits = seen(gpu)
    copied = StepWork(
        inits=(init(1),),
        copies=(CopyWork(0, 1, 2, 4),),
        rows=(chunk(0, text[270:271], 270, [1, 2]), chunk(1, text[270:271], 270, [1, 4])),
    )
    gpu.run(copied)
    assert torch.allclose(logits[0][0], logits[0][1], atol=1e-5)


def test_log_probabilities_and_penalties_match_the_host_sampler(cpu, gpu, text):
    params = SamplingParams(
        temperature=0.0,
        max_tokens=9,
        min_tokens=2,
        top_logprobs=3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.2,
        bias=((77, 2.5), (78, -100.0)),
    )
    start = init(0, params, prompt=tuple(text[:40]))
    for work in (
        StepWork(inits=(start,), rows=(chunk(0, text[:40], 0, [1]),)),
        StepWork(rows=(RowWork(slot=0, pages=[1]),)),
    ):
        ours, theirs = gpu.run(work).rows[0], cpu.run(work).rows[0]
        assert ours.tokens == theirs.tokens
        assert ours.logprobs[0].ids[0] == theirs.logprobs[0].ids[0]
        assert np.allclose(ours.logprobs[0].values, theirs.logprobs[0].values, atol=0.2)


class Masks:
    """Allows `ids`; answers the asks that `refused` numbers as it says."""

    words = 128

    def __init__(self, ids, refused=()):
        self.row, self.refused, self.asks, self.told = np.zeros(128, np.int32), dict(refused), [], []
        for i in ids:
            self.row[i >> 5] |= np.uint32(1 << (i & 31)).astype(np.int32)

    def bind(self, inits):
        pass

    def take(self, asks, out, *, wait_s, alone):
        out[: len(asks)] = self.row
        self.asks += [(ask.position, alone) for ask in asks]
        first = len(self.asks) - len(asks)
        return [self.refused.get(first + i, READY) for i in range(len(asks))]

    def tell(self, rows):
        self.told += [(row.position, row.tokens, row.ended) for row in rows]


def drawn(executor, slot, ids, most, **more):
    """Tokens of one slot, a chunk and then decode rows, two steps in flight."""
    works = [StepWork(inits=(init(slot, **more),), rows=(chunk(slot, ids, 0, [1]),))]
    works += [StepWork(rows=(RowWork(slot=slot, pages=[1]),))] * most
    flights, tokens = [], []
    for work in works:
        flights.append(executor.launch(work))
        if len(flights) == 2:
            tokens += executor.collect(flights.pop(0)).rows[0].tokens
    return tokens + list(executor.collect(flights[0]).rows[0].tokens)


def test_masked_rows_draw_allowed_ids_and_parked_ones_draw_the_same_later(gpu, text):
    some, three = range(100, 140), SamplingParams(temperature=0.0, max_tokens=3)
    gpu.use_masks(masks := Masks(some))
    wanted = drawn(gpu, 0, text[:20], 4, params=three, grammar_id=b"g" * 16)
    assert len(wanted) == 3 and set(wanted) <= set(some)
    assert [told[0] for told in masks.told] == [0, 1, 2] and masks.told[-1][2]
    gpu.use_masks(masks := Masks(some, {0: PARKED, 2: PARKED, 3: PARKED}))
    assert drawn(gpu, 1, text[:20], 8, params=three, grammar_id=b"g" * 16) == wanted
    assert [position for position, _ in masks.asks] == [0, 0, 1, 1, 1, 2]


def test_a_mask_that_failed_ends_its_row_and_leaves_the_others(gpu, text):
    fault = Fault("grammar_failed", "no")
    gpu.use_masks(Masks([300], {1: Answer(False, fault)}))
    rows = tuple(chunk(slot, text[:9], 0, [slot]) for slot in (0, 1, 2))
    bound = [init(0), *(init(slot, grammar_id=b"g" * 16) for slot in (1, 2))]
    free, masked, failed = gpu.run(StepWork(inits=tuple(bound), rows=rows)).rows
    assert len(free.tokens) == 1 and masked.tokens == (300,) and failed.fault == fault
    decode = StepWork(rows=tuple(RowWork(slot=slot, pages=[slot]) for slot in (0, 1, 2)))
    assert [len(row.tokens) for row in gpu.run(decode).rows] == [1, 1, 0]


def test_what_it_cannot_do_is_said_before_the_step(gpu, text):
    with pytest.raises(ValueError, match="drafts"):
        gpu.launch(StepWork(rows=(chunk(0, text[:3], 0, [1], sample_last=2),)))
    with pytest.raises(ValueError, match="stop ids"):
        DeviceSlots(1, 1, CPU).init((init(0, stops=frozenset(range(MAX_STOPS + 1))),))


def test_pages_that_join_a_table_are_sent_and_others_are_not_read_again():
    slots = DeviceSlots(2, 8, CPU)
    slots.init((init(1),))
    pages = [5, 6]
    slots.take_pages([RowWork(slot=1, pages=pages)])
    pages.append(3)
    slots.take_pages([RowWork(slot=1, pages=pages)])
    assert slots.tables.pages[1, :3].tolist() == [5, 6, 3]
    slots.init((init(1),))
    slots.take_pages([RowWork(slot=1, pages=[2])])
    assert slots.tables.pages[1, 0] == 2


def test_sizes_are_those_of_the_formats(loaded):
    config, _ = loaded
    layout = KvLayout(config=config, numerics=NUMERICS, max_verify=1)
    sizes = GpuSizes(layout)
    pools = GpuPools(layout, slots=2, pages=32, tails=2, device=CPU)
    expected = 2 * sizes.bytes_per_slot + 32 * sizes.bytes_per_page + 2 * sizes.bytes_per_tail
    assert pools.num_bytes == expected
    with pytest.raises(ShapeError, match="hidden_size is 200"):
        check_shapes(replace(config, hidden_size=200))


def test_buckets_reach_the_largest_batch_and_no_further():
    assert buckets(3) == [1, 2, 3]
    assert buckets(64)[-2:] == [48, 64]
    assert buckets(400)[-3:] == [320, 384, 400]


def test_warming_up_has_odd_and_even_prompts_a_resumed_one_and_two_at_once(gpu):
    steps = list(ahead._steps(gpu, 300))
    assert {len(work.rows[0].ids) for work in steps} >= {13, 16, 297, 300}
    assert any(len(work.rows) == 2 for work in steps) and any(work.saves for work in steps)
    for work in ahead._resumed(gpu):
        outcome = gpu.run(work)
        assert all(row.fault is None for row in outcome.rows)
        assert all(row.start == 256 for row in work.rows if work.tail_loads)
    gpu.warm_masks([1, 2])
    assert gpu.slots.length(0) == 257


def test_a_prompt_is_embedded_before_anything_else_of_its_step(gpu, text, monkeypatch):
    """Decode rows of the same step and another slot's start change nothing in what was begun."""
    gpu.run(StepWork(inits=(init(0), init(1)), rows=(chunk(0, text[:30], 0, (0,), sample_last=1),)))
    work = StepWork(rows=(RowWork(slot=0, pages=(0,)), chunk(1, text, 0, (1, 2), sample_last=1)))
    kept, order = seen(gpu), []
    for owner, name in ((gpu.model, "begin"), (gpu.slots, "take_pages"), (gpu.graphs, "forward")):

        def noted(*args, plain, name):
            order.append(name)
            return plain(*args)

        monkeypatch.setattr(owner, name, partial(noted, plain=getattr(owner, name), name=name))
    gpu.run(work)
    assert order[:3] == ["begin", "take_pages", "forward"], "decode's forward runs in between"
    begun = kept[-1]
    monkeypatch.undo()
    gpu.run(StepWork(inits=(init(2),), rows=(chunk(2, text, 0, (3, 4), sample_last=1),)))
    assert torch.equal(kept[-1], begun)
