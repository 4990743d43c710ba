"""Responses that outlive their request: kept in memory, for a time, as bytes. A gateway that ends forgets them.

Bounded three ways: by number, by bytes and by age; the oldest go first. Who asks for one must be the tenant that made
it. What a response means, and where other processes of the port keep theirs, is not known here.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

LARGEST: Final = 4 << 20
"""Bytes of one response with what it answers; processes of one port hand them over in lines of twice that."""

Item = dict[str, Any]


class Kept(msgspec.Struct, frozen=True):
    """The response object, and the items it answers: those of the responses before it too."""

    response: Item
    input: list[Item]

    @property
    def items(self) -> list[Item]:
        """What the next response of the conversation goes on from."""
        return [*self.input, *self.response.get("output", ())]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Kept).decode


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """`most` responses of all tenants together; 0 keeps none."""

    most: int
    most_bytes: int
    seconds: float


class ResponseStore:
    """Of one process; used on its event loop alone."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()  # when it goes, and what it is
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def enabled(self) -> bool:
        return self._limits.most > 0

    def put(self, tenant: str, name: str, response: Mapping[str, Any], items: Sequence[Item]) -> bool:
        """Keep one; False if it is larger than one may be."""
        data = _encode(Kept(dict(response), list(items)))
        if len(data) > min(LARGEST, self._limits.most_bytes) or not self.enabled:
            return False
        self.drop(tenant, name)
        self._kept[tenant, name] = (self._clock() + self._limits.seconds, data)
        self.bytes += len(data)
        while len(self._kept) > self._limits.most or self.bytes > self._limits.most_bytes:
            self._forget(next(iter(self._kept)))
        return True

    def get(self, tenant: str, name: str) -> bytes | None:
        """As `read` takes it; None if there is none, or none any more."""
        self._expire()
        found = self._kept.get((tenant, name))
        return None if found is None else found[1]

    def drop(self, tenant: str, name: str) -> bool:
        """Forget one; False if there is none."""
        self._expire()
        if (tenant, name) not in self._kept:
            return False
        self._forget((tenant, name))
        return True

    def _expire(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values()))[0] <= now:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: tuple[str, str]) -> None:
        self.bytes -= len(self._kept.pop(key)[1])


def read(data: bytes) -> Kept:
    """What `get` gave, in this process or another one of the same port."""
    return _decode(data)
