"""A request of another dialect in the words of chat, and errors back in the words the client knows.

A dialect's request module makes a `ChatRequest`; everything after that is chat's. What chat complains about is then
told under the dialect's own field names and places.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gateway.errors import ApiError, invalid
from gateway.schema import ChatRequest, RequestFields
from gateway.text.chat_messages import UNSUPPORTED_IMAGE, Profile

_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content|\.tool_calls)?")


@dataclass(frozen=True, slots=True)
class Translated:
    """The chat request; where each of its messages comes from; chat's field names in the dialect's words."""

    body: ChatRequest
    origins: Sequence[str]
    names: Mapping[str, str]

    @contextmanager
    def told(self) -> Iterator[None]:
        """Errors raised inside speak of the dialect's fields."""
        try:
            yield
        except ApiError as error:
            self._rename(error)
            raise

    def _rename(self, error: ApiError) -> None:
        param = error.param
        error.message = self._placed(error.message)
        if param is not None and param in self.names:
            error.message = error.message.replace(param, self.names[param])
            error.param = self.names[param]
        elif param is not None:
            error.param = self._placed(param)

    def _placed(self, text: str) -> str:
        """The text with places in chat's messages and tools as places in the request."""
        origins = self.origins

        def origin(match: re.Match[str]) -> str:
            number = int(match[1])
            return origins[number] if number < len(origins) else match[0]

        text = _MESSAGE.sub(origin, text)
        for name, ours in self.names.items():
            if name.startswith("."):
                text = text.replace(name, ours)
        return text


def shared_fields(body: RequestFields) -> dict[str, Any]:
    """Sampling, labels and priority as every dialect takes them; of choices there is one, of the prompt no values."""
    left_out = ("n", "stream_options", "prompt_logprobs")
    return {name: getattr(body, name) for name in RequestFields.__struct_fields__ if name not in left_out}


def quoted(value: object) -> str:
    """A value of the client's in an error, cut to a bounded length."""
    text = repr(value if not isinstance(value, str) else value[:60])
    return text[:80]


def object_at(value: object, where: str) -> Mapping[str, Any]:
    """A JSON object, or a 400 that says where it should be."""
    if not isinstance(value, dict):
        raise invalid(where, f"{where} must be an object")
    return value


def text_at(value: object, where: str) -> str:
    """A string, or a 400 that says where it should be."""
    if not isinstance(value, str):
        raise invalid(where, f"{where} must be a string")
    return value


def not_text(kind: object, where: str, profile: Profile) -> str:
    """Stands for a part that is no text: what the hosted service says of an image, else a 400."""
    if profile == "deepseek" and kind in ("image", "input_image"):
        return UNSUPPORTED_IMAGE
    raise invalid(where, f"{where} has type {quoted(kind)}; this model reads text only")
