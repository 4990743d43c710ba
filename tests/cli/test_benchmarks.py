"""How benchmarks count: tokens by their ids, time from the first token to the last."""

import pytest

from benchmarks._mesh import Arrival, decode_rate, stream_arrivals
from tests.cli.conftest import Script


def event(*ids: int, finish: str | None = None) -> dict[str, object]:
    text = "".join(chr(97 + i) for i in ids)
    return {"choices": [{"index": 0, "text": text, "token_ids": list(ids), "finish_reason": finish}]}


def test_events_are_counted_by_their_tokens_and_the_empty_end_is_none(server: Script):
    server.events = [event(1), event(2, 3), event(4), event(finish="length")]
    server.delay_s = 0.2
    arrivals = stream_arrivals(server.url, {"prompt": "x"})
    assert [a.tokens for a in arrivals] == [1, 2, 1]
    assert arrivals[-1].at_s - arrivals[0].at_s >= 0.1  # 0.6 s of sleeps, less what reading the first event took
    (asked,) = server.bodies
    assert (asked["stream"], asked["return_token_ids"]) == (True, True)


def test_a_slow_stream_is_measured_as_far_as_it_came(server: Script):
    server.events = [event(n % 20) for n in range(100)]
    server.delay_s = 0.05
    arrivals = stream_arrivals(server.url, {"prompt": "x"}, limit_s=0.4)
    assert 2 <= len(arrivals) < 15


def test_a_stream_that_breaks_is_no_measurement(server: Script):
    server.events = [event(1), {"error": {"message": "the worker died"}}]
    with pytest.raises(RuntimeError, match="the worker died"):
        stream_arrivals(server.url, {"prompt": "x"})


def test_the_rate_leaves_the_first_arrival_out():
    assert decode_rate([Arrival(1.0, 5), Arrival(2.0, 3), Arrival(3.0, 1)]) == 2.0
    with pytest.raises(RuntimeError, match="too few"):
        decode_rate([Arrival(1.0, 5)])
