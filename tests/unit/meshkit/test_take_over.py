"""A standby that is told to end while it prepares, or just as it takes the place over, ends and serves nothing."""

import os
import signal
from pathlib import Path

import pytest

from meshkit.address import parse_address
from meshkit.exit_codes import Exit
from meshkit.standby import take_over


@pytest.mark.parametrize(
    "number, status", [(signal.SIGTERM, Exit.OK), (signal.SIGINT, Exit.INTERRUPTED)], ids=["SIGTERM", "SIGINT"]
)
async def test_a_signal_that_comes_while_nothing_else_can_run_is_heard(
    tmp_path: Path, number: signal.Signals, status: Exit
):
    async def standing() -> str:
        os.kill(os.getpid(), number)  # an import takes seconds in which the loop stands still
        return "ready to serve"

    assert await take_over(parse_address(f"unix:{tmp_path}/s.sock"), standing()) is status


async def test_the_place_is_taken_where_nobody_signals(tmp_path: Path):
    async def standing() -> str:
        return "ready to serve"

    assert await take_over(parse_address(f"unix:{tmp_path}/s.sock"), standing()) == "ready to serve"
