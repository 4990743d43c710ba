"""Chunk steps by value: what `gpu.step` packs into one copy is what a plain construction, token by token, comes to."""

import numpy as np
import pytest
import torch

from meshkit.models import DEFAULT_MODEL
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.gpu.pools import GpuPools
from worker_svc.gpu.send import send
from worker_svc.gpu.step import ChunkRow, SlotTables, chunk_step
from worker_svc.kv.layout import KvLayout
from worker_svc.ops.slot_step import FIELDS
from worker_svc.ops.step_lists import ChunkLists, chunk_lists

CPU = torch.device("cpu")
FIRST = ChunkRow(slot=2, start=0, length=37, pages=range(5, 6))
LATER = ChunkRow(slot=0, start=250, length=300, pages=(9, 3, 7), saves=((256, 1), (512, 0)))
REPLAYED = ChunkRow(slot=1, start=700, length=5, pages=(0, 2, 1), fresh_from=640)
SAMPLED = (36, 336)


@pytest.fixture(scope="module")
def pools():
    config = load_checkpoint(DEFAULT_MODEL, check_values=False).config
    numerics = Numerics(activations="fp8", kv="fp8_e4m3", indexer="fp8")
    layout = KvLayout(config=config, numerics=numerics, max_verify=1)
    return GpuPools(layout, slots=3, pages=10, tails=2, device=CPU)


@pytest.fixture
def tables():
    pages = torch.zeros(4, 4, dtype=torch.int32)
    for row in (FIRST, LATER, REPLAYED):
        pages[row.slot, : len(row.pages)] = torch.tensor(list(row.pages))
    return SlotTables(fields=torch.zeros(FIELDS, 4, dtype=torch.int32), pages=pages)


def plain(rows, pools):
    """Columns of the step, and its saves, as lists."""
    window, ring, states = pools.layout.window, pools.ring, pools.layout.state_ring(4)
    found = {name: [] for name in ("slots", "positions", "first_token", "last_position", "own_rows")}
    found |= {name: [] for name in ("old_ring_rows", "old_rows", "windows", "states")}
    entries = {ratio: {"pool_rows": [], "key_first": []} for ratio in (4, 128)}
    token = place = 0
    for row in rows:
        begin, old = token, 0
        for position in range(max(row.fresh_from, row.start - window, 0), row.start):
            found["old_ring_rows"].append(row.slot * ring + position % ring)
            found["old_rows"].append(place)
            place, old = place + 1, old + 1
        own = place
        for position in range(row.start, row.start + row.length):
            columns = (row.slot, position, begin, row.start + row.length - 1, place)
            for name, value in zip(("slots", "positions", "first_token", "last_position", "own_rows"), columns):
                found[name].append(value)
            token, place = token + 1, place + 1
        for ratio, area in entries.items():
            area["key_first"] += [len(area["pool_rows"])] * row.length
            for entry in range((row.start + row.length) // ratio):
                page, number = divmod(entry * ratio, 256)
                area["pool_rows"].append(row.pages[page] * (256 // ratio) + number // ratio)
        for pos, tail in row.saves:
            rows_before = [own + position - row.start for position in range(pos - window, pos)]
            found["windows"].append((rows_before, [tail * window + n for n in range(window)]))
            carried = range(pos - 4, pos)
            in_ring = [row.slot * states + position % states for position in carried if position < row.start]
            tokens = [begin + position - row.start for position in carried if position >= row.start]
            found["states"].append((tail, in_ring, tokens, begin + pos - 1 - row.start))
    return found, entries, place


@pytest.mark.parametrize("rows", [(FIRST, LATER, REPLAYED), (LATER,), (REPLAYED, FIRST), (FIRST,)])
@pytest.mark.parametrize("sent", [False, True])
def test_a_step_is_what_a_plain_construction_comes_to(pools, tables, rows, sent):
    wanted, entries, place = plain(rows, pools)
    tokens = len(wanted["slots"])
    ids = np.arange(100, 100 + tokens, dtype=np.int32)
    sampled = SAMPLED if len(rows) == 3 else (tokens - 1,)
    step = chunk_step(send(CPU, ids)[0] if sent else ids, rows, sampled, tables, pools)
    assert step.ids.tolist() == ids.tolist() and step.sampled.tolist() == list(sampled)
    for name in ("slots", "positions", "first_token", "last_position", "own_rows", "old_ring_rows", "old_rows"):
        column = getattr(step, name)
        assert column.tolist() == wanted[name] and column.dtype == torch.int32, name
        assert column.data_ptr() % 16 == 0 and column.is_contiguous(), name
    for ratio, area in entries.items():
        found = step.areas[ratio]
        assert found.pool_rows.tolist() == area["pool_rows"] and found.key_first.tolist() == area["key_first"]
        assert found.base.tolist() == [place + first for first in area["key_first"]] and found.first_row == place
        assert found.most == max(row.end // ratio for row in rows)
    assert step.workspace_rows == place + len(entries[4]["pool_rows"])
    assert step.visible.tolist() == [(position + 1) // 4 for position in wanted["positions"]]
    assert [(save.source.tolist(), save.target.tolist()) for save in step.window_saves] == wanted["windows"]
    every = list(range(tokens))
    states = [(s.tail, s.ring_rows.tolist(), every[s.tokens], s.last_token) for s in step.state_saves]
    assert states == wanted["states"]
    assert [s.places for s in step.state_saves] == [slice(len(in_ring), 4) for _, in_ring, _, _ in wanted["states"]]


def test_all_of_a_chunks_lists_is_written_and_they_lie_in_one_piece(pools, tables):
    """Whatever the memory held before."""
    step = chunk_step(np.zeros(342, np.int32), (FIRST, LATER, REPLAYED), SAMPLED, tables, pools)
    names = [name for name in ChunkLists.__dataclass_fields__ if name != "top_k"]
    wanted = {name: getattr(step.lists, name).clone() for name in names}
    again = ChunkLists.allocate(342, 705, CPU, top_k=64)
    pieces = [getattr(again, name) for name in names]
    assert len({piece.untyped_storage().data_ptr() for piece in pieces}) == 1
    assert all(piece.is_contiguous() and piece.data_ptr() % 16 == 0 for piece in pieces)
    for piece in pieces:
        piece.fill_(77)
    for number, piece in enumerate(pieces):  # none lies in another
        piece.fill_(number)
    assert [int(piece.flatten()[0]) for piece in pieces] == list(range(len(names)))
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces))
    args = (step.positions, step.slots, step.last_position, tables.pages, tables.fresh_from, tables.write_from)
    chunk_lists(*args, step.own_rows, step.areas[4].base, step.areas[128].base, ring=pools.ring, out=again)
    for name in names:
        assert torch.equal(getattr(again, name), wanted[name]), name


def test_columns_of_any_length_keep_their_values_and_begin_at_whole_16_bytes():
    columns = [[7], [], range(5), np.array([2**32 - 1, 2**31], np.int64), np.array([2**32 - 2], np.uint32), [-1, 3]]
    found = send(CPU, *columns)
    assert [column.tolist() for column in found] == [[7], [], [0, 1, 2, 3, 4], [-1, -(2**31)], [-2], [-1, 3]]
    assert all(column.dtype == torch.int32 and column.storage_offset() % 4 == 0 for column in found)
