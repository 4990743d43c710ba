"""The grammar service as a process: Compile and mask streams over its socket, killed compiles, drain."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from meshpb.v1 import common_pb2, grammar_pb2_grpc
from meshpb.v1 import grammar_pb2 as pb

from grammar_svc import compiler, wire
from grammar_svc.ring import map_ring
from grammar_svc.sources import Source
from grammar_svc.vocabulary import read_vocabulary
from meshkit.channel import open_channel
from meshkit.errors import BadRequest, WireError
from meshkit.standby import Place
from meshkit.testing import until
from meshkit.types import PROTO_REV, GrammarKind

MODEL = Path(compiler.__file__).parents[1] / "meshkit" / "models" / "v4-nano"
EOS, THINK_END, VOCAB, WORDS = 1, 6, 4096, 128
SLOW = json.dumps(
    {"properties": {f"p{i}": {"type": "string", "pattern": f"^([a-z]{{1,30}}-?){{1,30}}[0-9]{i}$"} for i in range(30)}}
)
SCHEMA = '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"]}'


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Address and process of a running service with one compile process and a spare."""
    folder = tmp_path_factory.mktemp("grammar")
    folder.chmod(0o700)
    _left_ring(folder)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    args = ["--listen", f"unix:{folder}/g.sock", "--model", str(MODEL), "--ring-dir", str(folder), "--compilers", "1"]
    args += ["--soft-s", "0.4", "--hard-s", "1.0", "--queue-tenant", "8"]
    process = subprocess.Popen([sys.executable, "-m", "grammar_svc", *args], env=env)
    try:
        yield f"unix:{folder}/g.sock", process, folder
    finally:
        process.kill()
        process.wait()


def _left_ring(folder):
    """What a process wrote to until it was killed, just before the service starts: too young for its first look."""
    path = folder / "v4mesh-grammar-999999999-0000000000000001.ring"
    path.touch()
    os.utime(path, (time.time() + 3, time.time() + 3))


@contextlib.asynccontextmanager
async def stub(service):
    async with open_channel(service[0]) as channel:
        yield grammar_pb2_grpc.GrammarStub(channel)


async def compile_(grammar, kind, text, **fields):
    return await grammar.Compile(pb.CompileRequest(kind=kind, text=text, **fields), timeout=60, wait_for_ready=True)


class Worker:
    """The dialling side of a mask stream."""

    def __init__(self, grammar, group="w0", slots=8):
        self.call, self.group, self.slots = grammar.AttachWorker(), group, slots
        self.attach_id, self.rows, self.ack = 0, None, None

    async def hello(self, **fields):
        values = {"group": self.group, "boot": 1, "proto_rev": PROTO_REV, "vocab_size": VOCAB, "slots": self.slots}
        await self.call.write(pb.MaskUp(hello=pb.MaskHello(**{**values, "max_verify": 4, **fields})))
        down = await self.call.read()
        self.attach_id, self.ack = down.attach_id, down.hello_ack
        return down

    async def map(self, mapped=True):
        ack = self.ack
        self.rows = map_ring(Path(ack.ring_path), ack.ring_nonce, 2 * self.slots * 4, ack.words)
        assert self.rows is not None
        await self.send(mapped=pb.RingMapped(mapped=mapped))

    async def send(self, **frame):
        await self.call.write(pb.MaskUp(attach_id=self.attach_id, **frame))

    async def bind(self, grammar_id, slot=0, slot_gen=1, **fields):
        bind = pb.Bind(slot=slot, slot_gen=slot_gen, grammar_id=grammar_id, **fields)
        await self.send(binds=pb.Binds(binds=[bind]))

    async def tokens(self, base, ids, slot=0, slot_gen=1, drafts=()):
        await self.send(
            tokens=pb.SampledTokens(
                slots=np.int32([slot]).tobytes(),
                slot_gens=np.int64([slot_gen]).tobytes(),
                bases=np.int32([base]).tobytes(),
                counts=bytes([len(ids)]),
                ids=np.array(ids, np.int32).tobytes(),
                draft_counts=bytes([len(drafts)]),
                drafts=np.array(drafts, np.int32).tobytes(),
            )
        )

    async def next(self, frame="entries"):
        while True:
            async with asyncio.timeout(10):
                down = await self.call.read()
            assert hasattr(down, "WhichOneof"), "the stream ended"
            if down.WhichOneof("frame") == frame:
                return getattr(down, frame)

    async def mask(self):
        """GrammarKind of the next (single) entry, and the allowed ids of each of its rows."""
        entries = await self.next()
        (row,), count = np.frombuffer(entries.rows, np.int32), entries.counts[0]
        rows = self.rows[row : row + count] if row >= 0 else np.frombuffer(entries.inline, np.int32).reshape(-1, WORDS)
        bits = np.unpackbits(np.ascontiguousarray(rows).view(np.uint8), axis=1, bitorder="little")
        return entries.kinds[0], [set(np.flatnonzero(bits[i]).tolist()) for i in range(count)]


async def test_compile_answers_with_typed_verdicts(service):
    async with stub(service) as grammar:
        first = await compile_(grammar, common_pb2.GRAMMAR_JSON_SCHEMA, SCHEMA)
        again = await compile_(grammar, common_pb2.GRAMMAR_JSON_SCHEMA, SCHEMA.replace(":", " : "))
        assert first.verdict == again.verdict == pb.GRAMMAR_OK and first.grammar_id == again.grammar_id
        assert not first.cached and again.cached and len(first.grammar_id) == 16
        bad = await compile_(grammar, common_pb2.GRAMMAR_JSON_SCHEMA, '{"items":{"not":{}}}')
        assert (bad.verdict, bad.place) == (pb.GRAMMAR_INVALID, "/items/not")
        words = await compile_(grammar, common_pb2.GRAMMAR_EBNF, 'root ::= "a" missing')
        assert words.verdict == pb.GRAMMAR_INVALID and '"missing" is not defined' in words.message
        assert (await compile_(grammar, common_pb2.GRAMMAR_REGEX, "a" * 5000)).verdict == pb.GRAMMAR_TOO_LARGE
        other = await compile_(grammar, common_pb2.GRAMMAR_JSON_SCHEMA, SCHEMA, grammar_rev="0" * 16)
        assert other.verdict == pb.GRAMMAR_INVALID and other.place == "grammar_rev"
        with pytest.raises(BadRequest, match="no deadline"):
            await grammar.Compile(pb.CompileRequest())


async def test_a_runaway_is_killed_and_the_others_go_on(service):
    async with stub(service) as grammar:
        await compile_(grammar, common_pb2.GRAMMAR_REGEX, "warm")
        slow = asyncio.create_task(compile_(grammar, common_pb2.GRAMMAR_JSON_SCHEMA, SLOW))
        await asyncio.sleep(0.1)
        others = await asyncio.gather(*(compile_(grammar, common_pb2.GRAMMAR_REGEX, f"x{i}") for i in range(4)))
        assert {reply.verdict for reply in others} == {pb.GRAMMAR_OK}
        assert (await slow).verdict == pb.GRAMMAR_TIMEOUT
        assert (
            await compile_(grammar, common_pb2.GRAMMAR_JSON_SCHEMA, SLOW)
        ).verdict == pb.GRAMMAR_TIMEOUT  # tried again


async def test_a_killed_compile_process_costs_its_own_compile_only(service):
    async with stub(service) as grammar:
        await compile_(grammar, common_pb2.GRAMMAR_REGEX, "warm")
        slow = asyncio.create_task(compile_(grammar, common_pb2.GRAMMAR_JSON_SCHEMA, SLOW))
        found = []  # the process that it gets may still have to start
        await until(lambda: found.extend(_busy_children(service[1].pid)) or found, 30)
        os.kill(found[0], signal.SIGTERM)
        assert (await slow).verdict == pb.GRAMMAR_CRASHED
        assert (await compile_(grammar, common_pb2.GRAMMAR_REGEX, "after")).verdict == pb.GRAMMAR_OK


def _busy_children(parent):
    """The running one of the compile processes."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    states = {int(pid): Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for pid in listed}
    return [pid for pid, state in states.items() if state == "R" and _serves(pid)]


def _serves(pid):
    # The limit on processor time is set with each compile.
    limits = Path(f"/proc/{pid}/limits").read_text()
    return re.search(r"Max cpu time\s+(\S+)", limits)[1] != "unlimited"


async def test_masks_come_through_the_ring_and_inline_alike(service):
    vocabulary = read_vocabulary(MODEL)
    spell = {text: number for number, text in enumerate(vocabulary.tokens) if text}
    async with stub(service) as grammar:
        schema = (await compile_(grammar, common_pb2.GRAMMAR_JSON_SCHEMA, SCHEMA)).grammar_id
        seen = []
        for mapped in (True, False):
            worker = Worker(grammar)
            await worker.hello()
            await worker.map(mapped)
            assert Path(worker.ack.ring_path).stat().st_mode & 0o777 == 0o600
            await worker.bind(schema, thinking=True)
            kind, _ = await worker.mask()
            assert kind == 0
            await worker.tokens(0, [spell["a"], THINK_END], drafts=[spell["{"]])
            kind, (first, second) = await worker.mask()
            assert kind == 1 and spell["{"] in first and spell["}"] not in second and EOS not in first | second
            await worker.tokens(2, [spell["}"]])
            entries = await worker.next()
            assert entries.kinds[0] == 3 and "outside the grammar" in entries.errors[0].message
            await worker.send(bye=pb.MaskUp().bye)
            seen.append((first, second))
        assert seen[0] == seen[1]


async def test_a_bind_waits_for_the_compile(service):
    async with stub(service) as grammar:
        text = "wait{3}"
        known = (await compile_(grammar, common_pb2.GRAMMAR_REGEX, "wait{2}")).grammar_id
        worker = Worker(grammar)
        await worker.hello()
        await worker.map()
        rev = (await compile_(grammar, common_pb2.GRAMMAR_REGEX, "wait{2}")).grammar_rev
        await worker.bind(Source(GrammarKind.REGEX, text).grammar_id(rev), slot=3)
        await worker.bind(known, slot=4)
        entries = await worker.next()
        assert np.frombuffer(entries.slots, np.int32).tolist() == [4]
        assert (await compile_(grammar, common_pb2.GRAMMAR_REGEX, text)).verdict == pb.GRAMMAR_OK
        entries = await worker.next()
        assert np.frombuffer(entries.slots, np.int32).tolist() == [3] and entries.kinds[0] == 1


async def test_fences_refusals_and_heartbeats(service):
    async with stub(service) as grammar:
        old = Worker(grammar, "fenced")
        await old.hello()
        ring = Path(old.ack.ring_path)
        await old.next("heartbeat")
        new = Worker(grammar, "fenced")
        await new.hello()
        assert (await old.next("bye")).reason == "superseded" and new.attach_id != old.attach_id
        await new.send(heartbeat=pb.MaskUp().heartbeat)
        await new.next("heartbeat")
        await until(lambda: not ring.exists())
        assert Path(new.ack.ring_path).exists()
        for fields, word in [
            ({"proto_rev": 99}, "proto_rev"),
            ({"vocab_size": 7}, "vocab_size"),
            ({"slots": 0}, "slots"),
        ]:
            refused = await Worker(grammar, "refused").hello(**fields)
            assert refused.WhichOneof("frame") == "bye" and word in refused.bye.reason
        broken = Worker(grammar, "broken")
        await broken.hello()
        await broken.tokens(0, [VOCAB])
        with pytest.raises(Exception, match=r"tokens\.ids"):
            await broken.next("bye")
        silent = Worker(grammar, "silent")
        await silent.hello()
        with pytest.raises(AssertionError, match="ended"):
            await silent.next("bye")


async def test_the_ring_of_a_killed_process_goes_even_if_it_looked_young_at_first(service):
    await until(lambda: not list(service[2].glob("v4mesh-grammar-999999999-*")))


async def test_sigterm_says_bye_and_leaves_nothing_behind(service):
    _, process, folder = service
    async with stub(service) as grammar:
        worker = Worker(grammar, "last")
        await worker.hello()
        process.send_signal(signal.SIGTERM)
        assert "shutting down" in (await worker.next("bye")).reason
    assert await asyncio.to_thread(process.wait, 15) == 0
    assert not list(folder.glob("*.ring"))


def start(folder, *flags):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    args = ["--listen", f"unix:{folder}/g.sock", "--model", str(MODEL), "--ring-dir", str(folder), "--compilers", "1"]
    return subprocess.Popen([sys.executable, "-m", "grammar_svc", *args, *flags], env=env, stderr=subprocess.PIPE)


async def test_a_standby_takes_over_when_the_serving_process_is_killed(tmp_path):
    tmp_path.chmod(0o700)
    processes, began = [start(tmp_path, "--spares", "0")], time.monotonic()
    address = f"unix:{tmp_path}/g.sock", None
    try:
        async with stub(address) as grammar:
            first = await compile_(grammar, common_pb2.GRAMMAR_JSON_SCHEMA, SCHEMA)
            one = await anext(aiter(grammar.Watch(pb.WatchRequest())))
            start_s = time.monotonic() - began
            processes.append(start(tmp_path, "--spares", "0"))
            await asyncio.to_thread(_log_until, processes[1], b"warm")
            worker = Worker(grammar)
            await worker.hello()
            ring = Path(worker.ack.ring_path)
            os.utime(ring, (0, 0))  # an old one
            processes[0].kill()
            began = time.monotonic()
        async with stub(address) as grammar:
            two = await anext(aiter(grammar.Watch(pb.WatchRequest(), wait_for_ready=True)))
            again = await compile_(grammar, common_pb2.GRAMMAR_JSON_SCHEMA, SCHEMA)
            assert time.monotonic() - began < start_s / 3  # most of a start is imports
            assert two.boot != one.boot and again.grammar_id == first.grammar_id and again.cached
            worker = Worker(grammar)
            await worker.hello()
            await worker.map()
            vocabulary = read_vocabulary(MODEL)
            await worker.bind(first.grammar_id, emitted=np.int32([vocabulary.tokens.index("{")]).tobytes())
            kind, (row,) = await worker.mask()
            assert kind == 1 and vocabulary.tokens.index('"') in row and vocabulary.tokens.index("{") not in row
            assert not ring.exists()
        processes[1].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(processes[1].wait, 15) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()


async def test_a_standby_leaves_on_a_signal(tmp_path):
    place = Place(tmp_path / "g.sock")
    assert place.take()
    process = start(tmp_path)
    await asyncio.to_thread(_log_until, process, b"standing by")
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 15) == 0
    process.communicate()
    other = Place(tmp_path / "g.sock")
    assert not other.take() and not other.announced
    place.announce()
    assert other.announced
    place.leave()
    assert other.take() and not other.announced
    other.leave()


def _log_until(process, word):
    for line in process.stderr:
        if word in line:
            return
    raise AssertionError("the log ended")


async def test_stream_errors_are_wire_errors():
    bounds = wire.Bounds(slots=4, max_verify=2, vocab_size=100)
    message = pb.SampledTokens(slots=np.int32([9]).tobytes())
    with pytest.raises(WireError, match=r"tokens\.slots"):
        wire.apply_tokens(message, bounds, None)
