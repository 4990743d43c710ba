"""A lock file that says whether a process would take over at a unix socket at once: SOCKET.standby.

The kernel frees the lock when the process ends, however it ends. Imports nothing of the mesh: supervisors ask here too.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def standing(socket: Path) -> Iterator[None]:
    """For as long as this process could take over at once."""
    file = os.open(_file(socket), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield
    finally:
        os.close(file)


def stands_by(socket: Path) -> bool:
    """Whether a process would."""
    try:
        file = os.open(_file(socket), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _file(socket: Path) -> Path:
    return socket.with_name(f"{socket.name}.standby")
