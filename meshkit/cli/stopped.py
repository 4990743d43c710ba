"""Notices services that stand still because a signal stopped them (SIGSTOP, a debugger): nothing else says so.

They are alive, so nobody restarts them, and what asks them waits. A process that is merely slow is not seen here.
"""

from collections.abc import Mapping

import psutil

STILL = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class Stopped:
    """Looked at again and again; says each change once, in the second look that finds it."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # pids found standing still in the last look
        self._told: dict[str, int] = {}

    def look(self, pids: Mapping[str, int]) -> list[tuple[str, str]]:
        """(service, what to say of it), for the running services and their pids."""
        still = {name: pid for name, pid in pids.items() if _stands_still(pid)}
        said = []
        for name, pid in still.items():
            if self._seen.get(name) == pid != self._told.get(name):
                self._told[name] = pid
                said.append((name, f"is stopped by a signal: kill -CONT {pid}, or kill -9 {pid} to have it replaced"))
        for name in [name for name in self._told if still.get(name) != self._told[name]]:
            if self._told.pop(name) == pids.get(name):
                said.append((name, "goes on"))
        self._seen = still
        return said


def _stands_still(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in STILL
    except psutil.Error:
        return False
