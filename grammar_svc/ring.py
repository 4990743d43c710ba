"""The shared-memory ring of one attachment: mask rows in a plain file, mapped by the service and by the worker.

The service creates, writes and unlinks it (mode 0600); the worker maps it read-only. Order comes from the gRPC frame
that names a row after it was written; a row is written again only after the worker's next word about that slot. Plain
mmap on a file: `multiprocessing.shared_memory` would unlink it from the wrong process. The service holds a lock on the
file for as long as it uses it: a ring that can be locked is a dead process's, in whatever container that was.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import time
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshkit.errors import ConfigError

NONCE_BYTES: Final = 16
PREFIX: Final = "v4mesh-grammar"
YOUNG_S: Final = 2.0  # a ring is created before it is locked


def ring_row(position: int, slot: int, slots: int, max_verify: int) -> int:
    """First row of an entry: positions of one slot alternate between two places."""
    return ((position & 1) * slots + slot) * max_verify


class Ring:
    """`rows` is int32 [2 * slots * max_verify, words], writable."""

    def __init__(self, folder: Path, name: int, rows: int, words: int) -> None:
        self.path = folder / f"{PREFIX}-{os.getpid()}-{name:016x}.ring"
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        size = rows * words * 4
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"[grammar] ring_dir = {folder}: {error.strerror}; name a folder that I may write"
            ) from error
        try:
            os.ftruncate(handle, size + NONCE_BYTES)
            # Take the pages now: a full tmpfs must be an error here, not a SIGBUS at some later mask.
            os.posix_fallocate(handle, 0, size + NONCE_BYTES)
            os.pwrite(handle, self.nonce, size)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._map = mmap.mmap(handle, size + NONCE_BYTES)
        except OSError as error:
            os.close(handle)
            self.path.unlink(missing_ok=True)
            raise ConfigError(f"[grammar] ring_dir = {folder}: {error.strerror}; {size} bytes are needed") from error
        self._handle = handle
        self.rows: NDArray[np.int32] = np.frombuffer(self._map, np.int32, rows * words).reshape(rows, words)

    def unlink(self) -> None:
        """The name goes; memory goes with the last mapping. Idempotent."""
        self.path.unlink(missing_ok=True)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def map_ring(path: Path, nonce: bytes, rows: int, words: int) -> NDArray[np.int32] | None:
    """The peer's side: a read-only view, or None if this is not the file that was meant."""
    size = rows * words * 4
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), size + NONCE_BYTES, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    if mapped[size:] != nonce:
        return None
    return np.frombuffer(mapped, np.int32, rows * words).reshape(rows, words)


def remove_stale(folder: Path) -> int:
    """Unlink rings of processes that are gone; returns how many."""
    removed = 0
    for path in folder.glob(f"{PREFIX}-*.ring"):
        with contextlib.suppress(OSError), path.open("rb") as file:  # somebody else's, living, or gone meanwhile
            if time.time() - path.stat().st_mtime > YOUNG_S:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
    return removed
