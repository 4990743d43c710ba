"""The executor: orders of a step in their order, slots that are copied, tails, verify rows, sampling state."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from meshkit.types import SamplingParams
from tests.model.conftest import NANO
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.core.work import CopyWork, Fault, RowOutcome, RowWork, SlotInit, StepWork, TailWork
from worker_svc.executor import CpuExecutor
from worker_svc.masks.source import PARKED, READY, Answer, NoMasks
from worker_svc.solo import Sequence, generate, pages_for, steps

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, top_logprobs=2)


@pytest.fixture(scope="module")
def executor(tiny_folder):
    return CpuExecutor.load(tiny_folder, deterministic=True, slots=4, pages=12, tails=3)


@pytest.fixture(autouse=True)
def nothing_left(request):
    """Whatever a test before left in the pools must not be read."""
    if "executor" in request.fixturenames:
        request.getfixturevalue("executor").pools.poison()


def prompt(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(2, 512, (count,), generator=draw).tolist()


def init(slot, params=GREEDY, **more):
    return SlotInit(slot=slot, params=params, seed=7, choice=0, n_emitted=0, **more)


def finish(executor, sequence):
    for _ in steps(executor, sequence):
        continue
    return sequence.drawn


@pytest.mark.parametrize("count", [1, 128, 129, 257])
def test_any_prompt_length_is_served_in_both_modes(tiny_folder, executor, count):
    """The last tile of queries can hold a single one; the fast mode must mask it as it does the others."""
    fast = CpuExecutor.load(tiny_folder, deterministic=False, slots=1, pages=2, tails=0)
    ids = prompt(count)
    ours, exact = (generate(side, ids, GREEDY, 7) for side in (fast, executor))
    assert ours.drawn[0] == exact.drawn[0]
    for left, right in zip(ours.logprobs[0].values, exact.logprobs[0].values, strict=True):
        assert left == pytest.approx(right, abs=1e-4)


def test_the_model_tells_what_it_is(executor, tiny_folder):
    info = executor.info
    assert (info.name, info.vocab_size, info.max_context, info.eos_ids) == (tiny_folder.name, 512, 2048, (1,)), (
        "the config's limit"
    )
    other = CpuExecutor.load(tiny_folder, name="x", numerics=Numerics(kv="bf16"), slots=1, pages=4, tails=0)
    assert (other.info.name, other.info.max_context) == ("x", 4 * 256)
    assert other.info.revision == info.revision
    assert other.info.kv_layout_id != info.kv_layout_id


def test_progress_names_both_stages(tiny_folder):
    seen = []
    CpuExecutor.load(tiny_folder, slots=1, pages=1, tails=0, progress=lambda *call: seen.append(call))
    assert {stage for stage, _, _ in seen} == {"read", "build"}
    assert all(0 < done <= total for _, done, total in seen)
    assert ("build", 7, 7) in seen


def test_a_sampled_token_is_the_best_of_the_logits(executor):
    ids = prompt(30)
    drawn = generate(executor, ids, GREEDY, seed=0)
    assert len(drawn.drawn) == 8
    first = drawn.logprobs[0]
    assert first.ids[0] == drawn.drawn[0] == first.ids[1], "the best alternative is the greedy token itself"
    assert first.values[0] == first.values[1] > first.values[2]
    assert math.exp(first.values[0]) < 1.0


def test_a_chunk_without_sample_answers_with_nothing(executor):
    ids = prompt(20)
    rows = (
        RowWork(slot=1, start=0, ids=tuple(ids[:12]), pages=[0], sample_last=0),
        RowWork(slot=0, start=0, ids=tuple(ids), pages=[1]),
    )
    outcome = executor.run(StepWork(inits=(init(0), init(1)), rows=rows))
    assert outcome.rows[0].tokens == () and len(outcome.rows[1].tokens) == 1
    assert outcome.t_end_ns > outcome.t_start_ns > 0
    rest = executor.run(StepWork(rows=(RowWork(slot=1, start=12, ids=tuple(ids[12:]), pages=[0]),)))
    assert rest.rows[0] == outcome.rows[1]


@pytest.mark.parametrize("length", [20, 256, 300])
def test_n_choices_share_one_prefill(executor, length):
    """All but the last prompt token in one slot, slot_copy with the partial page, then a chunk of one each."""
    ids = prompt(length)
    wanted = finish(executor, Sequence(slot=0, pages=pages_for(320), ids=list(ids), params=GREEDY, seed=7))
    executor.pools.poison()
    full = (length - 1) // 256
    own = [[10, 9], [7, 6]]
    source = [5, 4][: full + 1]
    executor.run(
        StepWork(
            inits=(init(0),),
            rows=(RowWork(slot=0, start=0, ids=tuple(ids[:-1]), pages=source, sample_last=0),),
        )
    )
    open_page = source[full] if (length - 1) % 256 else -1
    copies = tuple(CopyWork(0, slot, open_page, own[slot - 1][0] if open_page >= 0 else -1) for slot in (1, 2))
    executor.run(StepWork(inits=(init(1), init(2)), copies=copies))
    for slot in (1, 2):
        choice = Sequence(slot=slot, pages=source[:full] + own[slot - 1], ids=list(ids), params=GREEDY, seed=7)
        choice.computed = length - 1
        assert finish(executor, choice) == wanted


def test_a_tail_is_saved_in_the_step_and_loaded_in_another(executor):
    ids = prompt(290)
    whole = Sequence(slot=0, pages=pages_for(310), ids=list(ids), params=GREEDY, seed=7)
    row = whole.row(290)
    outcome = executor.run(StepWork(inits=(whole.init(),), rows=(row,), saves=(TailWork(0, 256, 2),)))
    whole.book(row, outcome.rows[0])
    wanted = finish(executor, whole)
    resumed = Sequence(slot=3, pages=[0, 8], ids=list(ids), params=GREEDY, seed=7, computed=256)
    row = resumed.row(290)
    outcome = executor.run(StepWork(inits=(resumed.init(),), tail_loads=(TailWork(3, 256, 2),), rows=(row,)))
    resumed.book(row, outcome.rows[0])
    assert finish(executor, resumed) == wanted


def test_refresh_keeps_the_last_boundary_that_decode_crossed(executor):
    ids = prompt(253)
    longer = replace(GREEDY, max_tokens=20)
    first = Sequence(slot=0, pages=pages_for(290), ids=list(ids), params=longer, seed=7)
    running = steps(executor, first)
    while first.computed < 256:
        next(running)
    executor.pools.refresh_tail(0, 256, 1)
    for _ in running:
        continue
    resumed = Sequence(slot=2, pages=[0, 9], ids=first.ids[:257], params=longer, seed=7, computed=256)
    resumed.drawn = first.drawn[: 257 - len(ids)]
    executor.run(StepWork(inits=(resumed.init(),), tail_loads=(TailWork(2, 256, 1),)))
    assert finish(executor, resumed) == first.drawn


def test_decode_rows_without_ids_feed_what_was_sampled_and_refresh_the_spare(executor):
    ids = prompt(253)
    longer = replace(GREEDY, max_tokens=12)
    wanted = generate(executor, ids, longer, seed=7).drawn
    sequence = Sequence(slot=1, pages=pages_for(290, 3), ids=list(ids), params=longer, seed=7)
    start = replace(sequence.init(), stops=frozenset({wanted[8]}))
    decode = RowWork(slot=1, pages=sequence.pages, spare=1)
    handles = [executor.launch(StepWork(inits=(start,), rows=(sequence.row(290),)))]
    handles += [executor.launch(StepWork(rows=(decode,))) for _ in range(11)]
    drawn = [token for handle in handles for token in executor.collect(handle).rows[0].tokens]
    end = wanted.index(wanted[8])
    assert drawn == wanted[: end + 1], "a stop id ends the slot, later rows do nothing"
    assert end >= 4, "this prompt's answer crosses a page boundary first"
    resumed = Sequence(slot=2, pages=[3, 9], ids=[*ids, *wanted[:4]], params=longer, seed=7, computed=256)
    resumed.drawn = wanted[:4]
    executor.run(StepWork(inits=(resumed.init(),), tail_loads=(TailWork(2, 256, 1),)))
    assert finish(executor, resumed) == wanted


def test_refresh_may_come_late_and_after_rejected_drafts(executor):
    """The boundary's states are captured when it is crossed, not read from a ring that has moved on."""
    ids = prompt(270)
    pages = pages_for(300)
    wrong = [(token + 5) % 512 for token in ids[253:260]]
    executor.run(StepWork(inits=(init(0),)))
    for start, fed in ((0, ids[:252]), (252, [ids[252], *wrong]), (253, ids[253:])):
        executor.run(StepWork(rows=(RowWork(slot=0, start=start, ids=tuple(fed), pages=pages, sample_last=0),)))
    executor.pools.refresh_tail(0, 256, 0)
    resumed = Sequence(slot=1, pages=[0, 5], ids=list(ids), params=GREEDY, seed=7, computed=256)
    executor.run(StepWork(inits=(resumed.init(),), tail_loads=(TailWork(1, 256, 0),)))
    got = finish(executor, resumed)
    executor.pools.poison()
    assert got == generate(executor, ids, GREEDY, seed=7).drawn


def test_a_verify_row_keeps_what_was_sampled_anyway(executor):
    ids = prompt(40)
    answer = generate(executor, ids, GREEDY, seed=0)
    tokens = answer.drawn
    executor.pools.poison()
    sequence = Sequence(slot=0, pages=[0], ids=list(ids), params=GREEDY, seed=0)
    row = sequence.row(40)
    sequence.book(row, executor.run(StepWork(inits=(sequence.init(),), rows=(row,))).rows[0])
    row = sequence.verify_row((tokens[1], tokens[2], (tokens[3] + 1) % 512, tokens[4]))
    outcome = executor.run(StepWork(rows=(row,))).rows[0]
    assert outcome.tokens == tuple(tokens[1:4]), "two right drafts, and what the third should have been"
    sequence.book(row, outcome)
    assert sequence.computed == 43
    assert finish(executor, sequence) == tokens
    assert sequence.logprobs == answer.logprobs


def test_verify_rows_count_penalties_like_single_steps(executor):
    params = replace(GREEDY, frequency_penalty=3.0, bias=((9, 12.0), (11, 11.0)), max_tokens=6)
    ids = prompt(25)
    tokens = generate(executor, ids, params, seed=0).drawn
    assert tokens.count(9) > 1 and tokens.count(11) > 1, "the penalty makes them take turns"
    sequence = Sequence(slot=1, pages=[3], ids=list(ids), params=params, seed=0)
    row = sequence.row(25)
    sequence.book(row, executor.run(StepWork(inits=(sequence.init(),), rows=(row,))).rows[0])
    row = sequence.verify_row(tuple(tokens[1:5]))
    sequence.book(row, executor.run(StepWork(rows=(row,))).rows[0])
    assert sequence.drawn == tokens


def test_a_resumed_choice_draws_what_it_would_have_drawn(executor):
    params = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5, max_tokens=8)
    ids = prompt(25)
    whole = generate(executor, ids, params, seed=99)
    again = Sequence(slot=2, pages=[4], ids=ids + whole.drawn[:3], params=params, seed=99, drawn=whole.drawn[:3])
    assert finish(executor, again) == whole.drawn
    assert generate(executor, ids, params, seed=98).drawn != whole.drawn


def test_a_tail_inside_a_replay_is_refused(executor):
    row = RowWork(
        slot=0, start=200, ids=tuple(prompt(100)), pages=[0, 1], write_from=512, fresh_from=200, sample_last=0
    )
    with pytest.raises(ValueError, match="exact only from 512"):
        executor.run(StepWork(inits=(init(0),), rows=(row,), saves=(TailWork(0, 256, 0),)))


def test_logits_that_are_not_numbers_end_the_row_and_are_counted(executor):
    before = executor.sampling_faults
    row = RowWork(slot=0, start=100, ids=(5,), pages=[0])  # nothing was written below: the pools are poisoned
    outcome = executor.run(StepWork(inits=(init(0),), rows=(row,)))
    assert outcome.rows[0].tokens == () and outcome.rows[0].fault == Fault(
        "sampling_fault", "output position 0: broken_logits"
    )
    assert executor.sampling_faults == before + 1
    behind = executor.run(StepWork(rows=(RowWork(slot=0, pages=[0]),)))
    assert behind.rows == (RowOutcome(()),), "the slot has ended"


def test_small_steps_take_one_thread_and_large_ones_what_is_allowed(tiny_folder, monkeypatch):
    fast = CpuExecutor.load(tiny_folder, slots=1, pages=4, tails=0, threads=2)
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    for count, wanted in ((1, []), (700, [2])):
        row = RowWork(slot=0, start=0, ids=tuple(prompt(count)), pages=[0, 1, 2], sample_last=0)
        fast.run(StepWork(rows=(row,)))
        assert asked == wanted


def test_deterministic_bits_do_not_depend_on_threads(executor):
    ids = prompt(70)
    wanted = generate(executor, ids, GREEDY, seed=0).logprobs
    torch.set_num_threads(2)
    assert generate(executor, ids, GREEDY, seed=0).logprobs == wanted
    assert torch.get_num_threads() == 1


def test_a_machine_that_cannot_repeat_bits_says_so(tiny_folder, caplog, monkeypatch):
    CpuExecutor.load(tiny_folder, deterministic=True, slots=1, pages=1, tails=0)
    assert caplog.text == ""
    monkeypatch.setattr("worker_svc.executor.rows_agree", lambda weight_t: weight_t.shape != (128, 512))
    CpuExecutor.load(tiny_folder, deterministic=True, slots=1, pages=1, tails=0)
    assert "(128, 512)" in caplog.text, "the head"
    CpuExecutor.load(tiny_folder, slots=1, pages=1, tails=0)
    assert caplog.text.count("depend on the batch") == 1, "asked in deterministic mode only"


def test_the_default_model_masks_what_is_no_token_and_tells_stories():
    nano = CpuExecutor.load(NANO, slots=1, pages=2, tails=0)
    assert nano.rules.masked_ids == () or max(nano.rules.masked_ids) < nano.info.vocab_size
    assert nano.info.max_context == 512
    drawn = generate(nano, [0, 3], SamplingParams(temperature=0.0, max_tokens=16), seed=0).drawn
    assert len(set(drawn)) > 4


class Masks:
    """Allows `ids`, with rows as wide as the model's vocabulary; parks or fails the asks that `refused` numbers."""

    words = 16

    def __init__(self, ids, refused=()):
        self.row, self.refused, self.asks, self.told, self.bound = np.zeros(16, np.int32), dict(refused), [], [], []
        for i in ids:
            self.row[i >> 5] |= np.uint32(1 << (i & 31)).astype(np.int32)

    def bind(self, inits):
        self.bound += inits

    def take(self, asks, out, *, wait_s, alone):
        assert wait_s >= 0.0003 and out.shape[0] >= sum(ask.places for ask in asks)
        out[:] = self.row
        self.asks += [(ask, alone) for ask in asks]
        first = len(self.asks) - len(asks)
        return [self.refused.get(first + i, READY) for i in range(len(asks))]

    def tell(self, rows):
        self.told += rows


@pytest.fixture
def use_masks(executor):
    yield executor.use_masks
    executor.use_masks(NoMasks())


def constrained(executor, masks, ids, count, params):
    """Tokens of slot 1, whose rows run again until they were sampled, beside an unconstrained slot 0."""
    start = replace(init(1, replace(params, max_tokens=count)), grammar_id=b"g" * 16, slot_gen=4)
    rows = (RowWork(slot=1, start=0, ids=tuple(ids), pages=[1, 2]),)
    (outcome,) = executor.run(StepWork(inits=(start,), rows=rows)).rows
    tokens = list(outcome.tokens)
    while len(tokens) < count:
        (outcome,) = executor.run(StepWork(rows=(RowWork(slot=1, pages=[1, 2]),))).rows
        tokens += outcome.tokens
        if outcome.fault is not None:
            break
    return tokens


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.7)])
def test_masked_rows_draw_what_is_allowed_and_parked_ones_the_same_later(executor, use_masks, params):
    ids, some = prompt(40), (3, 77, 250, 251, 252, 509)
    use_masks(masks := Masks(some))
    wanted = constrained(executor, masks, ids, 8, params)
    assert set(wanted) <= set(some) and masks.bound[0].grammar_id == b"g" * 16
    assert [ask.position for ask, _ in masks.asks] == list(range(8)) and all(alone for _, alone in masks.asks)
    assert [t.tokens for t in masks.told] == [(token,) for token in wanted]
    assert [t.ended for t in masks.told] == [False] * 7 + [True] and {t.slot_gen for t in masks.told} == {4}
    executor.pools.poison()
    use_masks(masks := Masks(some, {0: PARKED, 1: PARKED, 4: PARKED, 7: PARKED}))
    assert constrained(executor, masks, ids, 8, params) == wanted
    assert len(masks.asks) == 12 and len(masks.told) == 8


def test_a_fault_of_a_mask_ends_its_row_and_leaves_the_others(executor, use_masks):
    fault = Fault("grammar_failed", "no")
    use_masks(masks := Masks([3], {1: Answer(False, fault)}))
    starts = (init(0), replace(init(1), grammar_id=b"g" * 16))
    chunks = tuple(RowWork(slot=s, start=0, ids=tuple(prompt(9)), pages=[s]) for s in (0, 1))
    executor.run(StepWork(inits=starts, rows=chunks))
    decode = StepWork(rows=tuple(RowWork(slot=s, pages=[s]) for s in (0, 1)))
    free, failed = executor.run(decode).rows
    assert len(free.tokens) == 1 and failed == RowOutcome((), fault=fault) and not masks.asks[1][1]
    assert masks.told[-1].ended and masks.told[-1].tokens == ()
    assert executor.run(decode).rows[1] == RowOutcome(())
    executor.run(StepWork(inits=(init(1),), rows=chunks[1:]))
    assert len(masks.asks) == 2, "the slot that took its place is free"


def test_drafts_are_accepted_under_masks_of_their_places(executor, use_masks):
    use_masks(masks := Masks([3, 77, 250]))
    ids = prompt(40)
    wanted = constrained(executor, masks, ids, 4, GREEDY)
    start = replace(init(2), grammar_id=b"g" * 16, n_emitted=1, emitted=tuple(wanted[:1]))
    verify = (wanted[0], wanted[1], 499)
    chunk = RowWork(slot=2, start=0, ids=(*ids, *verify), pages=[3], sample_last=3, out_pos=1)
    (outcome,) = executor.run(StepWork(inits=(start,), rows=(chunk,))).rows
    assert outcome.tokens == tuple(wanted[1:3]), "the illegal draft ends the row at the sample in its place"
    assert masks.asks[-1][0].places == 3 and masks.told[-1].position == 1


def test_without_a_source_constrained_rows_fail(executor):
    start = replace(init(3), grammar_id=b"g" * 16)
    row = RowWork(slot=3, start=0, ids=(5,), pages=[4])
    (outcome,) = executor.run(StepWork(inits=(start,), rows=(row,))).rows
    assert outcome.fault is not None and outcome.fault.code == "grammar_failed"
