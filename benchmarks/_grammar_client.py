"""The worker's side of the mask benchmark, a process of its own. Arguments: ADDRESS VOCAB_SIZE ROUNDS SCHEMAS
CLOSING.

Binds 64 slots, samples a legal id per row, and times from sending them until the new rows can be read.
Prints one JSON line.
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from meshpb.v1 import common_pb2, grammar_pb2_grpc
from meshpb.v1 import grammar_pb2 as pb

from grammar_svc.ring import map_ring
from meshkit.channel import open_channel
from meshkit.server import run
from meshkit.types import PROTO_REV

ROWS = 64


def sampled(row: Any, rng: random.Random, closing: list[int]) -> int:
    """A legal id of a mask row: in one of four cases one of `closing`, otherwise rather a low one."""
    if rng.random() < 0.25:
        ends = [token for token in closing if int(row[token >> 5]) >> (token & 31) & 1]
        if ends:
            return rng.choice(ends)
    words = np.flatnonzero(row)
    word = int(words[int(len(words) * rng.random() ** 4)])
    bits = int(row[word]) & 0xFFFFFFFF
    return word * 32 + rng.choice([bit for bit in range(32) if bits >> bit & 1])


class Client:
    """One attachment with `ROWS` bound slots. A slot whose grammar ended, or that failed, is bound anew."""

    def __init__(self, call: Any, vocab_size: int, ids: list[bytes], closing: list[int]) -> None:
        self.closing = closing
        self.call, self.ids = call, ids  # Any: the generated stub's call type
        self.vocab_size, self.words = vocab_size, -(-vocab_size // 32)
        self.rng = random.Random(7)
        self.attach_id = 0
        self.ring: Any = None
        self.gen = 0
        self.gens = [0] * ROWS
        self.positions = [0] * ROWS
        self.rows: list[Any] = [None] * ROWS  # the mask of each slot's next position; None: to be bound

    async def attach(self, *, mapped: bool) -> None:
        hello = pb.MaskHello(
            group=f"bench{mapped}", boot=1, proto_rev=PROTO_REV, vocab_size=self.vocab_size, slots=ROWS, max_verify=1
        )
        await self.call.write(pb.MaskUp(hello=hello))
        down = await self.call.read()
        self.attach_id, ack = down.attach_id, down.hello_ack
        self.ring = map_ring(Path(ack.ring_path), ack.ring_nonce, 2 * ROWS, self.words) if mapped else None
        await self.call.write(pb.MaskUp(attach_id=self.attach_id, mapped=pb.RingMapped(mapped=self.ring is not None)))

    async def bind_missing(self) -> None:
        binds = []
        for slot in range(ROWS):
            if self.rows[slot] is None:
                self.gen += 1
                self.gens[slot], self.positions[slot] = self.gen, 0
                binds.append(pb.Bind(slot=slot, slot_gen=self.gen, grammar_id=self.ids[slot % len(self.ids)]))
        if binds:
            await self.call.write(pb.MaskUp(attach_id=self.attach_id, binds=pb.Binds(binds=binds)))
            await self.take(len(binds))

    async def take(self, count: int) -> None:
        """Read entries until `count` have come; rows become views, nothing is copied."""
        while count:
            down = await self.call.read()
            if down.WhichOneof("frame") != "entries":
                continue
            entries = down.entries
            slots = np.frombuffer(entries.slots, np.int32).tolist()
            if self.ring is None:
                inline = iter(np.frombuffer(entries.inline, np.int32).reshape(-1, self.words))
                rows: list[Any] = [next(inline) if n else None for n in entries.counts]
            else:
                rows = [self.ring[row] if row >= 0 else None for row in np.frombuffer(entries.rows, np.int32).tolist()]
            for slot, kind, row in zip(slots, entries.kinds, rows, strict=True):
                self.rows[slot] = row if kind == 1 else None
            count -= len(slots)

    def sample(self) -> list[int]:
        """A legal id per row."""
        return [sampled(row, self.rng, self.closing) for row in self.rows]

    async def round(self) -> tuple[float, float]:
        """One step of all rows: seconds of wall time and of this process's own processor time."""
        await self.bind_missing()
        tokens = np.array(self.sample(), np.int32)
        wall, cpu = time.perf_counter(), time.process_time()
        frame = pb.SampledTokens(
            slots=np.arange(ROWS, dtype=np.int32).tobytes(),
            slot_gens=np.array(self.gens, np.int64).tobytes(),
            bases=np.array(self.positions, np.int32).tobytes(),
            counts=b"\x01" * ROWS,
            ids=tokens.tobytes(),
        )
        await self.call.write(pb.MaskUp(attach_id=self.attach_id, tokens=frame))
        await self.take(ROWS)
        spent = time.perf_counter() - wall, time.process_time() - cpu
        self.positions = [position + 1 for position in self.positions]
        return spent


async def main(address: str, vocab_size: int, rounds: int, schemas: list[Any], closing: list[int]) -> dict[str, float]:
    result: dict[str, float] = {"mask_rows_total": 0}
    async with open_channel(address) as channel:
        stub = grammar_pb2_grpc.GrammarStub(channel)
        ids = []
        for schema in schemas:
            request = pb.CompileRequest(kind=common_pb2.GRAMMAR_JSON_SCHEMA, text=json.dumps(schema))
            ids.append((await stub.Compile(request, timeout=30)).grammar_id)
        for name, mapped in (("mask_rtt", True), ("mask_inline_rtt", False)):
            call = stub.AttachWorker()
            client = Client(call, vocab_size, ids, closing)
            await client.attach(mapped=mapped)
            for _ in range(20):
                await client.round()
            taken = [await client.round() for _ in range(rounds)]
            wall = sorted(spent[0] for spent in taken)
            result[f"{name}_ms_p50"] = round(wall[len(wall) // 2] * 1e3, 3)
            result[f"{name}_ms_p99"] = round(wall[len(wall) * 99 // 100] * 1e3, 3)
            result[f"{name}_client_cpu_us"] = round(sum(spent[1] for spent in taken) / rounds * 1e6, 1)
            result["mask_rows_total"] += ROWS * (rounds + 20)
            call.cancel()
    return result


if __name__ == "__main__":
    address, vocab_size, rounds, schemas, closing = sys.argv[1:]
    print(json.dumps(run(main(address, int(vocab_size), int(rounds), json.loads(schemas), json.loads(closing)))))
