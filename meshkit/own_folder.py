"""Folders under the temp folder that belong to a running process: each says to which one.

Who makes one removes those of processes that were killed before they could. Nothing is known of what is in them.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "v4mesh-"
OWNER = "pid"  # the file that says whose it is


def make_own_folder(parent: Path, kind: str = "") -> Path:
    """A fresh folder of this process, closed to others. Raises OSError."""
    remove_stale_folders(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX + kind, dir=parent))
    (folder / OWNER).write_text(str(os.getpid()))
    return folder


def remove_stale_folders(parent: Path) -> None:
    """Folders of this user whose process was killed before it could clean up."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if folder.stat().st_uid != os.getuid():
                continue
            pid = int((folder / OWNER).read_text())
            if not _alive(pid):
                shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
