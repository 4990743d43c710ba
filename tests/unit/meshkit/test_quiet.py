"""The garbage collector: off inside, young objects collected when many, everything when idle, as before afterwards."""

import asyncio
import gc
import weakref

import pytest

from meshkit import quiet
from meshkit.testing import until


class Node:
    pass


def cycle():
    """A weak reference to garbage that only the collector finds."""
    node = Node()
    node.self = node
    return weakref.ref(node)


async def test_the_cycle_of_each_call_that_a_server_answered_does_not_wait_for_many(monkeypatch):
    monkeypatch.setattr(quiet, "EVERY_S", 0.01)
    async with quiet.quiet_collector(lambda: True):
        garbage = [cycle() for _ in range(3_000)]
        await until(lambda: not any(node() for node in garbage), 3.0)


@pytest.mark.parametrize("bound", ["ROUNDS", "BUSY"])
async def test_garbage_that_was_alive_at_a_collection_is_found_although_never_idle(monkeypatch, bound):
    monkeypatch.setattr(quiet, "EVERY_S", 0.01)
    monkeypatch.setattr(quiet, "YOUNG", 100)
    monkeypatch.setattr(quiet, "ROUNDS", 10**9)
    monkeypatch.setattr(quiet, "BUSY", 10**9)
    async with quiet.quiet_collector(lambda: True):
        node = Node()
        node.self, garbage = node, weakref.ref(node)
        keep = [[] for _ in range(200)]
        await until(lambda: gc.get_count()[0] < 100)
        del node
        keep += [[] for _ in range(200)]
        await until(lambda: gc.get_count()[0] < 100)
        assert garbage() is not None
        monkeypatch.setattr(quiet, bound, 0)
        keep += [[] for _ in range(200)]
        await until(lambda: garbage() is None, 3.0)
        assert keep


@pytest.mark.parametrize(("busy", "many", "found"), [(True, False, False), (True, True, True), (False, False, True)])
async def test_collected_when_idle_or_many(monkeypatch, busy, many, found):
    monkeypatch.setattr(quiet, "EVERY_S", 0.01)
    monkeypatch.setattr(quiet, "YOUNG", 100 if many else 10**9)
    async with quiet.quiet_collector(lambda: busy):
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        garbage = cycle()
        keep = [[] for _ in range(200)]
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert (garbage() is None) is found
        assert keep
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.collect()
    assert garbage() is None
