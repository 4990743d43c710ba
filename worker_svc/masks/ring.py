"""The ring of mask rows, mapped: a file in shared memory that the grammar service owns and writes; read-only here."""

import mmap
from pathlib import Path
from typing import Final

import numpy as np

from worker_svc.masks.source import MaskRows

NONCE_BYTES: Final = 16


def map_ring(path: str, nonce: bytes, rows: int, words: int) -> MaskRows | None:
    """int32 [rows, words], or None if there is no such file here or it is another one (the service is remote)."""
    size = rows * words * 4
    try:
        with Path(path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), size + NONCE_BYTES, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    if len(nonce) != NONCE_BYTES or mapped[size:] != nonce:
        return None
    return np.frombuffer(mapped, "<i4", rows * words).reshape(rows, words)
