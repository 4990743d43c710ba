"""The worker's slot machine against a scripted scheduler: frames in, executor work and results out."""

from random import Random

import numpy as np
import pytest

from meshkit.core import Close, Closed, Count, Dial, Opened, Received, Send, Tick, WakeAt
from meshkit.frames import (
    Dump,
    Envelope,
    Heartbeat,
    PageAppend,
    PublishedPage,
    PublishedTail,
    ResultFrame,
    RowFault,
    RowState,
    SlotCopy,
    SlotFree,
    SlotInit,
    Spare,
    StepFrame,
    TailLoad,
    TailSave,
    WorkerHello,
    WorkerHelloAck,
)
from meshkit.types import ModelInfo, RequestId, SamplingParams, TokenLogprobs
from worker_svc.core.dump import dump_frames
from worker_svc.core.effects import Freed, Ran, Run
from worker_svc.core.slots import SlotMachine, SlotMachineConfig
from worker_svc.core.table import PoolConfig
from worker_svc.core.work import GRAMMAR_FAILED, Fault, RowOutcome, StepOutcome, TailWork

MS = 1_000_000
EOS = 1
MODEL = ModelInfo(name="m", revision="r", vocab_size=1000, max_context=4096, eos_ids=(EOS,), kv_layout_id="k")
RID = RequestId(b"r" * 16)


def i32(*values):
    return np.array(values, np.int32)


class Rig:
    """A machine with a dialled stream; `step` sends a frame and answers its Run."""

    def __init__(self, **config):
        pools = PoolConfig(slots=4, pages=16, tails=8, max_step_tokens=2048)
        self.machine = SlotMachine(
            SlotMachineConfig(group="g", boot=7, build="b", model=MODEL, pools=pools, **config), Random(1)
        )
        self.now = 0
        self.conn = 0
        self.attach_id = 0
        self.steps = 0

    def __call__(self, event):
        return self.machine.handle(event, self.now)

    def attach(self, attach_id=77):
        out = self(Tick())
        (dial,) = [effect for effect in out if isinstance(effect, Dial)]
        self.conn, self.attach_id, self.steps = dial.conn, attach_id, 0
        self.hello = sent(self(Opened(self.conn, "scheduler")), WorkerHello)[0]
        return self(Received(self.conn, Envelope(attach_id, WorkerHelloAck(3))))

    def receive(self, frame, attach_id=None):
        return self(Received(self.conn, Envelope(self.attach_id if attach_id is None else attach_id, frame)))

    def frame(self, **fields):
        self.steps += 1
        return self.receive(StepFrame(step=self.steps, **fields))

    def step(self, *tokens, logprobs=(), **fields):
        """Send a frame whose rows sample these tokens (None = nothing); returns (work, result, effects of Ran)."""
        (run,) = only(self.frame(**fields), Run)
        rows = tuple(RowOutcome(() if token is None else (token,), logprobs) for token in tokens)
        out = self(Ran(StepOutcome(rows=rows, t_start_ns=1, t_end_ns=2)))
        (result,) = sent(out, ResultFrame)
        return run.work, result, out

    def slot(self, number=0):
        return self.machine.table.slots[number]


def only(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects, kind):
    return [effect.envelope.frame for effect in only(effects, Send) if isinstance(effect.envelope.frame, kind)]


def faults(effects):
    return [effect.name for effect in only(effects, Count) if effect.fault]


def init(slot=0, gen=1, start=0, n_emitted=0, grammar=None, **params):
    return SlotInit(
        **(grammar or {}),
        slot=slot,
        slot_gen=gen,
        request_id=RID,
        attempt=1,
        choice=0,
        params=SamplingParams(**{"max_tokens": 100, **params}),
        seed=5,
        start=start,
        n_emitted=n_emitted,
    )


def chunk(*chunks):
    """Columns for (row, start, ids, write_from, sample) chunks."""
    return {
        "chunk_rows": i32(*[c[0] for c in chunks]),
        "chunk_starts": i32(*[c[1] for c in chunks]),
        "chunk_lens": i32(*[len(c[2]) for c in chunks]),
        "chunk_write_froms": i32(*[c[3] for c in chunks]),
        "chunk_samples": np.array([c[4] for c in chunks], np.uint8),
        "chunk_ids": i32(*[token for c in chunks for token in c[2]]),
    }


def start_frame(length=10, sample=1, pages=(0,), slot=0, gen=1, **params):
    return {
        "slots": i32(slot),
        "inits": (init(slot, gen, **params),),
        "appends": tuple(PageAppend(slot, page) for page in pages),
        **chunk((0, 0, list(range(10, 10 + length)), 0, sample)),
    }


@pytest.fixture
def rig():
    rig = Rig()
    rig.attach()
    return rig


def test_attach_says_hello_then_dumps():
    rig = Rig()
    out = rig.attach()
    assert rig.hello.group == "g" and rig.hello.boot == 7 and rig.hello.slots == 4 and rig.hello.max_gen == 0
    assert sent(out, Dump) == [Dump(last=True)]
    assert sent(out, Heartbeat) == [Heartbeat(0, 0)]


def test_prefill_then_decode(rig):
    work, result, _ = rig.step(42, **start_frame(10))
    assert work.inits[0].seed == 5 and work.rows[0].ids == tuple(range(10, 20)) and work.rows[0].out_pos == 0
    assert list(result.states) == [RowState.SAMPLED] and list(result.tokens) == [42] and result.step == 1
    work, result, _ = rig.step(43, slots=i32(0))
    assert (work.rows[0].ids, list(work.rows[0].pages)) == ((), [0]), "the device knows what comes next"
    assert (rig.slot().length, rig.slot().next, rig.slot().n_emitted) == (11, 43, 2)


def test_frames_are_launched_at_once_and_booked_in_order(rig):
    assert only(rig.frame(**start_frame(10)), Run)
    assert len(only(rig.frame(slots=i32(0)), Run)) == len(only(rig.frame(slots=i32(0)), Run)) == 1
    for step, token in enumerate((42, 43, 44), 1):
        (result,) = sent(rig(Ran(StepOutcome(rows=(RowOutcome((token,)),)))), ResultFrame)
        assert (result.step, list(result.tokens)) == (step, [token])
    assert (rig.slot().length, rig.slot().next, rig.slot().fed, rig.slot().sampling) == (12, 44, 12, 0)


def test_a_slot_that_finishes_with_frames_under_way_is_masked_in_them(rig):
    rig.frame(**start_frame(10))
    rig.frame(slots=i32(0))
    rig.frame(slots=i32(0))
    states = []
    for tokens in ((EOS,), (), ()):
        (result,) = sent(rig(Ran(StepOutcome(rows=(RowOutcome(tokens),)))), ResultFrame)
        states += list(result.states)
    assert states == [RowState.FINISHED, RowState.FINISHED_BEFORE, RowState.FINISHED_BEFORE]
    assert rig.slot().length == 9


def test_a_slot_freed_and_given_away_while_a_step_runs_is_booked_for_its_old_owner(rig):
    rig.frame(**start_frame(10))
    rig.frame(slots=i32(0))
    rig.frame(frees=(SlotFree(0, 1),), **start_frame(7, gen=2, pages=(3,)))
    for token in (42, 43):
        (result,) = sent(rig(Ran(StepOutcome(rows=(RowOutcome((token,)),)))), ResultFrame)
        assert list(result.states) == [RowState.SAMPLED] and list(result.tokens) == [token]
    assert (rig.slot().gen, rig.slot().fed, rig.slot().n_emitted) == (2, 7, 0)


def test_a_chunk_behind_a_sample_waits_for_it(rig):
    rig.frame(**start_frame(10))
    assert not only(rig.frame(slots=i32(0), **chunk((0, 10, [42], 0, 1))), Run)
    out = rig(Ran(StepOutcome(rows=(RowOutcome((42,)),))))
    (run,) = only(out, Run)
    assert (run.work.rows[0].start, run.work.rows[0].ids) == (10, (42,))


def test_rows_parked_with_frames_under_way_never_need_more_than_their_pages(rig):
    rig.frame(**start_frame(255))
    rig.frame(slots=i32(0))
    rig(Ran(StepOutcome(rows=(RowOutcome(()),))))
    assert rig.slot().fed == 255
    assert only(rig.frame(slots=i32(0)), Run)
    out = rig.frame(slots=i32(0))
    assert not sent(out, ResultFrame), "its error waits for the frames in front of it"
    rig(Ran(StepOutcome(rows=(RowOutcome((42,)),))))
    out = rig(Ran(StepOutcome(rows=(RowOutcome((43,)),))))
    assert [result.error[:8] for result in sent(out, ResultFrame)] == ["", "no_page:"]


@pytest.mark.parametrize(
    ("token", "params", "finished"),
    [
        (EOS, {}, True),
        (EOS, {"ignore_eos": True}, False),
        (9, {"stop_ids": (9,)}, True),
        (9, {"stop_ids": (9,), "ignore_eos": True}, True),
        (9, {"max_tokens": 1}, True),
        (9, {"max_tokens": 2}, False),
    ],
)
def test_finish(rig, token, params, finished):
    _, result, _ = rig.step(token, **start_frame(10, **params))
    assert list(result.states) == [RowState.FINISHED if finished else RowState.SAMPLED]
    assert list(result.tokens) == [token]
    assert rig.slot().finished is finished
    assert rig.slot().length == (9 if finished else 10)


def test_finished_slot_in_a_later_frame_is_skipped(rig):
    rig.step(EOS, **start_frame(10))
    rig.step(5, **start_frame(10, slot=1, gen=2, pages=(1,)))
    work, result, _ = rig.step(6, slots=i32(0, 1))
    assert [row.slot for row in work.rows] == [1]
    assert list(result.states) == [RowState.FINISHED_BEFORE, RowState.SAMPLED] and list(result.counts) == [0, 1]


def test_parked_rows_rerun_exactly(rig):
    _, result, _ = rig.step(None, **start_frame(10))
    assert list(result.states) == [RowState.PARKED] and not len(result.tokens)
    for _ in range(2):
        rig.step(None, slots=i32(0))
        assert (rig.slot().length, rig.slot().next, rig.slot().n_emitted) == (9, 19, 0)
    _, result, _ = rig.step(42, slots=i32(0))
    assert list(result.tokens) == [42] and rig.slot().length == 10


def test_spare_is_saved_in_the_forward_when_certain(rig):
    work, result, _ = rig.step(42, **start_frame(300, pages=(0, 1)), spares=(Spare(0, 3),))
    assert work.saves == (TailWork(0, 256, 3),)
    assert list(result.spare_rows) == [0] and list(result.spare_positions) == [256]
    assert rig.slot().spare_pos == 256


@pytest.mark.parametrize(("token", "refreshed"), [(42, True), (None, False), (EOS, False)])
def test_spare_at_the_end_of_a_sampling_chunk_waits_for_the_sample(rig, token, refreshed):
    work, result, _ = rig.step(token, **start_frame(256), spares=(Spare(0, 3),))
    assert work.saves == () and work.rows[0].spare == 3
    assert list(result.spare_positions) == ([256] if refreshed else [])


@pytest.mark.parametrize("taken", [False, True])
def test_spare_in_decode_is_current_once_booked_unless_it_was_taken_meanwhile(rig, taken):
    rig.step(42, **start_frame(255), spares=(Spare(0, 3),))
    (run,) = only(rig.frame(slots=i32(0)), Run)
    assert run.work.rows[0].spare == 3
    spares = (Spare(0, 4),) if taken else ()
    (run,) = only(rig.frame(slots=i32(0), appends=(PageAppend(0, 1),), spares=spares), Run)
    assert run.work.rows[0].spare == (4 if taken else 3)
    (result,) = sent(rig(Ran(StepOutcome(rows=(RowOutcome((43,)),)))), ResultFrame)
    assert list(result.spare_positions) == ([] if taken else [256])
    assert rig.slot().spare_pos == (0 if taken else 256)


def test_tail_save_and_load(rig):
    work, _, _ = rig.step(
        None,
        **start_frame(300, sample=0, pages=(0, 1)),
        tail_saves=(TailSave(0, 256, 2),),
        publishes=(PublishedPage(0, 9, -1, b"k" * 16),),
        publish_tails=(PublishedTail(2, 0),),
    )
    assert work.saves == (TailWork(0, 256, 2),)
    work, _, _ = rig.step(
        42,
        slots=i32(1),
        inits=(init(1, 10, start=256),),
        appends=(PageAppend(1, 0), PageAppend(1, 5)),
        tail_loads=(TailLoad(1, 2),),
        **chunk((0, 256, [7, 8], 0, 1)),
    )
    assert work.tail_loads == (TailWork(1, 256, 2),) and work.rows[0].fresh_from == 0


def test_exact_replay_masks_what_is_below_its_start(rig):
    rig.step(None, **start_frame(256, sample=0), publishes=(PublishedPage(0, 9, -1, b"k" * 16),))
    work, _, _ = rig.step(
        42,
        slots=i32(1),
        inits=(init(1, 10, start=100),),
        appends=(PageAppend(1, 0), PageAppend(1, 5)),
        **chunk((0, 100, list(range(200)), 256, 1)),
    )
    assert (work.rows[0].fresh_from, work.rows[0].write_from) == (100, 256)


def test_slot_copy_takes_the_length_and_the_partial_page(rig):
    rig.step(None, **start_frame(9, sample=0))
    work, _, _ = rig.step(
        1,
        2,
        slots=i32(0, 1),
        inits=(init(1, 2, start=9),),
        copies=(SlotCopy(0, 1, 0, 4),),
        appends=(PageAppend(1, 4),),
        **chunk((0, 9, [50], 0, 1), (1, 9, [50], 0, 1)),
    )
    assert (work.copies[0].src_page, work.copies[0].dst_page) == (0, 4)
    assert [row.start for row in work.rows] == [9, 9]


def test_logprobs_are_sent_only_for_rows_that_asked(rig):
    entry = TokenLogprobs((42, 7), (-0.5, -1.5))
    _, result, _ = rig.step(42, logprobs=(entry,), **start_frame(10, top_logprobs=1))
    assert list(result.logprobs.rows) == [0] and list(result.logprobs.ids) == [42, 7]
    _, result, _ = rig.step(42, logprobs=(entry,), **start_frame(10, slot=1, gen=2, pages=(1,)))
    assert not len(result.logprobs.rows)


PUBLISHED = {"publishes": (PublishedPage(0, 9, -1, b"k" * 16),)}


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("slot_unknown", {"slots": i32(3)}),
        ("out_of_range", {"slots": i32(4)}),
        ("out_of_range", {"slots": i32(-1)}),
        ("columns", {"slots": i32(0, 0)}),
        ("columns", {"slots": i32(0), "rank_off": i32(0, 2)}),
        ("bad_start", {"slots": i32(0), **chunk((0, 9, [1], 0, 1))}),
        ("bad_chunk", {"slots": i32(0), **chunk((0, 10, [1], 0, 1))}),
        ("columns", {"slots": i32(0), **chunk((1, 10, [1], 0, 1))}),
        ("columns", {"slots": i32(0), **chunk((0, 10, [1], 0, 1)), "chunk_lens": i32(2)}),
        ("columns", {"slots": i32(0), **chunk((0, 10, [1], 0, 1)), "chunk_lens": i32()}),
        ("out_of_range", {"slots": i32(0), **chunk((0, 10, [1000], 0, 1))}),
        ("no_page", {"slots": i32(0), **chunk((0, 10, [42] * 250, 0, 1))}),
        ("too_many_tokens", {"slots": i32(0), **chunk((0, 10, [42] * 2049, 0, 1))}),
        ("slot_busy", {"inits": (init(0, 2),)}),
        ("slot_gen", {"frees": (SlotFree(0, 2),)}),
        ("slot_gen", {"frees": (SlotFree(0, 1),), "inits": (init(0, 1),)}),
        ("retire_unknown", {"retire_pages": (0,)}),
        ("retire_unknown", {"retire_tails": (0,)}),
        ("out_of_range", {"appends": (PageAppend(0, 16),)}),
        ("out_of_range", {"spares": (Spare(0, 8),)}),
        ("bad_copy", {"inits": (init(1, 2),), "copies": (SlotCopy(0, 1, -1, -1),)}),
        ("bad_copy", {"copies": (SlotCopy(0, 0, 0, 0),)}),
        ("bad_load", {"slots": i32(0), "tail_loads": (TailLoad(0, 0),)}),
        ("bad_save", {"slots": i32(0), "tail_saves": (TailSave(0, 256, 0),)}),
        ("out_of_range", {"publishes": (PublishedPage(99, 9, -1, b"k" * 16),)}),
        ("bad_key", {"publishes": (PublishedPage(1, 9, -1, b"k"),)}),
        ("page_unpublished", {"publish_tails": (PublishedTail(1, 5),)}),
        ("bad_init", {"inits": (init(1, 0),)}),
    ],
)
def test_bad_frames_end_the_attachment_with_a_typed_error(rig, code, fields):
    rig.step(42, **start_frame(10))
    out = rig.frame(**fields)
    if run := only(out, Run):
        out = rig(Ran(StepOutcome(rows=tuple(RowOutcome((3,)) for _ in run[0].work.rows))))
    (result,) = sent(out, ResultFrame)
    assert result.step == 2 and result.error.startswith(code + ":")
    assert only(out, Close) and not rig.machine.attached
    assert faults(out) == [f"frame_error_{code}"]


@pytest.mark.parametrize("code", ["page_published", "page_shared", "page_in_use"])
def test_writes_into_pages_that_others_read(rig, code):
    rig.step(42, **start_frame(10))
    if code == "page_shared":
        rig.step(3, **start_frame(10, slot=1, gen=2, pages=(1,)))
        out = rig.frame(slots=i32(0), appends=(PageAppend(1, 0),))
    else:
        rig.step(43, slots=i32(0), **PUBLISHED)
        out = rig.frame(**({"slots": i32(0)} if code == "page_published" else {"retire_pages": (0,)}))
    assert faults(out) == [f"frame_error_{code}"]


def test_what_frames_under_way_publish_is_in_force_once_they_are_booked(rig):
    rig.step(42, **start_frame(256, pages=(0, 1)), spares=(Spare(0, 3),))
    table = rig.machine.table
    rig.frame(slots=i32(0), **PUBLISHED, publish_tails=(PublishedTail(3, 0),))
    out = rig.frame(slots=i32(0), retire_tails=(3,))
    assert not faults(out) and not table.published and table.is_published(0)
    rig(Ran(StepOutcome(rows=(RowOutcome((43,)),))))
    assert list(table.published) == [0] and not table.tails, "its tail was retired before it was there"


def test_what_a_failed_frame_and_those_behind_it_publish_is_not(rig):
    rig.step(42, **start_frame(256, pages=(0, 1)))
    rig.frame(slots=i32(0))
    rig.frame(slots=i32(0), **PUBLISHED)
    rig(Ran(None, "lost"))
    rig(Ran(None, "lost"))
    rig.now += 2000 * MS
    (dump,) = sent(rig.attach(78), Dump)
    assert not dump.pages and not rig.machine.table.is_published(0)
    assert (dump.slots[0].length, rig.slot().fed, rig.slot().sampling) == (256, 256, 0)


def test_a_page_may_be_retired_in_the_frame_that_frees_its_last_reader(rig):
    rig.step(42, **start_frame(10))
    rig.step(43, slots=i32(0), **PUBLISHED)
    out = rig.frame(retire_pages=(0,), frees=(SlotFree(0, 1),))
    assert sent(out, ResultFrame)[0].error == "" and not rig.machine.table.published


def test_an_error_drops_the_slots_it_touched_and_dumps_the_rest(rig):
    rig.step(42, **start_frame(10))
    second = start_frame(10, slot=1, gen=2, pages=(1,)) | chunk((1, 0, [1], 0, 1)) | {"slots": i32(0, 1)}
    rig.frame(**second)
    (behind,) = only(rig.frame(slots=i32(0)), Run)
    out = rig(Ran(None, "out of memory"))
    assert sent(out, ResultFrame)[0].error == "executor: out of memory" and not only(out, Run)
    rig.now += 2000 * MS
    assert not sent(rig.attach(78), Dump), "the step launched behind it has to come back first"
    (dump,) = sent(rig(Ran(None, "a step before it failed")), Dump)
    (run,) = only(rig.frame(slots=i32(0)), Run)
    assert run.era == behind.era + 1
    assert [slot.slot for slot in dump.slots] == [0]
    assert (dump.slots[0].length, dump.slots[0].next, dump.slots[0].last_ids) == (10, 42, (42,))
    assert rig.hello.max_gen == 2


def test_held_frames_run_after_the_scheduler_is_lost_and_the_dump_waits_for_them(rig):
    rig.frame(**start_frame(10))
    rig.frame(slots=i32(0))
    rig(Closed(rig.conn))
    rig.now += 200 * MS
    assert not sent(rig.attach(78), Dump)
    out = rig(Ran(StepOutcome(rows=(RowOutcome((42,)),))))
    assert not sent(out, ResultFrame) and not sent(out, Dump)
    (dump,) = sent(rig(Ran(StepOutcome(rows=(RowOutcome((43,)),)))), Dump)
    assert dump.slots[0].last_ids == (42, 43) and dump.last
    assert only(rig.frame(slots=i32(0)), Run)


def test_frames_of_an_old_attachment_or_stream_are_dropped(rig):
    rig.step(42, **start_frame(10))
    frame = StepFrame(step=2, slots=i32(0))
    assert only(rig.receive(frame, attach_id=76), Count) == [Count("stale_attach")]
    assert only(rig(Received(rig.conn + 9, Envelope(77, frame))), Count) == [Count("stale_conn")]
    assert only(rig.receive(frame), Run)


@pytest.mark.parametrize(("step", "code"), [(1, "frame_step"), (3, "frame_step"), (2, "")])
def test_step_numbers_are_contiguous(rig, step, code):
    rig.step(42, **start_frame(10))
    out = rig.receive(StepFrame(step=step, slots=i32(0)))
    assert faults(out) == ([f"frame_error_{code}"] if code else [])


def test_too_many_held_frames_end_the_attachment_after_the_good_ones_ran():
    rig = Rig(max_held=2)
    rig.attach()
    rig.frame(**start_frame(10))
    rig.frame(slots=i32(0))
    rig.frame(slots=i32(0))
    out = rig(Ran(StepOutcome(rows=(RowOutcome((42,)),))))
    assert not faults(out)
    out = rig(Ran(StepOutcome(rows=(RowOutcome((42,)),))))
    assert faults(out) == ["frame_error_too_many_frames"]


def test_slots_are_parked_30_s_then_freed(rig):
    rig.step(42, **start_frame(256), **PUBLISHED)
    rig(Closed(rig.conn))
    rig.now += 29_999 * MS
    rig(Tick())
    assert rig.machine.table.slots
    rig.now += 1 * MS
    out = rig(Tick())
    assert not rig.machine.table.slots and 0 in rig.machine.table.published
    assert Count("slots_dropped") in out


def test_heartbeats_carry_the_age_of_the_running_step(rig):
    rig.frame(**start_frame(10))
    rig.now += 500 * MS
    assert sent(rig(Tick()), Heartbeat) == [Heartbeat(1, 500)]


def test_a_silent_scheduler_is_given_up_and_dialled_again_with_backoff(rig):
    rig.now += 1999 * MS
    rig.receive(Heartbeat())
    rig.now += 1999 * MS
    assert not only(rig(Tick()), Close)
    rig.now += 1 * MS
    out = rig(Tick())
    assert only(out, Close) and not only(out, Dial)
    (wake,) = only(out, WakeAt)
    assert 50 * MS <= wake.at_ns - rig.now <= 100 * MS
    rig.now = wake.at_ns
    assert only(rig(Tick()), Dial)


def test_an_outcome_that_makes_no_sense_drops_every_slot_of_its_frames(rig):
    rig.step(42, **start_frame(10))
    rig.frame(slots=i32(0))
    out = rig(Ran(StepOutcome(rows=(RowOutcome((1000,)),))))
    assert faults(out) == ["frame_error_executor"] and not rig.machine.table.slots


@pytest.mark.parametrize("rows", [(), (RowOutcome((1, 2)),), (RowOutcome((1000,)),)])
def test_an_executor_that_breaks_its_promise_ends_the_attachment(rig, rows):
    rig.frame(**start_frame(10))
    out = rig(Ran(StepOutcome(rows=rows)))
    assert faults(out) == ["frame_error_executor"] and not rig.machine.table.slots


def test_big_dumps_are_chunked():
    rig = Rig()
    rig.attach()
    for page in range(16):
        entry = PublishedPage(page, page + 1, -1, b"k" * 16)
        rig.machine.table.publish(entry)
        rig.machine.table.booked((entry,), ())
    frames = dump_frames(rig.machine.table, limit=100)
    assert [len(frame.pages) for frame in frames] == [3, 3, 3, 3, 3, 1]
    assert [frame.last for frame in frames] == [False] * 5 + [True]


def test_frames_before_the_dump_are_refused():
    rig = Rig()
    rig.attach()
    rig.frame(**start_frame(10))
    rig(Closed(rig.conn))
    rig.now += 200 * MS
    rig.attach(78)
    rig.frame(slots=i32(0))
    out = rig(Ran(StepOutcome(rows=(RowOutcome((42,)),))))
    assert faults(out) == ["frame_error_early_frame"]


def test_spare_survives_replacement_in_the_frame_that_publishes_the_old_one(rig):
    rig.step(None, **start_frame(256, sample=0), spares=(Spare(0, 3),))
    rig.step(
        42,
        slots=i32(0),
        **chunk((0, 256, [7], 0, 1)),
        appends=(PageAppend(0, 1),),
        spares=(Spare(0, 4),),
        **PUBLISHED,
        publish_tails=(PublishedTail(3, 0),),
    )
    assert rig.slot().spare == 4 and rig.machine.table.tails == {3: 0}


GRAMMAR = {"grammar_id": b"g" * 16}
FAULT = Fault(GRAMMAR_FAILED, "outside the grammar")


def fails(rig, **fields):
    """A frame of one row, which fails; returns (result, effects)."""
    (run,) = only(rig.frame(**fields), Run)
    out = rig(Ran(StepOutcome(rows=(RowOutcome((), fault=FAULT),) * len(run.work.rows), t_start_ns=1, t_end_ns=2)))
    (result,) = sent(out, ResultFrame)
    return result, out


def test_a_grammar_reaches_the_executor_and_its_end_the_shell(rig):
    grammar = {**GRAMMAR, "thinking": True, "emitted": (7, 8)}
    work, _, out = rig.step(5, **start_frame(grammar=grammar, n_emitted=2))
    (started,) = work.inits
    assert (started.slot_gen, started.grammar_id, started.thinking, started.emitted) == (1, b"g" * 16, True, (7, 8))
    assert not only(out, Freed)
    rig.step(6, slots=i32(0))
    assert only(rig.frame(frees=(SlotFree(0, 1),)), Freed) == [Freed(0, 1)]
    rig.step(5, **start_frame(gen=2))
    assert not only(rig.frame(frees=(SlotFree(0, 2),)), Freed)  # it had no grammar


def test_a_fault_ends_its_slot_and_no_other(rig):
    rig.step(5, **start_frame(grammar=GRAMMAR))
    rig.step(5, **start_frame(slot=1, gen=2, pages=(1,)))
    (run,) = only(rig.frame(slots=i32(0, 1)), Run)
    (behind,) = only(rig.frame(slots=i32(1, 0)), Run)
    out = rig(Ran(StepOutcome(rows=(RowOutcome((), fault=FAULT), RowOutcome((9,))))))
    (result,) = sent(out, ResultFrame)
    assert result.states.tolist() == [RowState.FAILED, RowState.SAMPLED] and result.tokens.tolist() == [9]
    assert result.faults == (RowFault(0, GRAMMAR_FAILED, "outside the grammar"),)
    assert (rig.slot().length, rig.slot().finished) == (10, True)
    assert [effect.name for effect in only(out, Count)] == ["row_fault_grammar_failed"] and not faults(out)
    out = rig(Ran(StepOutcome(rows=(RowOutcome((4,)), RowOutcome(())))))
    assert sent(out, ResultFrame)[0].states.tolist() == [RowState.SAMPLED, RowState.FINISHED_BEFORE]
    assert len(run.work.rows) == len(behind.work.rows) == 2
    rig.step(4, slots=i32(1))
    assert rig.slot(1).n_emitted == 4


def test_a_failed_slot_is_in_no_dump(rig):
    fails(rig, **start_frame(grammar=GRAMMAR))
    out = rig(Closed(rig.conn))
    rig.now += 2000 * MS
    assert 0 in rig.machine.table.slots
    out = rig.attach(78)
    assert 0 not in rig.machine.table.slots and only(out, Freed) == [Freed(0, 1)]
    assert not [slot for dump in sent(out, Dump) for slot in dump.slots]


def test_rows_without_a_mask_are_counted(rig):
    rig.step(5, **start_frame(grammar=GRAMMAR))
    _, result, out = rig.step(None, slots=i32(0))
    assert result.states.tolist() == [RowState.PARKED]
    assert [(effect.name, effect.amount) for effect in only(out, Count)] == [("rows_parked", 1)]


@pytest.mark.parametrize(
    "grammar", [{"grammar_id": b"short"}, {**GRAMMAR, "emitted": (7,)}, {**GRAMMAR, "emitted": (7, 8, 9)}]
)
def test_a_grammar_needs_its_id_and_all_emitted_ids(rig, grammar):
    out = rig.frame(**start_frame(grammar=grammar, n_emitted=2))
    assert faults(out) == ["frame_error_bad_init"]


def test_a_fault_beside_tokens_or_without_a_sample_breaks_the_executors_promise(rig):
    rig.step(5, **start_frame())
    rig.frame(slots=i32(0))
    out = rig(Ran(StepOutcome(rows=(RowOutcome((4,), fault=FAULT),))))
    assert faults(out) == ["frame_error_executor"]
