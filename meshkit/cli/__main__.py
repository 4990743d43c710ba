"""`v4mesh`, also as `python -m meshkit.cli`: the supervisor starts services this way, whatever the PATH holds.

A service that has ended does not take the interpreter apart: freeing a vocabulary and weights piece by piece takes
seconds, for which a supervisor that stops would have to wait.
"""

import contextlib
import os
import sys
from typing import NoReturn

from meshkit.cli.main import main
from meshkit.cli.services import PACKAGES


def _leave(status: int) -> NoReturn:
    """End this process now. What services have to finish they finish before their main returns."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def command() -> NoReturn:
    """What the console script runs."""
    if sys.argv[1:2] and sys.argv[1] in PACKAGES:
        _leave(main())
    sys.exit(main())


if __name__ == "__main__":
    command()
