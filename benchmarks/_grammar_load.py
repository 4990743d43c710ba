"""Constrained load for the throughput part, as a process of its own: a gateway by hand.

    python -m benchmarks._grammar_load SCHEDULER ROWS TOKENS SCHEMAS

SCHEMAS is a JSON list, taken in turn; an empty one leaves the output free. Prints `running` once every choice has its
first token, then reads until all have ended or it is killed.
"""

import asyncio
import json
import os
import sys
from typing import Any

import numpy as np

from benchmarks._step_load import PROMPT, Counter
from meshkit import wire
from meshkit.config import environment
from meshkit.frames import Submit, SubmitChoice, Verdict
from meshkit.testing import until
from meshkit.types import GrammarKind, GrammarSource, RequestId, SamplingParams


async def main(address: str, rows: int, tokens: int, schemas: list[Any]) -> None:
    """Submit `rows` choices of `tokens` tokens each and wait for their ends."""
    gateway = Counter(address, rows)
    async with gateway:
        await until(lambda: gateway.status is not None and gateway.status.ready, 60)
        params = SamplingParams(max_tokens=tokens, ignore_eos=not schemas)

        async def one(row: int) -> None:
            source = None
            if schemas:
                source = GrammarSource(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schemas[row % len(schemas)]))
            submit = Submit(
                attach_id=gateway.attach_id,
                request_id=RequestId(os.urandom(16)),
                attempt=1,
                choices=(SubmitChoice(0, row, 1),),
                params=params,
                seed=row,
                remaining_ms=600_000,
                prompt=np.arange(10 + row, 10 + row + PROMPT, dtype=np.int32),
                grammar=source,
            )
            reply = wire.decode_submit_reply(await gateway.stub.Submit(wire.encode_submit(submit), timeout=60))
            if reply.verdict is not Verdict.ACCEPTED:
                raise SystemExit(f"the scheduler refused: {reply}")

        for row in range(0, rows, 16):
            await asyncio.gather(*map(one, range(row, min(rows, row + 16))))
        await until(lambda: len(gateway.seen) == rows or gateway.ended, 120)
        sys.stdout.write("running\n")
        sys.stdout.flush()
        await until(lambda: gateway.ended == rows, 600)


async def start_load(address: str, rows: int, tokens: int, schemas: list[Any]) -> asyncio.subprocess.Process:
    """Such a process; returns once every choice has its first token. The caller kills it."""
    load = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks._grammar_load", address, str(rows), str(tokens), json.dumps(schemas)),
        stdout=asyncio.subprocess.PIPE,
        env={**environment(), "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert load.stdout is not None
    line = await load.stdout.readline()
    assert line == b"running\n", "the load process ended"
    return load


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])))
