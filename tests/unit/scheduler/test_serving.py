"""Requests run to their end: batching, chunks, n > 1, finish reasons, admission."""

import pytest

from meshkit.types import FinishReason
from tests.unit.scheduler.mesh import Mesh


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_request(depth):
    m = Mesh(depth=depth)
    m.worker()
    g = m.gate()
    assert g.status.ready and g.status.workers == 1
    j = m.submit(g, prompt=10, max_tokens=20)
    m.run()
    m.expect(j)
    m.idle()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("prompt", [1, 2, 255, 256, 257, 512, 700])
def test_choices_share_the_prompt(depth, n, prompt):
    m = Mesh(depth=depth, chunk_tokens=300)
    w = m.worker(pages=40, tails=9)
    g = m.gate()
    j = m.submit(g, prompt=prompt, n=n, max_tokens=12)
    m.run()
    m.expect(j)
    m.idle()
    chunk_tokens = sum(len(fr.chunk_ids) for fr in w.log)
    assert chunk_tokens == prompt - 1 + n, "the prompt is prefilled once"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_many_requests_in_a_small_pool(depth):
    m = Mesh(depth=depth, chunk_tokens=200)
    m.worker(slots=4, pages=9, tails=3)
    g, h = m.gate(), m.gate(name="g1")
    js = [m.submit(g if i % 2 else h, prompt=100 + 150 * (i % 5), max_tokens=5 + 60 * (i % 7)) for i in range(24)]
    m.run()
    m.expect(*js)
    m.idle()
    assert {s.reason for j in js for s in j.streams} == {FinishReason.STOP, FinishReason.LENGTH}
