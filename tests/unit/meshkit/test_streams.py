"""Send queues and shells without sockets: order, bounds, last words, timers, what a failing core does."""

import asyncio

import grpc
import pytest

from meshkit import wire
from meshkit.core import Close, Closed, Count, Opened, Received, Send, Tick, WakeAt
from meshkit.errors import QueueFull, WireError
from meshkit.frames import Bye, Envelope, Heartbeat
from meshkit.peer import diagnose
from meshkit.shell import Shell
from meshkit.streams import SendQueue, run_stream
from meshkit.testing import FakeClock, until
from meshkit.wire import Link


class Pipe:
    """One end of a stream: `incoming` feeds reads, `written` collects writes, `stuck` never finishes a write."""

    def __init__(self, stuck=False):
        self.incoming, self.written, self.stuck = asyncio.Queue(), [], stuck

    async def read(self):
        item = await self.incoming.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def write(self, message):
        if self.stuck:
            await asyncio.Event().wait()
        self.written.append(wire.decode(message).frame)


def beat(step):
    return Envelope(1, Heartbeat(step))


async def test_frames_leave_in_order_and_close_flushes():
    pipe, queue = Pipe(), SendQueue(Link.WORKER_UP)
    queue.put(beat(1))
    running = asyncio.create_task(run_stream(pipe, queue, lambda envelope: None))
    queue.put(beat(2))
    queue.put(Envelope(1, Bye("done")))
    queue.close()
    queue.put(beat(3))
    assert await running == "closed here"
    assert pipe.written == [Heartbeat(1), Heartbeat(2), Bye("done")]


async def test_a_peer_that_does_not_read_is_cut_at_the_bound():
    pipe, queue = Pipe(stuck=True), SendQueue(Link.WORKER_UP, max_bytes=1000)
    running = asyncio.create_task(run_stream(pipe, queue, lambda envelope: None))
    for step in range(200):
        queue.put(beat(step + 1))
    with pytest.raises(QueueFull, match="does not read"):
        await asyncio.wait_for(running, 1)


async def test_closing_a_stuck_stream_ends_it_soon():
    pipe, queue = Pipe(stuck=True), SendQueue(Link.WORKER_UP)
    queue.put(beat(1))
    running = asyncio.create_task(run_stream(pipe, queue, lambda envelope: None))
    await asyncio.sleep(0)
    queue.close()
    assert await asyncio.wait_for(running, 2) == "closed here"


async def test_what_the_peer_sends_is_received_until_it_ends():
    pipe, queue, got = Pipe(), SendQueue(Link.WORKER_UP), []
    for item in (wire.encode(beat(5), Link.WORKER_DOWN), wire.encode(beat(6), Link.WORKER_DOWN), grpc.aio.EOF):
        pipe.incoming.put_nowait(item)
    assert await run_stream(pipe, queue, got.append) == "the peer ended the stream"
    assert [envelope.frame.step for envelope in got] == [5, 6]


async def test_a_bad_frame_is_raised_and_nothing_of_it_received():
    pipe, queue, got = Pipe(), SendQueue(Link.WORKER_UP), []
    pipe.incoming.put_nowait(Link.WORKER_DOWN.value())
    with pytest.raises(WireError):
        await run_stream(pipe, queue, got.append)
    assert got == []


class Script:
    """A core that answers events by a table of functions and keeps what it was given."""

    cannot_happen = ("two_ends",)

    def __init__(self, **answers):
        self.answers, self.events = answers, []

    def handle(self, event, now_ns):
        self.events.append((event, now_ns))
        return self.answers.get(type(event).__name__, lambda event: [])(event)


async def test_shell_serves_a_stream_and_tells_each_end_once():
    core = Script(
        Opened=lambda event: [Send(event.conn, Envelope(9, Heartbeat(1))), Send(77, beat(1)), Close(77)],
        Received=lambda event: [Count("seen"), Close(event.conn)],
    )
    shell = Shell(core, lambda effect: None)

    class Context(Pipe):
        async def send_initial_metadata(self, metadata):
            assert metadata == ()

    context = Context()
    context.incoming.put_nowait(wire.encode(beat(2), Link.GATEWAY_UP))
    await shell.serve("gateway", Link.GATEWAY_DOWN, context)
    assert [type(event) for event, _ in core.events] == [Opened, Received, Closed]
    assert context.written == [Heartbeat(1)]
    assert b'event="seen"' in shell.metrics.render()
    assert b'event="two_ends",fault="1"} 0.0' in shell.metrics.render(), "what cannot happen is shown before it does"


async def test_shell_ticks_at_the_time_asked_for_and_not_before():
    clock = FakeClock(1_000_000)
    core = Script(Tick=lambda event: [WakeAt(31_000_000)] if len(core.events) == 1 else [])
    shell = Shell(core, lambda effect: None, clock=clock)
    running = asyncio.create_task(shell.run())
    await asyncio.sleep(0.06)
    assert len(core.events) == 1, "the loop's clock is past it, the core's is not"
    clock.advance(ms=30)
    await until(lambda: len(core.events) == 2)
    assert core.events[1] == (Tick(), 31_000_000)
    running.cancel()


async def test_a_core_that_raises_stops_the_shell():
    def broken(event):
        raise KeyError("bug")

    core = Script(Received=broken)
    shell = Shell(core, lambda effect: None)
    running = asyncio.create_task(shell.run())
    await asyncio.sleep(0)
    shell.post(Received(1, beat(1)))
    shell.post(Tick())
    with pytest.raises(KeyError):
        await running
    assert [type(event) for event, _ in core.events] == [Tick, Received]


async def test_farewell_says_bye_where_there_is_an_attachment():
    core = Script(Opened=lambda event: [Send(event.conn, Envelope(5, Heartbeat()))])
    shell = Shell(core, lambda effect: None)
    pipe = Pipe()
    shell.reserve(1, Link.WORKER_UP)
    running = asyncio.create_task(shell.carry(1, "scheduler", pipe))
    await until(lambda: pipe.written)
    shell.farewell("going")
    assert await running == "closed here"
    assert pipe.written == [Heartbeat(), Bye("going")]


async def test_diagnose_names_the_step_that_fails(tmp_path):
    assert "no such socket" in await diagnose(f"unix:{tmp_path}/none.sock")
    assert "TCP fails" in await diagnose("127.0.0.1:1")
    assert "does not resolve" in await diagnose("no..host:50051")
    server = await asyncio.start_unix_server(lambda reader, writer: writer.close(), str(tmp_path / "s.sock"))
    assert "the socket answers" in await diagnose(f"unix:{tmp_path}/s.sock")
    await asyncio.sleep(0.01)
    server.close()
    await server.wait_closed()
    (tmp_path / "dead.sock").touch()
    assert "nobody listens" in await diagnose(f"unix:{tmp_path}/dead.sock")


async def test_a_stopped_shell_asks_the_core_nothing():
    core = Script(Tick=lambda event: [WakeAt(0)] if len(core.events) < 50 else [])
    shell = Shell(core, lambda effect: None)
    running = asyncio.create_task(shell.run())
    await until(lambda: len(core.events) > 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    count = len(core.events)
    await asyncio.sleep(0.02)
    shell.post(Tick())
    assert len(core.events) == count
