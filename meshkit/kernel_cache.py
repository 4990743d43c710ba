"""Compiled GPU kernels on disk: one folder for all packages, packed into a file and unpacked elsewhere.

Every package that compiles reads its own variable; `folder_variables` points them all into one root, so that one
folder is the whole cache. An archive is taken apart with care: nothing lands outside the root, sizes are bounded.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path

VARIABLES: Mapping[str, str] = {  # what each package reads -> its folder under the root
    "TRITON_CACHE_DIR": "triton",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "HUMMING_CACHE_DIR": "humming",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "driver",
}
MANIFEST = "manifest.json"
TUNED = "tuned.json"  # measured choices, if `v4mesh precache --tune` ran
MOST_BYTES = 16 << 30
MOST_FILES = 200_000


class CacheFileError(ValueError):
    """An archive that is none of ours, or would write where it must not."""


def default_folder(environ: Mapping[str, str]) -> Path:
    """Where caches of all machines live if nobody says otherwise."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "v4mesh" / "kernels"


def folder_variables(root: Path) -> dict[str, str]:
    """The variables that make every package keep its kernels under `root`."""
    return {name: str(root / folder) for name, folder in VARIABLES.items()}


def pack(root: Path, archive: Path) -> int:
    """Write the cache to a .tar.gz; how many files. CacheFileError if there is nothing that a precache run left."""
    if not (root / MANIFEST).is_file():
        raise CacheFileError(f"{root} has no {MANIFEST}: run `v4mesh precache` first")
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    partial = archive.with_name(archive.name + ".part")
    with tarfile.open(partial, "w:gz", compresslevel=3) as out:
        for path in files:
            out.add(path, arcname=str(path.relative_to(root)), recursive=False)
    partial.replace(archive)
    return len(files)


def unpack(archive: Path, root: Path) -> int:
    """Unpack over `root`; how many files. CacheFileError names what is wrong, before that member is written."""
    count = size = 0
    root.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, "r:gz") as source:
            for member in source:
                count, size = count + 1, size + member.size
                if not member.isfile():
                    raise CacheFileError(f"{archive}: {member.name} is no plain file")
                if count > MOST_FILES or size > MOST_BYTES:
                    raise CacheFileError(f"{archive}: more than {MOST_FILES} files or {MOST_BYTES >> 30} GiB")
                source.extract(member, root, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise CacheFileError(f"{archive}: {error}") from error
    if not (root / MANIFEST).is_file():
        raise CacheFileError(f"{archive} holds no {MANIFEST}: it was not made by `v4mesh precache --pack`")
    return count
