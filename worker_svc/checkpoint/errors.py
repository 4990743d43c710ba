"""What can be wrong with a model folder: the worker's branch of the mesh's error tree.

CheckpointError         a ModelDirError: MODEL_DIR, exit status 6
├── UnreadableError    a file is there but cannot be read (code PERM)
├── ConfigError        config.json: a key is missing, of the wrong type, out of range, or contradicts another
│   └── UnsupportedModelError   a model of another architecture (V4.1, DSpark drafter, not V4 at all)
├── FileFormatError    a safetensors file or its index is damaged, truncated or hostile
├── TensorError        tensors missing, unexpected, of the wrong shape or dtype, or holding impossible values
└── NumericsError      a --quantization or --kv-cache-dtype name that this checkpoint cannot honour (KEY, 3)

Every message names the file, the key or tensor, the value found and what to do.
"""

from __future__ import annotations

import os
from pathlib import Path

from meshkit.errors import ModelDirError


class CheckpointError(ModelDirError):
    """A model folder that cannot be served."""


class UnreadableError(CheckpointError):
    """The file is there, but this process may not or cannot read it."""

    code = "PERM"

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"cannot read {path}: {_access(path, error)}")


class ConfigError(CheckpointError):
    """config.json says something that cannot be."""

    def __init__(self, file: str, key: str, value: object, remedy: str) -> None:
        subject = f"{key} = {_short(value)}: " if key else ""  # no key: the file as a whole
        super().__init__(f"{file}: {subject}{remedy}")
        self.file, self.key, self.value, self.remedy = file, key, value, remedy


class UnsupportedModelError(ConfigError):
    """A well-formed checkpoint of a model that this engine does not run."""


class FileFormatError(CheckpointError):
    """A weight file that cannot be trusted."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file}: {problem}")
        self.file = file


class TensorError(CheckpointError):
    """Tensors that do not match the config; `problems` has one line for each (the message shows ten)."""

    SHOWN = 10

    def __init__(self, folder: str, problems: list[str]) -> None:
        lines = "".join(f"\n  {problem}" for problem in problems[: self.SHOWN])
        rest = len(problems) - self.SHOWN
        more = f"\n  and {rest} more" if rest > 0 else ""
        noun = "tensor does" if len(problems) == 1 else "tensors do"
        super().__init__(f"{folder}: {len(problems)} {noun} not match config.json:{lines}{more}")
        self.problems = tuple(problems)


class NumericsError(CheckpointError):
    """An option names a number format that is not there; `choices` lists what is."""

    code = "KEY"
    exit_code = 3

    def __init__(self, option: str, value: str, reason: str, choices: tuple[str, ...]) -> None:
        super().__init__(f"{option} {value}: {reason}. There is: {', '.join(choices)}")
        self.option, self.value, self.choices = option, value, choices


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _access(path: Path, error: OSError) -> str:
    """Why, and what to do: for a permission problem whose file it is and who we are."""
    if not isinstance(error, PermissionError):
        return error.strerror or type(error).__name__
    try:
        status = path.stat()
    except OSError:
        return f"{error.strerror}; give uid {os.getuid()} access to the folder"
    mode = status.st_mode & 0o7777
    return f"owner {status.st_uid} mode {mode:04o}, we are uid {os.getuid()}; chmod a+r or run as its owner"
