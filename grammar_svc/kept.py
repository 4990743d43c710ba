"""Sources known to compile, in files beside the service's socket: a standby that takes over need not find out again.

A file holds a source, its size compiled and the time that took; a standby builds it before anybody asks. It is written
whole under another name and renamed, and begins with a checksum of the rest; what is torn, foreign or of another
revision (the id holds it) is not found. Bounded in number, the longest unused goes first. A disk that is full or gone
costs compiles, nothing else. Only this user can read or write the folder.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import struct
from pathlib import Path
from typing import Final

from grammar_svc.children import Compiled
from grammar_svc.sources import ID_BYTES, Source
from meshkit.types import GrammarKind

HEAD: Final = struct.Struct("<16sQQI")  # checksum of the rest; bytes in memory, microseconds, kind; the source follows
MOST: Final = 1024  # files

log = logging.getLogger(__name__)


class Kept:
    """`folder` None keeps nothing."""

    def __init__(self, folder: Path | None, most: int = MOST) -> None:
        self._folder, self._most = folder, most
        self._complained = False
        self._looked_ns = -1  # when the folder had last changed, at the last look
        if folder is not None:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if folder.stat().st_uid != os.geteuid():
                    raise PermissionError(f"{folder} belongs to another user")
            except OSError as error:
                self._complain(error)
                self._folder = None

    async def get(self, grammar_id: bytes, *, used: bool = True) -> tuple[Source, Compiled] | None:
        """What was compiled for this id, if it is still there whole. Only what is used stays longer for it."""
        return None if self._folder is None else await asyncio.to_thread(self._read, self._folder, grammar_id, used)

    async def put(self, grammar_id: bytes, source: Source, made: Compiled) -> None:
        """Keep it."""
        if self._folder is not None:
            await asyncio.to_thread(self._write, self._folder, grammar_id, source, made)

    async def changed(self) -> list[bytes]:
        """Ids of all that is there, the longest unused first; none if no file has come or gone since the last call."""
        with contextlib.suppress(OSError):
            if self._folder is not None and (now := self._folder.stat().st_mtime_ns) != self._looked_ns:
                self._looked_ns = now
                return await asyncio.to_thread(self._list, self._folder)
        return []

    def _list(self, folder: Path) -> list[bytes]:
        found = []
        with contextlib.suppress(OSError):
            for file in folder.iterdir():
                if len(file.name) == 2 * ID_BYTES:  # not one that is being written
                    with contextlib.suppress(OSError, ValueError):  # removed meanwhile; not ours
                        found.append((file.stat().st_mtime_ns, bytes.fromhex(file.name)))
        return [grammar_id for _, grammar_id in sorted(found)]

    def _read(self, folder: Path, grammar_id: bytes, used: bool) -> tuple[Source, Compiled] | None:
        file = folder / grammar_id.hex()
        try:
            raw = file.read_bytes()
            if used:
                os.utime(file)
        except OSError:
            return None
        if len(raw) < HEAD.size:
            return None
        checksum, memory, micros, kind = HEAD.unpack_from(raw)
        if checksum != _checksum(raw[16:]):
            log.warning("a kept grammar is damaged: compiling it again")
            return None
        try:
            return Source(GrammarKind(kind), raw[HEAD.size :].decode()), Compiled(memory, micros)
        except ValueError:  # of another build
            return None

    def _write(self, folder: Path, grammar_id: bytes, source: Source, made: Compiled) -> None:
        rest = HEAD.pack(b"", made.memory, made.micros, int(source.kind))[16:] + source.text.encode()
        fresh = folder / f"{grammar_id.hex()}.{os.getpid()}"
        try:
            fresh.write_bytes(_checksum(rest) + rest)
            fresh.rename(folder / grammar_id.hex())
            self._shrink(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            self._complain(error)

    def _shrink(self, folder: Path) -> None:
        for grammar_id in self._list(folder)[: -self._most]:
            (folder / grammar_id.hex()).unlink(missing_ok=True)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            log.warning("compiled grammars are not kept: a standby compiles them again: %s", error)
        self._complained = True


def _checksum(rest: bytes) -> bytes:
    return hashlib.blake2b(rest, digest_size=16).digest()
