"""Load for `step_gap`, as a process of its own: a gateway by hand that keeps so many choices decoding.

    python -m benchmarks._step_load SCHEDULER ROWS TOKENS

Prints `running` once every choice has its first token, then reads until all have ended or it is killed. It only counts
tokens: what the rows say is checked by tests.
"""

import asyncio
import os
import sys

import numpy as np

from meshkit import wire
from meshkit.config import environment
from meshkit.frames import Submit, SubmitChoice, TokenFrame, Verdict
from meshkit.testing import GatewayProbe, until
from meshkit.types import RequestId, SamplingParams

PROMPT = 24


class Counter(GatewayProbe):
    """Counts instead of keeping: its own work must not show in what is measured."""

    def __init__(self, address: str, expected: int) -> None:
        super().__init__(address, "load")
        self.expected = expected
        self.seen: set[int] = set()
        self.ended = 0

    def _take_tokens(self, frame: TokenFrame) -> None:
        if len(self.seen) < self.expected:
            self.seen.update(frame.rows.tolist())
        self.ended += int(np.count_nonzero(frame.finishes))


async def main(address: str, rows: int, tokens: int) -> None:
    """Submit `rows` choices of `tokens` tokens each and wait for their ends."""
    gateway = Counter(address, rows)
    async with gateway:
        await until(lambda: gateway.status is not None and gateway.status.ready, 60)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        for row in range(rows):
            submit = Submit(
                attach_id=gateway.attach_id,
                request_id=RequestId(os.urandom(16)),
                attempt=1,
                choices=(SubmitChoice(0, row, 1),),
                params=params,
                seed=row,
                remaining_ms=600_000,
                prompt=np.arange(10 + row, 10 + row + PROMPT, dtype=np.int32),
            )
            reply = wire.decode_submit_reply(await gateway.stub.Submit(wire.encode_submit(submit), timeout=10))
            if reply.verdict is not Verdict.ACCEPTED:
                raise SystemExit(f"the scheduler refused: {reply}")
        await until(lambda: len(gateway.seen) == rows or gateway.ended, 60)
        sys.stdout.write("running\n")
        sys.stdout.flush()
        await until(lambda: gateway.ended == rows, 600)


async def start_load(address: str, rows: int, tokens: int) -> asyncio.subprocess.Process:
    """Such a process; returns once every choice has its first token. The caller kills it."""
    load = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks._step_load", address, str(rows), str(tokens)),
        stdout=asyncio.subprocess.PIPE,
        env={**environment(), "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert load.stdout is not None
    line = await load.stdout.readline()
    assert line == b"running\n", "the load process ended"
    return load


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
