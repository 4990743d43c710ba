"""The garbage collector: off inside, young objects collected when many, everything when idle, as before afterwards."""

import asyncio
import gc
import weakref

import pytest

from meshkit import quiet


class Node:
    pass


def cycle():
    """A weak reference to garbage that only the collector finds."""
    node = Node()
    node.self = node
    return weakref.ref(node)


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
