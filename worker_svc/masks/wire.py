"""Mask frames to messages and back, every column checked: what breaks a rule is a WireError naming the field."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from meshpb.v1 import grammar_pb2 as pb

from meshkit.errors import WireError
from meshkit.wire import columns as c
from worker_svc.masks.book import BindOrder, Entry, Kind, Outgoing, TokenOrder
from worker_svc.masks.source import MaskRows

MAX_BIND_BYTES: Final = 4 << 20  # of emitted ids in one message; one slot's may be longer


@dataclass(frozen=True, slots=True)
class Bounds:
    """What this worker said in Hello, and the ring if it is mapped."""

    slots: int
    max_verify: int
    words: int
    ring: MaskRows | None = None


def put_outgoing(out: Outgoing, attach_id: int) -> Iterator[pb.MaskUp]:
    """As few messages as it takes."""
    if out.unbinds:
        slots, gens = zip(*out.unbinds, strict=True)
        yield pb.MaskUp(attach_id=attach_id, unbinds=pb.Unbinds(slots=c.put_i32(slots), slot_gens=c.put_i64(gens)))
    for part in _parts(out.binds):
        yield pb.MaskUp(attach_id=attach_id, binds=pb.Binds(binds=[_bind(order) for order in part]))
    if out.tokens:
        yield pb.MaskUp(attach_id=attach_id, tokens=_tokens(out.tokens))


def _parts(binds: Sequence[BindOrder]) -> Iterator[list[BindOrder]]:
    part: list[BindOrder] = []
    size = 0
    for order in binds:
        cost = 64 + 4 * (len(order.emitted) + len(order.stop_ids))
        if part and size + cost > MAX_BIND_BYTES:
            yield part
            part, size = [], 0
        part.append(order)
        size += cost
    if part:
        yield part


def _bind(order: BindOrder) -> pb.Bind:
    return pb.Bind(
        slot=order.slot,
        slot_gen=order.slot_gen,
        grammar_id=order.grammar_id,
        thinking=order.thinking,
        emitted=c.put_i32(order.emitted),
        stop_ids=c.put_i32(order.stop_ids),
    )


def _tokens(orders: Sequence[TokenOrder]) -> pb.SampledTokens:
    drafted = any(order.drafts for order in orders)
    return pb.SampledTokens(
        slots=c.put_i32([order.slot for order in orders]),
        slot_gens=c.put_i64([order.slot_gen for order in orders]),
        bases=c.put_i32([order.base for order in orders]),
        counts=bytes([len(order.ids) for order in orders]),
        ids=c.put_i32([token for order in orders for token in order.ids]),
        draft_counts=bytes([len(order.drafts) for order in orders]) if drafted else b"",
        drafts=c.put_i32([token for order in orders for token in order.drafts]) if drafted else b"",
    )


def get_entries(message: pb.MaskEntries, bounds: Bounds) -> list[Entry]:
    """Sources of rows are the ring, or the message's bytes."""
    slots = c.get_i32(message.slots, "entries.slots", high=bounds.slots - 1)
    n = len(slots)
    gens = c.get_i64(message.slot_gens, "entries.slot_gens", length=n).tolist()
    positions = c.get_i32(message.positions, "entries.positions", length=n).tolist()
    kinds = c.get_u8(message.kinds, "entries.kinds", high=max(Kind), length=n).tolist()
    counts = c.get_u8(message.counts, "entries.counts", high=bounds.max_verify, length=n).tolist()
    firsts = c.get_i32(message.rows, "entries.rows", low=-1, length=n).tolist()
    errors = _errors(message, n)
    ring, inline, masked = bounds.ring, _inline(message, bounds), int(Kind.MASKED)
    ring_rows = 0 if ring is None else len(ring)
    columns = zip(slots.tolist(), gens, positions, kinds, counts, firsts, strict=True)
    entries, at = [], 0
    for index, (slot, gen, position, kind, count, first) in enumerate(columns):
        if kind != masked:
            entries.append(Entry(slot, gen, position, kind, error=errors.get(index, "")))
            continue
        source, begin, size = (ring, first, ring_rows) if first >= 0 else (inline, at, len(inline))
        if not count or begin + count > size:
            raise WireError(f"entries.rows[{index}]: {count} rows from {begin} on are not there")
        at += count if first < 0 else 0
        entries.append(Entry(slot, gen, position, kind, source, begin, count))
    return entries


def _inline(message: pb.MaskEntries, bounds: Bounds) -> MaskRows:
    words = c.get_i32(message.inline, "entries.inline", low=-(2**31))
    if len(words) % bounds.words:
        raise WireError(f"entries.inline: {len(words)} words are no whole number of rows of {bounds.words}")
    return words.reshape(-1, bounds.words)


def _errors(message: pb.MaskEntries, count: int) -> dict[int, str]:
    return {c.get_int(error.index, "entries.errors.index", high=count - 1): error.message for error in message.errors}
