"""Accepting at other sockets than the own one, and stopping to."""

import asyncio
import os
import socket
from contextlib import asynccontextmanager

import pytest
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
    fds, ports = [os.dup(it.fileno()) for it in held], [it.getsockname()[1] for it in held]
    cover = Cover(runner, fds, own=0)
    try:
        yield cover, runner, ports
    finally:
        await cover.close()
        await runner.cleanup()
        for it in held:
            it.close()
        os.close(fds[0])


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
    async with port(3) as (cover, _, ports):
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
    async with port(3) as (cover, runner, _):
        await asyncio.gather(cover.take([1, 2]), cover.take([]), cover.take([2]))
        assert cover.taken == [2]
        await cover.close()
        await cover.take([1, 2])
        assert cover.taken == [] and not runner.sites


async def test_after_close_nobody_waits_where_nobody_else_holds_the_socket():
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    number = held[1].getsockname()[1]
    cover = Cover(web.AppRunner(web.Application()), [it.detach() for it in held], own=0)
    socket.create_connection(("127.0.0.1", number)).close()
    await cover.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", number))
    os.close(cover._fds[0])


async def test_a_socket_that_cannot_be_taken_does_not_keep_the_others_from_it(caplog):
    async with port(3) as (cover, _, ports):
        os.close(cover._fds[1])
        await cover.take([1, 2])
        assert cover.taken == [2] and b"hello" in await ask(ports[2])
        assert "cannot accept for gateway-1: Bad file descriptor" in caplog.text
