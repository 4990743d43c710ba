"""Mask frames to messages and back, every column checked: what breaks a rule is a WireError naming the field."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from meshpb.v1 import grammar_pb2 as pb

from grammar_svc.engine import Engine, Entry
from grammar_svc.session import Rows
from meshkit.errors import WireError
from meshkit.wire import columns as c

MAX_GEN = 2**63 - 1
ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the attachment's numbers must stay below."""

    slots: int
    max_verify: int
    vocab_size: int


def apply_binds(message: pb.Binds, bounds: Bounds, engine: Engine) -> None:
    """Check every bind, then carry them out."""
    high = bounds.vocab_size - 1
    checked = []
    for index, bind in enumerate(message.binds):
        field = f"binds[{index}]"
        if len(bind.grammar_id) != ID_BYTES:
            raise WireError(f"{field}.grammar_id: {len(bind.grammar_id)} bytes, expected {ID_BYTES}")
        checked.append(
            (
                c.get_int(bind.slot, f"{field}.slot", high=bounds.slots - 1),
                c.get_int(bind.slot_gen, f"{field}.slot_gen", high=MAX_GEN),
                c.get_ints(bind.emitted, f"{field}.emitted", high=high),
                c.get_ints(bind.stop_ids, f"{field}.stop_ids", high=high),
            )
        )
    for bind, (slot, slot_gen, emitted, stop_ids) in zip(message.binds, checked, strict=True):
        engine.bind(slot, slot_gen, bind.grammar_id, thinking=bind.thinking, emitted=emitted, stop_ids=stop_ids)


def apply_unbinds(message: pb.Unbinds, bounds: Bounds, engine: Engine) -> None:
    slots = c.get_ints(message.slots, "unbinds.slots", high=bounds.slots - 1)
    gens = c.get_i64(message.slot_gens, "unbinds.slot_gens", length=len(slots)).tolist()
    for slot, slot_gen in zip(slots, gens, strict=True):
        engine.unbind(slot, slot_gen)


def apply_tokens(message: pb.SampledTokens, bounds: Bounds, engine: Engine) -> None:
    """Check every column, then advance row by row."""
    high = bounds.vocab_size - 1
    slots = c.get_ints(message.slots, "tokens.slots", high=bounds.slots - 1)
    n = len(slots)
    gens = c.get_i64(message.slot_gens, "tokens.slot_gens", length=n).tolist()
    bases = c.get_ints(message.bases, "tokens.bases", length=n)
    counts = c.get_u8(message.counts, "tokens.counts", length=n)
    ids = c.get_i32(message.ids, "tokens.ids", high=high)
    c.check_sum(counts, len(ids), "tokens.counts", "tokens.ids")
    drafts = c.get_i32(message.drafts, "tokens.drafts", high=high)
    draft_counts = c.get_u8(message.draft_counts, "tokens.draft_counts", high=bounds.max_verify - 1)
    if not draft_counts.size:
        draft_counts = np.zeros(n, np.uint8)
    elif draft_counts.size != n:
        raise WireError(f"tokens.draft_counts: {draft_counts.size} items, its partner columns have {n}")
    c.check_sum(draft_counts, len(drafts), "tokens.draft_counts", "tokens.drafts")
    engine.advance_rows(
        slots, gens, bases, counts.tolist(), ids.tolist(), draft_counts.tolist(), drafts.tolist() if drafts.size else ()
    )


def put_entries(entries: Sequence[Entry], rows: Rows, *, inline: bool) -> pb.MaskEntries:
    """At least one entry. With `inline` the rows' words travel in the message."""
    slots, gens, positions, kinds, counts, firsts, errors = zip(*entries, strict=True)
    words = b""
    if inline:
        spans = [rows[first : first + count] for first, count in zip(firsts, counts, strict=True) if count]
        words = b"".join(span.astype("<i4", copy=False).tobytes() for span in spans)
        firsts = (-1,) * len(entries)
    return pb.MaskEntries(
        slots=c.put_i32(slots),
        slot_gens=c.put_i64(gens),
        positions=c.put_i32(positions),
        kinds=bytes(kinds),
        counts=bytes(counts),
        rows=c.put_i32(firsts),
        inline=words,
        errors=[pb.EntryError(index=i, message=c.clip(error)) for i, error in enumerate(errors) if error],
    )
