"""Tokens on their short way, and on the long one in between: the answer and its counts stay the same."""

import json

import pytest

from gateway import sse, token_path
from gateway.sse import EventStream

CHAT = "/v1/chat/completions"
ASKED = {
    "messages": [{"role": "user", "content": "Hi"}],
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"thinking": True},
}


def say(served):
    script = served.mesh.text("three four\n five six seven eight", think="one\n\n two and some more")
    served.mesh.say = lambda start, choice: script


async def streamed(served, **fields):
    """Reasoning, content and usage of a streamed answer."""
    events = await served.events(CHAT, {**ASKED, "stream": True, **fields})
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    text = {key: "".join(delta.get(key) or "" for delta in deltas) for key in ("reasoning_content", "content")}
    return text, chunks[-1]["usage"]


async def whole(served, **fields):
    _, answer, _ = await served.post(CHAT, {**ASKED, "stream_options": None, **fields})
    message = answer["choices"][0]["message"]
    return {key: message[key] for key in ("reasoning_content", "content")}, answer["usage"]


@pytest.mark.parametrize("stop", [None, ["nothing like it"], [" seven"]])
async def test_a_client_that_is_behind_for_a_while_misses_nothing(served, monkeypatch, stop):
    say(served)
    expected = await whole(served, stop=stop)
    assert expected[0]["reasoning_content"] == "one\n\n two and some more"
    calls = 0
    send = EventStream.send

    def behind(self, *pieces):
        nonlocal calls
        send(self, *pieces)
        calls += 1
        if calls in at:
            self.keeps_up = False

    monkeypatch.setattr(EventStream, "send", behind)
    for at in [(), *((first,) for first in range(1, 18)), tuple(range(1, 40, 2)), tuple(range(1, 40))]:
        calls = 0
        assert await streamed(served, stop=stop) == expected, at


async def test_most_tokens_take_the_short_way(served, monkeypatch):
    say(served)
    long = []
    take_long = token_path.Lane._take_long

    def counted(self, answer):
        long.append(answer.ids)
        return take_long(self, answer)

    monkeypatch.setattr(token_path.Lane, "_take_long", counted)
    _, usage = await streamed(served)
    assert len(long) <= usage["completion_tokens"] // 2
    assert (await streamed(served)) == (await whole(served))


async def test_what_comes_while_the_outbox_rests_shares_a_write(served, monkeypatch):
    say(served)
    expected = await whole(served)
    writes = []
    flush = EventStream.flush

    def counted(self):
        if self._unsent:
            writes.append(len(self._unsent))
        flush(self)

    monkeypatch.setattr(EventStream, "flush", counted)
    monkeypatch.setattr(sse, "REST", 0)
    assert await streamed(served) == expected
    singly = len(writes)
    writes.clear()
    monkeypatch.setattr(sse, "REST", 1e6)  # as if writing had taken very long
    assert await streamed(served) == expected
    assert len(writes) < singly / 2
