"""What a request has used is free when it ends: the collector, which would find it late, finds nothing."""

import asyncio
import gc
import weakref

import pytest

from meshkit.testing import until
from meshkit.types import FinishReason

USER = [{"role": "user", "content": "Hi"}]
ASKED = {
    "/v1/chat/completions": {"messages": USER, "logprobs": True},
    "/v1/completions": {"prompt": ["Hi", "Ho"], "n": 2, "stop": "zzz"},
    "/v1/messages": {"messages": USER, "max_tokens": 16},
    "/v1/responses": {"input": "Hi"},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 16}},
}


@pytest.fixture
def generations(served, monkeypatch):
    """Weak references to all that are made, without a collector that could clear them."""
    made, make = [], served.gateway.generation

    def remembered(*args):
        generation = make(*args)
        made.append(weakref.ref(generation))
        return generation

    monkeypatch.setattr(served.gateway, "generation", remembered)
    gc.collect()
    gc.disable()
    yield made
    gc.enable()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
async def test_a_request_that_ended_leaves_nothing_to_collect(served, generations, path, stream):
    async with served.session.post(served.url + path, json=ASKED[path] | {"stream": stream}) as response:
        assert response.status == 200, await response.text()
        await response.read()
    assert generations
    await until(lambda: not any(made() for made in generations), 2.0)


async def test_nor_does_one_whose_client_left(served, generations):
    served.mesh.say = lambda start, choice: served.mesh.text("one two three", hold_after=1)
    request = asyncio.create_task(served.post("/v1/chat/completions", {"messages": USER}))
    await until(lambda: bool(served.mesh.starts))
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    del request
    await until(lambda: bool(served.mesh.gone))
    await until(lambda: not any(made() for made in generations), 2.0)


async def test_nor_one_that_ended_with_an_error(served, generations):
    error = {"finish": FinishReason.ERROR, "error": ("worker_lost", "it went")}
    served.mesh.say = lambda start, choice: served.mesh.text("one", **error)
    status, _, _ = await served.post("/v1/chat/completions", {"messages": USER})
    assert status == 500 and generations
    await until(lambda: not any(made() for made in generations), 2.0)
