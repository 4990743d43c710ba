"""Running a mesh that a child process stands for: what ends it and what does not."""

import asyncio
import sys

from meshkit.cli.mesh import MeshPlan, _supervise
from meshkit.cli.progress import Progress
from meshkit.cli.screen import Screen
from meshkit.models import DEFAULT_MODEL
from meshkit.supervisor import ServiceSpec, Supervisor


async def test_a_reader_that_went_away_does_not_end_the_mesh():
    """As in `v4mesh up 2>&1 | head`: the banner finds the pipe broken."""
    child = ServiceSpec(name="gateway", argv=(sys.executable, "-c", "import signal; signal.pause()"))
    progress = Progress(Screen(), [child.name], show_log=False)
    supervisor = Supervisor([child], on_event=progress.event, on_line=progress.line)
    told = asyncio.Event()

    def banner(plan: MeshPlan, seconds: float) -> None:
        told.set()
        raise BrokenPipeError

    plan = MeshPlan(model=DEFAULT_MODEL, name="v4-nano")
    running = asyncio.create_task(_supervise(plan, supervisor, progress, banner, None, 0.0))
    await asyncio.wait_for(told.wait(), 10)
    await asyncio.wait({running}, timeout=0.1)
    assert not running.done() and supervisor.pids()
    supervisor.stop()
    assert await running == 0
