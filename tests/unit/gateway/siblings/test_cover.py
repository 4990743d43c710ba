"""Accepting at other sockets than the own one, and stopping to."""

import asyncio
import socket
from contextlib import asynccontextmanager

from aiohttp import web

from gateway.siblings.cover import Cover


@asynccontextmanager
async def port(count):
    """A server that does not listen yet, and `count` listening sockets with their ports."""

    async def hello(request):
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        yield runner, [it.fileno() for it in held], [it.getsockname()[1] for it in held]
    finally:
        await runner.cleanup()
        for it in held:
            it.close()


async def ask(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


async def waits(asking):
    """Whether nobody answers for a while."""
    await asyncio.wait({asking}, timeout=0.1)
    return not asking.done()


async def test_connections_wait_at_a_socket_until_it_is_taken_and_again_once_it_is_not():
    async with port(3) as (runner, fds, ports):
        cover = Cover(runner, fds, own=0)
        asking = asyncio.create_task(ask(ports[1]))
        assert await waits(asking)
        await cover.take([1])
        assert b"hello" in await asking and cover.taken == [1]
        await cover.take([0, 1, 2])  # the own one is not its business
        assert b"hello" in await ask(ports[1]) and b"hello" in await ask(ports[2]) and cover.taken == [1, 2]
        await cover.take([2])
        asking = asyncio.create_task(ask(ports[1]))
        assert await waits(asking) and cover.taken == [2]
        await cover.take([1])
        assert b"hello" in await asking and cover.taken == [1]


async def test_the_last_word_counts_and_after_close_none_does():
    async with port(3) as (runner, fds, _):
        cover = Cover(runner, fds, own=0)
        await asyncio.gather(cover.take([1, 2]), cover.take([]), cover.take([2]))
        assert cover.taken == [2]
        await cover.close()
        await cover.take([1, 2])
        assert cover.taken == [] and not runner.sites


async def test_a_socket_that_cannot_be_taken_does_not_keep_the_others_from_it(caplog):
    async with port(2) as (runner, fds, ports):
        cover = Cover(runner, [fds[0], 1 << 20, fds[1]], own=0)
        await cover.take([1, 2])
        assert cover.taken == [2] and b"hello" in await ask(ports[1])
        assert "cannot accept for gateway-1: Bad file descriptor" in caplog.text
