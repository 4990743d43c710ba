"""The simulated backend: its times are the roofline's, its tokens follow from the context alone, it needs no torch."""

import itertools
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshkit.config import FieldError
from meshkit.errors import MemoryShort
from meshkit.models import DEFAULT_MODEL
from meshkit.types import ModelInfo, SamplingParams
from worker_svc.config import WorkerConfig
from worker_svc.core.work import CopyWork, Fault, RowWork, SlotInit, StepWork, TailWork
from worker_svc.masks.source import READY, Answer
from worker_svc.sim.cost import FlashOnH200, Load
from worker_svc.sim.executor import SimExecutor, Waiting
from worker_svc.sim.loading import load, plain_ids, pool_sizes
from worker_svc.sim.state import SlotArrays

EOS = 1
INFO = ModelInfo(name="s", revision="r", vocab_size=500, max_context=9999, eos_ids=(EOS,), kv_layout_id="k")
PAGES = range(10)


def device(**options):
    waiting = Waiting(**{key: options.pop(key) for key in ("spin", "threaded", "masks_after") if key in options})
    cost = FlashOnH200(step_ms=options.pop("step_ms", 0.001))
    return SimExecutor(INFO, SlotArrays(6, 4, range(3, 500), EOS, **options), cost, waiting)


def init(slot=0, start=0, n_emitted=0, choice=0, seed=5, **params):
    params = SamplingParams(**{"max_tokens": 1000, **params})
    stops = frozenset(params.stop_ids if params.ignore_eos else (*params.stop_ids, EOS))
    return SlotInit(slot=slot, params=params, seed=seed, choice=choice, n_emitted=n_emitted, start=start, stops=stops)


def step(executor, *rows, **work):
    return [row.tokens for row in executor.collect(executor.launch(StepWork(rows=rows, **work))).rows]


def chunk(ids, slot=0, start=0, **fields):
    return RowWork(slot=slot, start=start, ids=tuple(ids), pages=PAGES, **fields)


def decode(executor, count, slot=0, spare=-1):
    tokens = []
    for _ in range(count):
        (drawn,) = step(executor, RowWork(slot=slot, pages=PAGES, spare=spare))
        tokens += drawn
    return tokens


def answer(ids, count, **params):
    executor = device()
    (first,) = step(executor, chunk(ids), inits=(init(**params),))
    return [*first, *decode(executor, count - 1)]


def prompt(length):
    return [3 + at * 7 % 400 for at in range(length)]


@pytest.mark.parametrize(
    ("load", "ms"),
    [
        (Load(1, 4096), 2.62),
        (Load(64, 64 * 4096), 29.1),
        (Load(256, 256 * 4096), 39.1),
        (Load(256, 256 * 65536), 42.1),
        (Load(chunk_tokens=4096, chunk_context=4096 * 2048), 104),
        (Load(chunk_tokens=16384, chunk_context=16384 * 8192), 425),
    ],
)
def test_times_are_those_of_the_roofline(load, ms):
    assert FlashOnH200().floor_s(load) * 1e3 == pytest.approx(ms, rel=0.02)
    assert FlashOnH200(efficiency=0.5, gpus=4).step_ns(load) == pytest.approx(ms * 1e6 / 2, rel=0.02)
    assert FlashOnH200(efficiency=1.0).scaled(3).step_ns(load) == pytest.approx(ms * 3e6, rel=0.02)


def test_an_answer_follows_from_context_seed_choice_and_position():
    wanted = answer(prompt(40), 30)
    assert len(set(wanted)) > 20
    assert answer(prompt(40), 30) == wanted
    others = [answer(prompt(41), 30), answer(prompt(40), 30, seed=6), answer(prompt(40), 30, choice=1)]
    others.append(answer(prompt(40), 30, n_emitted=1))
    assert all(sum(a == b for a, b in zip(wanted, other, strict=True)) < 5 for other in others)


@pytest.mark.parametrize("cuts", [(7,), (1, 2, 300), (256,), (31, 33, 299)])
def test_chunks_and_resumed_ids_lead_to_the_same_answer(cuts):
    ids = prompt(301)
    wanted = answer(ids, 12)
    executor = device()
    bounds = [0, *cuts, 301]
    for start, end in itertools.pairwise(bounds):
        inits = (init(),) if not start else ()
        (first,) = step(executor, chunk(ids[start:end], start=start, sample_last=int(end == 301)), inits=inits)
    assert [*first, *decode(executor, 11)] == wanted
    resumed = device()
    (again,) = step(resumed, chunk([*ids, *wanted[:5]]), inits=(init(n_emitted=5),))
    assert [*again, *decode(resumed, 6)] == wanted[5:]


def test_forks_tails_and_replays_continue_the_same_answer():
    ids = prompt(300)
    wanted = answer(ids, 20)
    executor = device()
    step(executor, chunk(ids[:-1], sample_last=0), inits=(init(),), saves=(TailWork(0, 256, 2),))
    copied = step(
        executor, chunk(ids[-1:], slot=1, start=299), inits=(init(slot=1, start=299),), copies=(CopyWork(0, 1, 1, 2),)
    )
    assert [*copied[0], *decode(executor, 19, slot=1)] == wanted
    from_tail = step(
        executor,
        chunk(ids[256:], slot=2, start=256),
        inits=(init(slot=2, start=256),),
        tail_loads=(TailWork(2, 256, 2),),
    )
    assert [*from_tail[0], *decode(executor, 19, slot=2)] == wanted
    replay = chunk(ids[100:], slot=3, start=100, write_from=256, fresh_from=100)
    (first,) = step(executor, replay, inits=(init(slot=3, start=100),))
    assert [*first, *decode(executor, 19, slot=3)] == wanted


def test_a_spare_holds_the_last_boundary_that_decode_crossed():
    ids = prompt(250)
    executor = device()
    (first,) = step(executor, chunk(ids), inits=(init(),))
    drawn = [*first, *decode(executor, 20, spare=3)]
    (again,) = step(
        executor,
        chunk([*ids, *drawn][256:260], slot=1, start=256),
        inits=(init(slot=1, start=256, n_emitted=10),),
        tail_loads=(TailWork(1, 256, 3),),
    )
    assert again[0] == drawn[10]


def test_ends_are_found_on_the_device():
    wanted = answer(prompt(10), 30)
    at = next(i for i in range(5, 30) if wanted[i] not in wanted[:i])
    executor = device()
    (first,) = step(executor, chunk(prompt(10)), inits=(init(stop_ids=(wanted[at],)),))
    assert [*first, *decode(executor, 29)] == wanted[: at + 1]
    assert len(answer(prompt(10), 30, max_tokens=4)) == 4
    executor = device(end_chance=0.2)
    ends = []
    for seed in range(40):
        (first,) = step(executor, chunk(prompt(10)), inits=(init(seed=seed, min_tokens=3),))
        ends.append([*first, *decode(executor, 60)])
    assert all(drawn[-1] == EOS and EOS not in drawn[:-1] and len(drawn) >= 3 for drawn in ends)
    assert 3 < sum(map(len, ends)) / 40 < 12
    (first,) = step(executor, chunk(prompt(10)), inits=(init(ignore_eos=True),))
    assert len(decode(executor, 60)) == 60


def test_rows_that_asked_get_logprobs_of_the_right_shape():
    executor = device()
    outcome = executor.collect(
        executor.launch(StepWork(rows=(chunk([5]), chunk([6], slot=1)), inits=(init(top_logprobs=2), init(slot=1))))
    )
    asked, other = outcome.rows
    assert asked.logprobs[0].ids[0] == asked.tokens[0] and len(asked.logprobs[0].values) == 3 and not other.logprobs


@pytest.mark.parametrize("spin", [False, True])
def test_steps_take_their_time_one_behind_the_other(spin):
    executor = device(step_ms=20.0, spin=spin)
    began = time.monotonic_ns()
    handles = [executor.launch(StepWork(rows=(chunk([5]),), inits=(init(),))) for _ in range(3)]
    outcomes = [executor.collect(handle) for handle in handles]
    assert time.monotonic_ns() - began >= 60_000_000
    assert [b.t_start_ns - a.t_end_ns for a, b in itertools.pairwise(outcomes)] == [0, 0]
    assert all(outcome.t_end_ns - outcome.t_start_ns == 20_000_000 for outcome in outcomes)


def test_pools_follow_from_memory_and_are_refused_when_too_small():
    pools = pool_sizes(WorkerConfig(backend="sim"))
    assert (pools.slots, pools.tails) == (256, 1024) and 55_000 < pools.pages < 65_000
    assert pool_sizes(WorkerConfig(slots=8, pages=64, tails=9)).pages == 64
    with pytest.raises(MemoryShort, match="8 slots and 32 tails"):
        pool_sizes(WorkerConfig(slots=8, kv_memory=1 << 20))


@pytest.mark.parametrize("field", [{"sim_efficiency": 0.0}, {"sim_gpus": 0}, {"sim_step_ms": -1.0}, {"slots": -1}])
def test_bad_numbers_are_refused(field):
    with pytest.raises(FieldError):
        WorkerConfig(**field)


def test_it_speaks_the_model_folders_vocabulary_and_loads_no_torch():
    loaded = load(WorkerConfig(backend="sim"))
    vocab = loaded.info.vocab_size
    assert loaded.info.max_context == 1 << 20
    assert 0 not in plain_ids(DEFAULT_MODEL, vocab) and 1000 < len(plain_ids(DEFAULT_MODEL, vocab)) < vocab
    code = "import sys, worker_svc.sim.loading, worker_svc.servicer; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=root, env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
    )


class Masks:
    """Allows `ids`, parks the asks that `parks` names by their number."""

    words = 16

    def __init__(self, ids, parks=(), fault=None):
        self.row = np.zeros(16, np.int32)
        for i in ids:
            self.row[i >> 5] |= np.uint32(1 << (i & 31)).astype(np.int32)
        self.parks, self.fault, self.asked, self.bound, self.told = set(parks), fault, [], [], []

    def bind(self, inits):
        self.bound += [init.slot for init in inits if init.grammar_id]

    def take(self, asks, out, *, wait_s, alone):
        answers = []
        for ask, row in zip(asks, out, strict=False):
            row[:] = self.row
            parked = len(self.asked) in self.parks
            self.asked.append((ask.slot, ask.slot_gen, ask.position, alone))
            answers.append(Answer(False, self.fault) if parked else READY)
        return answers

    def tell(self, rows):
        self.told += rows


def constrained(masks, ids, count, slot=0, **params):
    """Tokens of a constrained slot; rows that are parked run again."""
    executor = device()
    executor.use_masks(masks)
    start = replace(init(slot, **params), grammar_id=b"g" * 16, slot_gen=3)
    tokens = list(step(executor, chunk(ids, slot), inits=(start,))[0])
    tries = 0
    while len(tokens) < count and tries < 4 * count and not executor._slots.finished[slot]:
        tries += 1
        tokens += decode(executor, 1, slot)
    return tokens


def test_constrained_rows_draw_what_is_allowed_and_end_where_they_may():
    masks = Masks([10, 47, 300, 499])
    tokens = constrained(masks, prompt(40), 50)
    assert set(tokens) == {10, 47, 300, 499} and masks.bound == [0]
    assert [t.position for t in masks.told] == list(range(50)) and [t.tokens[0] for t in masks.told] == tokens
    assert masks.asked[7] == (0, 3, 7, True) and not any(t.ended for t in masks.told)
    masks = Masks([10, EOS])
    tokens = constrained(masks, prompt(40), 50, min_tokens=5)
    assert tokens[-1] == EOS and set(tokens[:-1]) == {10} and 5 < len(tokens) < 50
    assert [t.ended for t in masks.told] == [False] * (len(tokens) - 1) + [True]
    assert constrained(Masks([EOS]), prompt(4), 9, min_tokens=5) == [EOS], "nothing but the end is allowed"
    assert constrained(Masks([]), prompt(4), 9) == []


@pytest.mark.parametrize("masks_after", [False, True])
def test_masks_are_taken_while_the_forward_runs_and_tokens_told_at_its_end(masks_after):
    executor, masks, times = device(step_ms=150.0, masks_after=masks_after), Masks([10]), []
    take, tell = masks.take, masks.tell
    masks.take = lambda *args, **options: [times.append(time.monotonic_ns()), take(*args, **options)][1]
    masks.tell = lambda rows: [times.append(time.monotonic_ns()), tell(rows)][1]
    executor.use_masks(masks)
    start = replace(init(), grammar_id=b"g" * 16)
    outcome = executor.collect(executor.launch(StepWork(rows=(chunk(prompt(9)),), inits=(start,))))
    forward_end = outcome.t_start_ns + 150_000_000
    assert (times[0] >= forward_end) == masks_after and times[1] >= outcome.t_end_ns
    assert (outcome.t_end_ns > forward_end) == masks_after


def test_parked_rows_run_again_and_change_nothing():
    ids = [10, 11, 47, 300, 301, 499]
    wanted = constrained(Masks(ids), prompt(40), 30)
    masks = Masks(ids, parks=[0, 1, 5, 6, 7, 20, 33])
    assert constrained(masks, prompt(40), 30) == wanted
    assert len(masks.asked) == 37 and len(masks.told) == 30


def test_a_fault_of_the_masks_ends_the_row():
    fault = Fault("grammar_failed", "no")
    executor, masks = device(), Masks([10], parks=[2], fault=fault)
    executor.use_masks(masks)
    start = replace(init(), grammar_id=b"g" * 16)
    outcomes = [executor.collect(executor.launch(StepWork(rows=(chunk(prompt(9)),), inits=(start,)))).rows[0]]
    outcomes += [
        executor.collect(executor.launch(StepWork(rows=(RowWork(slot=0, pages=PAGES),)))).rows[0] for _ in range(3)
    ]
    assert [o.tokens for o in outcomes] == [(10,), (10,), (), ()] and [o.fault for o in outcomes[2:]] == [fault, None]
    assert masks.told[-1].ended and masks.told[-1].tokens == ()


def test_steps_behind_a_constrained_one_are_computed_in_order():
    plain = answer(prompt(40), 8)
    executor, masks = device(), Masks([10, 11])
    executor.use_masks(masks)
    start = replace(init(1), grammar_id=b"g" * 16)
    first = executor.launch(StepWork(rows=(chunk(prompt(9), slot=1),), inits=(start,)))
    again = executor.launch(StepWork(rows=(chunk(prompt(40)), RowWork(slot=1, pages=PAGES)), inits=(init(),)))
    last = executor.launch(StepWork(rows=(RowWork(slot=0, pages=PAGES),), inits=(init(1),)))
    results = [executor.collect(handle).rows for handle in (first, again, last)]
    assert results[1][0].tokens + results[2][0].tokens == tuple(plain[:2])
    assert not masks.asked[1][3], "the other row does not wait"
    direct = executor.launch(StepWork(rows=(RowWork(slot=0, pages=PAGES),)))
    assert direct.rows is not None and executor.collect(direct).rows[0].tokens == (plain[2],)


def test_given_and_allowed_ids_are_heeded():
    plain = answer(prompt(9), 6)
    given = answer(prompt(9), 6, given_ids=(77, 78, 79), top_logprobs=0)
    assert given[:3] == [77, 78, 79] and given[3:] != plain[3:]
    assert set(answer(prompt(9), 30, allowed_ids=(20, 300, 450))) == {20, 300, 450}
    assert plain[2] not in answer(prompt(9), 30, bad_words=((plain[2],),))


def test_values_of_further_ids_follow_the_alternatives():
    executor = device()
    work = StepWork(rows=(chunk(prompt(9)),), inits=(init(top_logprobs=2, logprob_ids=(400, 7)),))
    (row,) = executor.collect(executor.launch(work)).rows
    assert row.logprobs[0].ids[3:] == (400, 7) and len(row.logprobs[0].values) == 5
