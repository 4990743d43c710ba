"""The wire codec: every frame survives a round trip; whatever arrives, only WireError is raised."""

import contextlib
import math
import time
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meshpb.v1 import scheduler_pb2, worker_pb2

from meshkit import frames as f
from meshkit import wire
from meshkit.errors import WireError
from meshkit.types import FinishReason, ModelInfo, SamplingParams

FAST = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

U31 = st.integers(0, 2**31 - 1)
U32 = st.integers(0, 2**32 - 1)
U63 = st.integers(0, 2**63 - 1)
U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
KEY = st.binary(min_size=16, max_size=16)
FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(0, 100, width=32)
INTS = st.lists(U31, max_size=5).map(tuple)


def same(a, b):
    """Deep equality of frames that hold arrays."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, x.name), getattr(b, x.name)) for x in fields(a))
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def i32(n, values=U31):
    return st.lists(values, min_size=n, max_size=n).map(lambda x: np.array(x, np.int32))


def u8(n, high=255):
    return st.lists(st.integers(0, high), min_size=n, max_size=n).map(lambda x: np.array(x, np.uint8))


@st.composite
def params(draw):
    return SamplingParams(
        temperature=draw(POSITIVE),
        top_k=draw(U31),
        top_p=draw(st.floats(0, 1, width=32)),
        min_p=draw(st.floats(0, 1, width=32)),
        presence_penalty=draw(st.floats(-2, 2, width=32)),
        frequency_penalty=draw(st.floats(-2, 2, width=32)),
        repetition_penalty=draw(POSITIVE),
        max_tokens=draw(U31),
        min_tokens=draw(U31),
        ignore_eos=draw(st.booleans()),
        stop_ids=draw(INTS),
        bias=tuple(draw(st.lists(st.tuples(U31, FLOAT), max_size=3))),
        top_logprobs=draw(st.integers(-1, 20)),
        logprob_ids=draw(INTS),
        allowed_ids=draw(INTS),
        bad_words=tuple(draw(st.lists(st.lists(U31, min_size=1, max_size=4).map(tuple), max_size=3))),
        given_ids=draw(INTS),
    )


MODEL = st.builds(
    ModelInfo,
    name=TEXT,
    revision=TEXT,
    vocab_size=st.integers(1, 2**31 - 1),
    max_context=st.integers(1, 2**31 - 1),
    eos_ids=INTS,
    kv_layout_id=TEXT,
    layers=U31,
)


@st.composite
def logprobs(draw, n):
    rows = draw(st.lists(st.integers(0, n - 1), max_size=4)) if n else []
    widths = draw(st.lists(st.integers(1, 3), min_size=len(rows), max_size=len(rows)))
    total = sum(widths)
    value = st.floats(width=32, allow_nan=False, allow_infinity=True)
    values = draw(st.lists(value, min_size=total, max_size=total))
    return f.LogprobColumns(
        np.array(rows, np.int32), np.array(widths, np.uint8), draw(i32(total)), np.array(values, np.float32)
    )


@st.composite
def token_frame(draw):
    n = draw(st.integers(0, 5))
    counts = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    errors = draw(st.lists(st.builds(f.RowError, st.integers(0, n - 1), TEXT, TEXT), max_size=n)) if n else []
    waited = draw(st.lists(st.integers(0, n - 1), max_size=n)) if n else []
    return f.TokenFrame(
        step=draw(U64),
        rows=draw(i32(n)),
        row_gens=draw(i32(n)),
        bases=draw(i32(n)),
        counts=np.array(counts, np.int32),
        ids=draw(i32(sum(counts))),
        finishes=draw(u8(n, max(FinishReason))),
        cached=draw(i32(draw(st.sampled_from([0, n])))),
        logprobs=draw(logprobs(n)),
        errors=tuple(errors),
        waited_rows=np.array(waited, np.int32),
        waited_ms=draw(i32(len(waited))),
    )


@st.composite
def columns_frame(draw, cls, count):
    n = draw(st.integers(0, 4))
    return cls(*(draw(i32(n)) for _ in range(count)))


PAGES = st.lists(st.builds(f.PublishedPage, U31, U63, st.integers(-1, 2**31 - 1), KEY), max_size=3).map(tuple)
TAILS = st.lists(st.builds(f.PublishedTail, U31, U31), max_size=3).map(tuple)
COPY = st.one_of(st.builds(f.SlotCopy, U31, U31, U31, U31), st.builds(f.SlotCopy, U31, U31, st.just(-1), st.just(-1)))
INIT = st.builds(
    f.SlotInit,
    slot=U31,
    slot_gen=U63,
    request_id=KEY,
    attempt=U31,
    choice=U31,
    params=params(),
    seed=U64,
    start=U31,
    n_emitted=U31,
    emitted=INTS,
    prompt=INTS,
)
DUMP_SLOT = st.builds(
    f.DumpSlot,
    slot=U31,
    slot_gen=U63,
    request_id=KEY,
    attempt=U31,
    choice=U31,
    length=U31,
    n_emitted=U31,
    next=U31,
    finished=st.booleans(),
    last_ids=INTS,
    pages=INTS,
    spare=st.integers(-1, 2**31 - 1),
    spare_pos=U31,
    grammar_id=st.just(b"") | KEY,
)


@st.composite
def step_frame(draw):
    n = draw(st.integers(0, 6))
    chunk_rows = draw(st.lists(st.integers(0, n - 1), unique=True, max_size=3)) if n else []
    c = len(chunk_rows)
    lens = draw(st.lists(st.integers(1, 4), min_size=c, max_size=c))
    cut = draw(st.integers(0, n))
    rank_off = draw(st.sampled_from([[], [0, n], [0, cut, n], [0, cut, cut, n]]))
    return f.StepFrame(
        step=draw(U64),
        slots=draw(i32(n)),
        rank_off=np.array(rank_off, np.int32),
        decode_only=draw(st.booleans()) and not c,
        chunk_rows=np.array(chunk_rows, np.int32),
        chunk_starts=draw(i32(c)),
        chunk_lens=np.array(lens, np.int32),
        chunk_write_froms=draw(i32(c)),
        chunk_samples=draw(u8(c, 1)),
        chunk_ids=draw(i32(sum(lens))),
        retire_pages=draw(INTS),
        retire_tails=draw(INTS),
        frees=tuple(draw(st.lists(st.builds(f.SlotFree, U31, U63), max_size=3))),
        inits=tuple(draw(st.lists(INIT, max_size=2))),
        spares=tuple(draw(st.lists(st.builds(f.Spare, U31, U31), max_size=3))),
        copies=tuple(draw(st.lists(COPY, max_size=3))),
        appends=tuple(draw(st.lists(st.builds(f.PageAppend, U31, U31), max_size=3))),
        tail_loads=tuple(draw(st.lists(st.builds(f.TailLoad, U31, U31), max_size=3))),
        tail_saves=tuple(draw(st.lists(st.builds(f.TailSave, U31, U31, U31), max_size=3))),
        publishes=draw(PAGES),
        publish_tails=draw(TAILS),
    )


@st.composite
def result_frame(draw):
    n = draw(st.integers(0, 5))
    counts = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    spare_rows = draw(st.lists(st.integers(0, n - 1), max_size=3)) if n else []
    return f.ResultFrame(
        step=draw(U64),
        t_start_ns=draw(U64),
        t_end_ns=draw(U64),
        states=draw(u8(n, max(f.RowState))),
        counts=np.array(counts, np.uint8),
        tokens=draw(i32(sum(counts))),
        spare_rows=np.array(spare_rows, np.int32),
        spare_positions=draw(i32(len(spare_rows))),
        logprobs=draw(logprobs(n)),
        jit_compiles=draw(U32),
        error=draw(TEXT),
    )


HEARTBEAT = st.builds(f.Heartbeat, U64, U64)
BYE = st.builds(f.Bye, TEXT)
STATUS = st.builds(
    f.SchedulerStatus,
    ready=st.booleans(),
    draining=st.booleans(),
    model=st.none() | MODEL,
    running=U32,
    waiting=U32,
    pages_total=U32,
    pages_free=U32,
    slots_total=U32,
    slots_free=U32,
    workers=U32,
    preemptions=U64,
    retry_after_ms=U32,
)
WORKER_HELLO = st.builds(
    f.WorkerHello,
    group=TEXT,
    boot=U64,
    build=TEXT,
    proto_rev=U32,
    model=MODEL,
    ranks=st.integers(1, 64),
    slots=st.integers(1, 4096),
    pages=st.integers(1, 1 << 20),
    tails=st.integers(0, 1 << 20),
    max_gen=U63,
    max_step_tokens=st.integers(1, 2**31 - 1),
    max_verify=st.integers(1, 64),
)
DUMP = st.builds(f.Dump, slots=st.lists(DUMP_SLOT, max_size=2).map(tuple), pages=PAGES, tails=TAILS, last=st.booleans())
FRAMES = {
    wire.Link.GATEWAY_UP: st.one_of(
        st.builds(f.GatewayHello, TEXT, U64, TEXT, U32),
        HEARTBEAT,
        columns_frame(f.CancelRows, 2),
        columns_frame(f.StopRows, 3),
        BYE,
    ),
    wire.Link.GATEWAY_DOWN: st.one_of(
        token_frame(), HEARTBEAT, STATUS, columns_frame(f.MovedRows, 3), st.builds(f.GatewayHelloAck, U64, TEXT), BYE
    ),
    wire.Link.WORKER_UP: st.one_of(result_frame(), DUMP, WORKER_HELLO, HEARTBEAT, BYE),
    wire.Link.WORKER_DOWN: st.one_of(step_frame(), st.builds(f.WorkerHelloAck, U64), HEARTBEAT, BYE),
}


@pytest.mark.parametrize("link", wire.Link)
def test_round_trip(link):
    @FAST
    @given(attach=U64, frame=FRAMES[link])
    def check(attach, frame):
        envelope = f.Envelope(attach, frame)
        assert same(envelope, wire.loads(wire.dumps(envelope, link), link))

    check()


SUBMIT = st.builds(
    f.Submit,
    attach_id=U64,
    request_id=KEY,
    attempt=st.integers(1, 2**31 - 1),
    choices=st.lists(st.builds(f.SubmitChoice, U31, U31, U31, INTS), min_size=1, max_size=3).map(tuple),
    params=params(),
    seed=U64,
    remaining_ms=U31,
    prompt=st.integers(0, 520).map(lambda n: np.arange(n, dtype=np.int32)),
    page_keys=st.just(()),
    tenant=TEXT,
    priority=st.integers(-(2**31), 2**31 - 1),
    kill_count=U31,
    traceparent=TEXT,
    namespace=st.sampled_from((b"", bytes(range(32)))),
)


@FAST
@given(SUBMIT, st.integers(0, 2))
def test_submit_round_trip(submit, keys):
    submit = replace(submit, page_keys=tuple(bytes([i]) * 16 for i in range(min(keys, len(submit.prompt) // 256))))
    message = scheduler_pb2.SubmitRequest.FromString(wire.encode_submit(submit).SerializeToString())
    assert same(submit, wire.decode_submit(message))


@pytest.mark.parametrize("size", [1, 16, 31, 33])
def test_a_namespace_has_32_bytes_or_none(size):
    message = wire.encode_submit(replace(_submit(), namespace=bytes(size)))
    with pytest.raises(WireError, match=f"namespace: {size} bytes; send 32"):
        wire.decode_submit(message)


@pytest.mark.parametrize(("tokens", "keys"), [(600, 1), (600, 3), (255, 1)])
def test_a_question_about_a_prompt_has_a_key_per_full_page(tokens, keys):
    ask = scheduler_pb2.ExplainRequest(tokens=tokens, page_keys=bytes(16 * keys))
    with pytest.raises(WireError, match=f"page_keys: {keys} keys"):
        wire.decode_explain(ask)
    right = tokens // 256
    ask = scheduler_pb2.ExplainRequest(tokens=tokens, page_keys=bytes(16 * right))
    assert len(wire.decode_explain(ask)) == right


@given(st.builds(f.SubmitReply, st.sampled_from(f.Verdict), TEXT, U31))
def test_submit_reply_round_trip(reply):
    assert wire.decode_submit_reply(wire.encode_submit_reply(reply)) == reply


@pytest.mark.parametrize("link", wire.Link)
def test_arbitrary_bytes_raise_only_wire_errors(link):
    seen = {"refused": 0}

    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=200))
    def check(data):
        try:
            wire.loads(data, link)
        except WireError:
            seen["refused"] += 1

    check()
    assert seen["refused"]


@pytest.mark.parametrize("link", wire.Link)
def test_damaged_frames_raise_only_wire_errors(link):
    """Valid messages with a few bytes changed, cut or doubled: closer to the checks than random bytes are."""

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(FRAMES[link], st.data())
    def check(frame, data):
        raw = bytearray(wire.dumps(f.Envelope(1, frame), link))
        for _ in range(data.draw(st.integers(1, 4))):
            if raw:
                at = data.draw(st.integers(0, len(raw) - 1))
                action = data.draw(st.integers(0, 2))
                if action == 0:
                    raw[at] = data.draw(st.integers(0, 255))
                elif action == 1:
                    del raw[at : at + data.draw(st.integers(1, 4))]
                else:
                    raw[at:at] = raw[at : at + 4]
        with contextlib.suppress(WireError):
            wire.loads(bytes(raw), link)

    check()


def ints(*values):
    return np.array(values, "<i4").tobytes()


BAD_STEPS = {
    "chunk_lens announce": {"slots": ints(1), "chunk_rows": ints(0), "chunk_lens": ints(3), "chunk_ids": ints(1, 2)},
    "chunk_rows: a row is named twice": {"slots": ints(1, 2), "chunk_rows": ints(0, 0)},
    "chunk_rows: 1 is not in": {"slots": ints(1), "chunk_rows": ints(1)},
    "slots: -1 is not in": {"slots": ints(-1)},
    "slots: 3 bytes are no whole": {"slots": b"abc"},
    "chunk_lens: 0 is not in": {"slots": ints(1), "chunk_rows": ints(0), "chunk_lens": ints(0)},
    "rank_off: .* no rising offsets": {"slots": ints(1, 2, 3), "rank_off": ints(0, 2, 1, 3)},
    "free_gens: 0 items, its partner columns have 1": {"free_slots": ints(1)},
    "spare_tails: 1 items, its partner columns have 0": {"spare_tails": ints(1)},
    "copies: 3 items": {"copies": ints(1, 2, 3)},
    "copies: .* two pages or none": {"copies": ints(1, 2, -1, 4)},
    "publish_page_keys: 16 bytes|publish_page_keys: 1 items": {
        "publish_pages": ints(1, 2),
        "publish_gens": np.array([1, 2], "<i8").tobytes(),
        "publish_parents": ints(-1, 1),
        "publish_keys": b"k" * 16,
    },
    "publish_page_gens: -1 is not in": {"publish_pages": ints(1), "publish_gens": np.array([-1], "<i8").tobytes()},
    "kind: 1 is decode only": {
        "kind": 1,
        "slots": ints(1),
        "chunk_rows": ints(0),
        "chunk_lens": ints(1),
        "chunk_ids": ints(1),
    },
    "kind: 2 is not in": {"kind": 2},
}


@pytest.mark.parametrize("text", BAD_STEPS)
def test_bad_step_frames_name_the_field(text):
    message = worker_pb2.WorkerDown(attach_id=1, step=worker_pb2.StepFrame(step=1, **BAD_STEPS[text]))
    with pytest.raises(WireError, match=text):
        wire.decode(message)


BAD_RESULTS = {
    "counts: 1 items": {"states": b"\1\1", "counts": b"\1"},
    "counts announce 2": {"states": b"\1", "counts": b"\2", "tokens": ints(1)},
    "states: 9 is not in": {"states": b"\x09", "counts": b"\0"},
    "spare_rows: 1 is not in": {"states": b"\1", "counts": b"\0", "spare_rows": ints(1), "spare_positions": ints(256)},
    "logprobs.rows: 0 is not in": {"logprobs": {"rows": ints(0)}},
    "logprobs.widths announce": {
        "states": b"\1",
        "counts": b"\1",
        "tokens": ints(5),
        "logprobs": {"rows": ints(0), "widths": b"\2", "ids": ints(1), "values": np.array([0], "<f4").tobytes()},
    },
    "logprobs.values: holds NaN": {
        "states": b"\1",
        "counts": b"\1",
        "tokens": ints(5),
        "logprobs": {"rows": ints(0), "widths": b"\1", "ids": ints(1), "values": np.array([math.nan], "<f4").tobytes()},
    },
    "error: longer than": {"error": "x" * 5000},
}


@pytest.mark.parametrize("text", BAD_RESULTS)
def test_bad_result_frames_name_the_field(text):
    message = worker_pb2.WorkerUp(attach_id=1, result=worker_pb2.ResultFrame(step=1, **BAD_RESULTS[text]))
    with pytest.raises(WireError, match=text):
        wire.decode(message)


def _submit():
    return f.Submit(
        attach_id=1,
        request_id=b"r" * 16,
        attempt=1,
        choices=(f.SubmitChoice(0, 0, 1),),
        params=SamplingParams(),
        seed=1,
        remaining_ms=1000,
        prompt=np.zeros(255, np.int32),
    )


def test_submit_is_refused_with_more_keys_than_full_pages():
    with pytest.raises(WireError, match="page_keys: 1 keys"):
        wire.decode_submit(wire.encode_submit(replace(_submit(), page_keys=(b"k" * 16,))))


@pytest.mark.parametrize(
    "envelope, link",
    [
        (f.Envelope(1, f.StepFrame(step=1)), wire.Link.WORKER_UP),
        (f.Envelope(1, f.ResultFrame(step=1)), wire.Link.GATEWAY_DOWN),
        (f.Envelope(-1, f.Bye()), wire.Link.GATEWAY_UP),
        (f.Envelope(1, f.StepFrame(step=1, retire_pages=(2**31,))), wire.Link.WORKER_DOWN),
        (f.Envelope(1, f.StepFrame(step=2**64)), wire.Link.WORKER_DOWN),
    ],
)
def test_what_does_not_fit_the_link_is_refused_when_sent(envelope, link):
    with pytest.raises(WireError):
        wire.encode(envelope, link)


def test_oversize_is_refused_both_ways():
    big = f.Envelope(1, f.StepFrame(step=1, retire_pages=tuple(range(4 << 20))))
    with pytest.raises(WireError, match="at most"):
        wire.dumps(big, wire.Link.WORKER_DOWN)
    with pytest.raises(WireError, match="at most"):
        wire.loads(bytes(wire.MAX_MESSAGE_BYTES + 1), wire.Link.WORKER_DOWN)


def test_free_text_is_cut_so_that_it_fits():
    frame = f.ResultFrame(step=1, error="€" * 5000)
    error = wire.loads(wire.dumps(f.Envelope(1, frame), wire.Link.WORKER_UP), wire.Link.WORKER_UP).frame.error
    assert len(error) == 1000
    assert error.endswith("…")


def test_empty_message_is_refused():
    with pytest.raises(WireError, match="without a frame"):
        wire.loads(b"", wire.Link.GATEWAY_UP)


def test_cost_does_not_grow_per_row():
    """A decode frame of 512 rows costs at most 4 x one of 8 rows: arrays only, no object per row."""

    def cost(rows):
        envelope = f.Envelope(1, f.StepFrame(step=1, slots=np.arange(rows, dtype=np.int32)))
        best = math.inf
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(50):
                wire.loads(wire.dumps(envelope, wire.Link.WORKER_DOWN), wire.Link.WORKER_DOWN)
            best = min(best, time.perf_counter() - start)
        return best

    assert cost(512) < 4 * cost(8)
