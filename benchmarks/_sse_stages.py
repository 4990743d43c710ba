"""A gateway with a stopwatch on what it does once per step, to say where its processor time goes.

`python -m benchmarks._sse_stages FILE GATEWAY-ARGS`: the gateway, unchanged but for four functions that are timed in
the processor time of its loop. Appends one line of totals in nanoseconds to FILE every second. What no stage has is
the event loop, gRPC's threads and being woken.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway import __main__ as gateway_main
from gateway.journal.journal import Journal
from gateway.sse import Outbox
from meshkit import streams
from meshkit.shell import Shell
from meshkit.wire import decode

totals = {"decode": 0, "journal": 0, "step": 0, "write": 0, "steps": 0}


def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    clock = time.thread_time_ns

    def wrapped(*args: Any) -> Any:
        began = clock()
        try:
            return work(*args)
        finally:
            totals[name] += clock() - began

    return wrapped


def counted(work: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        totals["steps"] += 1
        return work(*args)

    return wrapped


def report(file: Path) -> None:
    """Totals for ever, of a thread of its own: the loop's stages must not wait for a file."""
    with file.open("a") as out:
        while True:
            time.sleep(1.0)
            print(json.dumps({"at": time.monotonic(), **totals}), file=out, flush=True)


if __name__ == "__main__":
    vars(streams)["decode"] = timed("decode", decode)
    Journal.handle = timed("journal", Journal.handle)  # type: ignore[method-assign]
    Shell.post = timed("step", Shell.post)  # type: ignore[method-assign]
    Outbox.flush = timed("write", counted(Outbox.flush))  # type: ignore[method-assign]
    threading.Thread(target=report, args=(Path(sys.argv[1]),), daemon=True).start()
    sys.exit(gateway_main.main(sys.argv[2:]))
