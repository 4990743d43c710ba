"""What the book of masks says and answers, its frames, and the stream against a service by hand."""

import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest
from meshpb.v1 import grammar_pb2 as pb
from meshpb.v1 import grammar_pb2_grpc

from meshkit.errors import WireError
from meshkit.obs import Metrics
from meshkit.testing import serving, until
from meshkit.types import SamplingParams
from worker_svc.core.work import GRAMMAR_FAILED, Fault, SlotInit
from worker_svc.masks import book as books
from worker_svc.masks.book import Entry, Kind, MaskBook
from worker_svc.masks.ring import map_ring
from worker_svc.masks.source import PARKED, READY, Answer, Ask, NoMasks, Told
from worker_svc.masks.stream import MaskStream
from worker_svc.masks.wire import MAX_BIND_BYTES, Bounds, get_entries, put_outgoing

VOCAB, WORDS, EOS = 100, 4, 1
GRAMMAR = b"g" * 16


def init(slot=0, gen=1, grammar=GRAMMAR, emitted=(), **params):
    return SlotInit(
        slot=slot,
        slot_gen=gen,
        params=SamplingParams(**params),
        seed=0,
        choice=0,
        n_emitted=len(emitted),
        emitted=emitted,
        grammar_id=grammar,
    )


def row(*ids):
    words = np.zeros((1, WORDS), np.int32)
    for i in ids:
        words[0, i >> 5] |= np.uint32(1 << (i & 31)).astype(np.int32)
    return words


def allowed(words):
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


class Rig:
    """A book whose wake-ups are counted."""

    def __init__(self):
        self.book, self.wakes = MaskBook(VOCAB, (EOS,), Metrics()), 0
        self.book.wake = self.wake
        self.book.attached()

    def wake(self):
        self.wakes += 1

    def take(self, *asks, wait_s=0.0, alone=False):
        out = np.zeros((sum(ask.places for ask in asks), WORDS), np.int32)
        return self.book.take(asks, out, wait_s=wait_s, alone=alone), out

    def deliver(self, slot, position, kind=Kind.MASKED, rows=None, gen=1, error=""):
        places = 0 if rows is None else len(rows)
        return self.book.deliver([Entry(slot, gen, position, kind, rows, 0, places, error)])


@pytest.fixture
def rig():
    return Rig()


class TestBook:
    def test_a_bound_slot_is_told_once_and_then_its_tokens(self, rig):
        rig.book.bind([init(emitted=(5, 6), stop_ids=(9,)), init(1, grammar=b"")])
        out = rig.book.outgoing()
        assert [(o.slot, o.slot_gen, o.grammar_id, o.emitted, o.stop_ids) for o in out.binds] == [
            (0, 1, GRAMMAR, (5, 6), (9,))
        ]
        assert not (out.tokens or out.unbinds) and not rig.book.outgoing().binds
        rig.book.tell([Told(0, 1, 2, (7,))])
        rig.book.tell([Told(0, 1, 3, (8,), drafts=(3,))])
        assert rig.book.outgoing().tokens == [(0, 1, 2, (7, 8), (3,))]
        rig.book.tell([Told(0, 1, 4, (9,), ended=True)])
        assert rig.book.outgoing().unbinds == [(0, 1)] and rig.wakes >= 4

    def test_a_slot_that_starts_over_binds_over_its_old_session(self, rig):
        rig.book.bind([init()])
        rig.book.outgoing()
        rig.book.bind([init(gen=2)])
        rig.book.free(0, 1)  # about the old one: no effect
        out = rig.book.outgoing()
        assert [o.slot_gen for o in out.binds] == [2] and not out.unbinds
        rig.book.bind([init(gen=3, grammar=b"")])
        assert rig.book.outgoing().unbinds == [(0, 2)]
        rig.book.free(0, 3)
        assert not rig.book.outgoing().unbinds

    def test_a_slot_freed_before_its_step_began_is_not_bound_any_more(self, rig):
        """Frames are prepared while earlier ones wait for the device: what frees may overtake what binds."""
        rig.book.free(0, 2)
        rig.book.bind([init(gen=2), init(1)])
        assert [o.slot for o in rig.book.outgoing().binds] == [1]
        assert rig.take(Ask(0, 2, 0))[0] == [PARKED]
        rig.book.bind([init(gen=3)])
        assert [(o.slot, o.slot_gen) for o in rig.book.outgoing().binds] == [(0, 3)]

    def test_masks_are_copied_and_parked_rows_left(self, rig):
        rig.book.bind([init(0), init(1), init(2)])
        assert rig.deliver(0, 0, rows=row(4, 99)) == 0
        answers, out = rig.take(Ask(0, 1, 0), Ask(1, 1, 0), Ask(2, 7, 0))
        assert answers == [READY, PARKED, PARKED] and allowed(out[0]) == {4, 99} and not out[1:].any()

    def test_free_allows_all_but_the_ends_and_done_nothing_else(self, rig):
        rig.book.bind([init(stop_ids=(31, 64))])
        rig.deliver(0, 0, Kind.FREE)
        (answer,), out = rig.take(Ask(0, 1, 0, places=2))
        assert answer is READY and allowed(out[0]) == allowed(out[1]) == set(range(32 * WORDS)) - {EOS, 31, 64}
        rig.deliver(0, 0, Kind.DONE)
        assert allowed(rig.take(Ask(0, 1, 0))[1]) == {EOS, 31, 64}

    def test_only_the_entry_of_the_current_position_and_generation_counts(self, rig):
        rig.book.bind([init(emitted=(5,))])
        assert rig.deliver(0, 0, rows=row(4)) == rig.deliver(0, 1, gen=2) == rig.deliver(3, 1) == 1
        assert rig.take(Ask(0, 1, 1))[0] == [PARKED]
        assert rig.deliver(0, 1, rows=row(4)) == 0
        assert rig.take(Ask(0, 1, 1))[0] == [READY]
        rig.book.tell([Told(0, 1, 1, (4,))])
        assert rig.take(Ask(0, 1, 2))[0] == [PARKED]

    def test_a_verify_row_needs_a_mask_row_per_place(self, rig):
        rig.book.bind([init()])
        rig.deliver(0, 0, rows=row(4))
        assert rig.take(Ask(0, 1, 0, places=2))[0] == [PARKED]
        rig.deliver(0, 0, rows=np.concatenate([row(4), row(5)]))
        (answer,), out = rig.take(Ask(0, 1, 0, places=2))
        assert answer is READY and [allowed(r) for r in out] == [{4}, {5}]

    def test_a_failed_entry_is_a_fault(self, rig):
        rig.book.bind([init()])
        rig.deliver(0, 0, Kind.FAILED, error="outside the grammar")
        assert rig.take(Ask(0, 1, 0))[0] == [Answer(False, Fault(GRAMMAR_FAILED, "outside the grammar"))]

    def test_after_a_reconnect_everything_is_said_again_and_masks_stay(self, rig):
        rig.book.bind([init(0), init(1)])
        rig.book.outgoing()
        rig.book.tell([Told(0, 1, 0, (7,))])
        rig.deliver(1, 0, rows=row(4))
        rig.book.detached()
        rig.book.tell([Told(0, 1, 1, (8,))])
        rig.book.attached()
        out = rig.book.outgoing()
        assert [(o.slot, o.emitted) for o in out.binds] == [(0, (7, 8)), (1, ())] and not out.tokens
        assert rig.take(Ask(1, 1, 0))[0] == [READY]

    def test_a_step_that_did_not_count_starts_its_sessions_over(self, rig):
        rig.book.bind([init(emitted=(5,))])
        rig.book.outgoing()
        rig.book.tell([Told(0, 1, 1, (7,))])
        rig.book.outgoing()
        assert rig.take(Ask(0, 1, 1))[0] == [PARKED]
        assert [o.emitted for o in rig.book.outgoing().binds] == [(5,)]

    def test_a_refusal_is_a_fault_until_somebody_answers(self, rig):
        rig.book.bind([init()])
        rig.book.refused("another vocabulary")
        assert rig.take(Ask(0, 1, 0))[0][0].fault == Fault(GRAMMAR_FAILED, "another vocabulary")
        rig.book.attached()
        assert rig.take(Ask(0, 1, 0))[0] == [PARKED]

    def test_what_waits_is_bounded_and_ends_early(self, rig, monkeypatch):
        monkeypatch.setattr(books, "ALONE_S", 0.2)
        rig.book.bind([init(0), init(1)])

        def timed(*asks, **options):
            began = time.monotonic()
            answers, _ = rig.take(*asks, **options)
            return answers, time.monotonic() - began

        asks = Ask(0, 1, 0), Ask(1, 1, 0)
        assert timed(*asks, wait_s=0.0005)[1] < 0.1
        answers, took = timed(*asks, wait_s=0.0005, alone=True)
        assert answers == [PARKED, PARKED] and took > 0.19
        assert timed(*asks, wait_s=0.2, alone=True)[1] > 0.39, "a forward still runs for 0.2 s"
        later = threading.Timer(0.02, lambda: [rig.deliver(0, 0, rows=row(4)), rig.deliver(1, 0, rows=row(4))])
        later.start()
        answers, took = timed(*asks, wait_s=10, alone=False)
        assert answers == [READY, READY] and 0.01 < took < 5
        rig.book.tell([Told(0, 1, 0, (4,))])
        assert timed(Ask(0, 1, 1), asks[1], wait_s=0.01, alone=True)[1] < 0.15, "one of them has its mask"
        rig.book.detached()
        assert timed(Ask(0, 1, 1), asks[1], wait_s=10)[1] < 5, "nothing can come"
        later.join()

    def test_without_a_service_constrained_rows_fail(self):
        source = NoMasks()
        source.bind([init()])
        (answer,) = source.take([Ask(0, 1, 0)], np.empty((1, 0), np.int32), wait_s=0, alone=True)
        source.tell([])
        assert answer.fault.code == GRAMMAR_FAILED and "[worker] grammar" in answer.fault.message


def entries(slots=(0,), kinds=(1,), counts=(1,), rows=(-1,), inline=b"\1\0\0\0" * WORDS, **fields):
    n = len(slots)
    return pb.MaskEntries(
        slots=np.int32(slots).tobytes(),
        slot_gens=np.int64([1] * n).tobytes(),
        positions=np.int32([3] * n).tobytes(),
        kinds=bytes(kinds),
        counts=bytes(counts),
        rows=np.int32(rows).tobytes(),
        inline=inline,
        **fields,
    )


class TestWire:
    BOUNDS = Bounds(slots=4, max_verify=2, words=WORDS, ring=np.arange(16 * WORDS, dtype=np.int32).reshape(16, WORDS))

    def test_rows_come_from_the_ring_or_the_message(self):
        message = entries((2, 3, 0), (1, 1, 3), (2, 1, 0), (5, -1, -1), errors=[pb.EntryError(index=2, message="no")])
        first, second, third = get_entries(message, self.BOUNDS)
        assert (first.slot, first.position, first.kind) == (2, 3, Kind.MASKED)
        assert first.source is self.BOUNDS.ring and (first.first, first.places) == (5, 2)
        assert second.source.tolist() == [[1] * WORDS] and (second.first, second.places) == (0, 1)
        assert (third.kind, third.source, third.error) == (Kind.FAILED, None, "no")

    @pytest.mark.parametrize(
        ("fields", "word"),
        [
            ({"slots": (4,)}, r"entries\.slots"),
            ({"kinds": (4,)}, r"entries\.kinds"),
            ({"counts": (3,)}, r"entries\.counts"),
            ({"counts": (2,)}, r"entries\.rows\[0\]"),
            ({"counts": (0,)}, r"entries\.rows\[0\]"),
            ({"rows": (15,), "counts": (2,)}, r"entries\.rows\[0\]"),
            ({"rows": (-2,)}, r"entries\.rows"),
            ({"inline": b"\0" * 12}, r"entries\.inline"),
            ({"kinds": (1, 1)}, r"entries\.kinds"),
            ({"errors": [pb.EntryError(index=1)]}, r"entries\.errors"),
        ],
    )
    def test_what_breaks_a_rule_is_named(self, fields, word):
        with pytest.raises(WireError, match=word):
            get_entries(entries(**fields), self.BOUNDS)

    def test_a_ring_that_is_not_mapped_has_no_rows(self):
        with pytest.raises(WireError, match=r"entries\.rows"):
            get_entries(entries(rows=(0,)), Bounds(4, 2, WORDS))

    def test_outgoing_messages_are_few_and_bounded(self, rig):
        many = tuple(range(MAX_BIND_BYTES // 8))
        rig.book.bind([init(slot, emitted=many) for slot in range(3)])
        binds = list(put_outgoing(rig.book.outgoing(), 7))
        assert [len(m.binds.binds) for m in binds] == [1, 1, 1] and all(m.attach_id == 7 for m in binds)
        rig.book.tell([Told(slot, 1, len(many), (5,), drafts=(6,) * slot) for slot in range(3)])
        (message,) = put_outgoing(rig.book.outgoing(), 7)
        assert (message.tokens.counts, message.tokens.draft_counts) == (bytes([1, 1, 1]), bytes([0, 1, 2]))
        assert np.frombuffer(message.tokens.bases, np.int32).tolist() == [len(many)] * 3

    def test_another_file_is_no_ring(self, tmp_path):
        path = tmp_path / "ring"
        path.write_bytes(np.arange(2 * WORDS, dtype=np.int32).tobytes() + b"n" * 16)
        assert map_ring(str(path), b"n" * 16, 2, WORDS)[1, 0] == WORDS
        assert map_ring(str(path), b"m" * 16, 2, WORDS) is None
        assert map_ring(str(path), b"n" * 16, 3, WORDS) is None
        assert map_ring(str(tmp_path / "none"), b"n" * 16, 2, WORDS) is None


class Service(grammar_pb2_grpc.GrammarServicer):
    """Answers every bind and token with an inline row; `mode` says what else it does."""

    def __init__(self):
        self.mode, self.attached, self.heard, self.seen = "", 0, [], 0

    def add_to(self, server):
        grammar_pb2_grpc.add_GrammarServicer_to_server(self, server)

    async def AttachWorker(self, requests, context):
        await context.send_initial_metadata(())
        hello = (await context.read()).hello
        self.seen += 1
        if self.mode == "refuse":
            await context.write(pb.MaskDown(bye=pb.MaskDown().bye))
            return
        words = WORDS + 1 if self.mode == "words" else WORDS
        self.attached += 1
        await context.write(pb.MaskDown(attach_id=9, hello_ack=pb.MaskHelloAck(boot=1, words=words)))
        while (up := await context.read()) is not None and hasattr(up, "WhichOneof"):
            frame = up.WhichOneof("frame")
            self.heard.append(frame)
            if frame == "binds" and self.mode == "garbage":
                await context.write(pb.MaskDown(attach_id=9, entries=entries(slots=(hello.slots,))))
            elif frame == "binds":
                await context.write(pb.MaskDown(attach_id=8, entries=entries()))  # of another attachment
                body = entries()
                body.positions = np.int32([0]).tobytes()
                await context.write(pb.MaskDown(attach_id=9, entries=body))
            elif frame == "tokens":
                return  # the stream ends


@contextlib.asynccontextmanager
async def stream(address, book):
    metrics = Metrics()
    made = MaskStream(book, address, group="w", boot=3, vocab_size=VOCAB, slots=4, max_verify=2, metrics=metrics)
    task = asyncio.create_task(made.run())
    try:
        yield lambda: metrics.render().decode()
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def take(book, slot=0, position=0):
    out = np.zeros((1, WORDS), np.int32)
    return book.take([Ask(slot, 1, position)], out, wait_s=0.0, alone=False), out


class TestStream:
    async def test_masks_come_and_a_lost_stream_is_dialled_again(self, tmp_path):
        service, book = Service(), MaskBook(VOCAB, (EOS,))
        async with serving(tmp_path, "g", service.add_to) as address, stream(address, book) as counted:
            await until(lambda: service.attached)
            book.bind([init()])
            await until(lambda: take(book)[0] == [READY])
            assert allowed(take(book)[1][0]) == {0, 32, 64, 96}
            assert service.heard[0] == "mapped" and "heartbeat" in service.heard
            book.tell([Told(0, 1, 0, (5,))])
            await until(lambda: service.attached == 2 and service.heard.count("binds") == 2)
            assert 'event="lost"' in counted() and 'event="stale_attach"' in counted()

    async def test_a_service_that_breaks_the_contract_is_left(self, tmp_path, caplog):
        service, book = Service(), MaskBook(VOCAB, (EOS,))
        service.mode = "words"
        async with serving(tmp_path, "g", service.add_to) as address, stream(address, book):
            await until(lambda: service.attached >= 2)
            service.mode = "garbage"
            book.bind([init()])
            await until(lambda: service.heard.count("binds") >= 2)
        assert "no masks" in caplog.text

    async def test_who_is_refused_for_long_fails_its_rows(self, tmp_path, monkeypatch):
        monkeypatch.setattr("worker_svc.masks.stream.REFUSED_S", 0.1)
        service, book = Service(), MaskBook(VOCAB, (EOS,))
        service.mode = "refuse"
        book.bind([init()])
        async with serving(tmp_path, "g", service.add_to) as address, stream(address, book):
            await until(lambda: service.seen >= 2 and take(book)[0][0].fault)
            service.mode = ""
            await until(lambda: take(book)[0] == [READY])

    async def test_nobody_there_costs_no_more_than_dials(self, tmp_path):
        service, book = Service(), MaskBook(VOCAB, (EOS,))
        async with stream(f"unix:{tmp_path}/g.sock", book):
            await asyncio.sleep(0.1)
            async with serving(tmp_path, "g", service.add_to):
                began = time.monotonic()
                await until(lambda: service.attached)
                assert time.monotonic() - began < 2
