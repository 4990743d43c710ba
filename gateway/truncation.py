"""Conversations that are longer than the context, cut at their beginning: for those who asked for it.

System messages stay, and the last turn does. What goes are whole turns, the oldest first, a call together with its
results, and as few as possible.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.chat import conversation_of
from gateway.schema import ChatRequest
from gateway.service import Gateway

_STAY = ("system", "developer", "latest_reminder")


async def fitting(gateway: Gateway, body: ChatRequest, output_tokens: int) -> ChatRequest:
    """The request with as many turns as leave room for `output_tokens`, or for one token if that is more than there is.

    What is still too long with its last turn alone is left to be refused.
    """
    turns = _turns(body.messages or ())
    room = gateway.model.max_context - max(1, min(output_tokens, gateway.model.max_context // 2))
    low, high = 0, max(0, len(turns) - 1)  # how many to leave out
    while low < high:
        middle = (low + high) // 2
        shorter = _without(body, turns[:middle])
        prompt = await conversation_of(gateway, shorter).encode(gateway, bounded=False)
        if len(prompt.ids) <= room:
            high = middle
        else:
            low = middle + 1
    return _without(body, turns[:low])


def _turns(messages: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Numbers of the messages that go together: a user's, then all that answers it."""
    turns: list[list[int]] = []
    for number, message in enumerate(messages):
        role = message.get("role")
        if role in _STAY:
            continue
        if role == "user" or not turns:
            turns.append([])
        turns[-1].append(number)
    return turns


def _without(body: ChatRequest, turns: Sequence[Sequence[int]]) -> ChatRequest:
    gone = {number for turn in turns for number in turn}
    kept = [message for number, message in enumerate(body.messages or ()) if number not in gone]
    return msgspec.structs.replace(body, messages=kept)
