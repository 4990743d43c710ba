"""`tuned.json` beside a kernel cache's manifest: what was measured, on which machine, for which model; read with care.

A file that holds anything this version does not know, or would not run with, is refused whole, in words for the log.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshkit.kernel_cache import TUNED
from worker_svc.tuning import Value
from worker_svc.tuning.choices import CHOICES

SCHEMA = 1
MOST_BYTES = 1 << 20
REMEDY = "run `v4mesh precache MODEL --tune`"


class TunedFileError(ValueError):
    """A file that is not used; the message says why."""


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """One choice: its value, the built-in one at that time, the gain, and microseconds by candidate and point."""

    value: Value
    builtin: Value
    gain: float = 1.0
    micros: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)  # None: it lost

    @property
    def changed(self) -> bool:
        """True if the built-in value was beaten."""
        return self.value != self.builtin


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What one run of the tuner found; `machine` and `model` as in the manifest's folder and digest."""

    machine: str
    model: str
    date: str
    choices: Mapping[str, TunedChoice]

    @property
    def changed(self) -> dict[str, Value]:
        """Values other than the built-in ones."""
        return {name: choice.value for name, choice in self.choices.items() if choice.changed}

    def without(self, pinned: Collection[str]) -> dict[str, Value]:
        """`changed` but for choices between backends of which one is pinned."""
        return {name: value for name, value in self.changed.items() if not set(CHOICES[name].ops) & set(pinned)}

    def describe(self) -> str:
        """For people: how many of how many."""
        return f"{len(self.changed)} of {len(self.choices)} choices tuned"

    def write(self, root: Path) -> None:
        """Replace the file of a cache at once."""
        partial = root / f"{TUNED}.part"
        partial.write_text(json.dumps(self._plain(), indent=1, allow_nan=False))
        partial.replace(root / TUNED)

    def _plain(self) -> dict[str, Any]:
        choices = {
            name: {"value": c.value, "builtin": c.builtin, "gain": c.gain, "micros": c.micros}
            for name, c in self.choices.items()
        }
        return {"schema": SCHEMA, "machine": self.machine, "model": self.model, "date": self.date, "choices": choices}


def read_tuned(root: Path) -> Tuned | None:
    """The file of a cache, None if there is none. TunedFileError if there is one that cannot be used."""
    try:
        with (root / TUNED).open("rb") as source:
            data = source.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TunedFileError(f"it cannot be read ({error.strerror})") from error
    if len(data) > MOST_BYTES:
        raise TunedFileError(f"it has more than {MOST_BYTES} bytes")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TunedFileError("it is not JSON") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise TunedFileError("it was written by another version")
    choices = content.get("choices")
    if not isinstance(choices, dict):
        raise TunedFileError("choices is no object")
    texts = {name: _text(content.get(name), name) for name in ("machine", "model", "date")}
    return Tuned(**texts, choices={name: _choice(name, found) for name, found in choices.items()})


def tuned_folder(root: Path, elsewhere: str, machine: str) -> Path:
    """Where the file of a kernel cache lies: in it, or in a machine's folder of its own `elsewhere`."""
    return Path(elsewhere).expanduser() / machine if elsewhere else root


def usable(root: Path, machine: str, model: str) -> Tuned | None:
    """The file of a cache if it is for this machine and model; TunedFileError says why one that is there is not."""
    tuned = read_tuned(root)
    if tuned is None:
        return None
    if tuned.machine != machine:
        raise TunedFileError(f"it was measured on another machine ({tuned.machine[:80]})")
    if tuned.model != model:
        raise TunedFileError("it was measured for a model of other shapes")
    return tuned


def _choice(name: str, found: Any) -> TunedChoice:
    if name not in CHOICES:
        raise TunedFileError(f"there is no choice {name[:60]!r}")
    if not isinstance(found, dict):
        raise TunedFileError(f"{name} is no object")
    value, builtin = (_value(name, key, found.get(key)) for key in ("value", "builtin"))
    if not CHOICES[name].accepts(value):
        raise TunedFileError(f"{name} cannot be {str(found['value'])[:60]}")
    gain: Any = found.get("gain")
    micros = found.get("micros")
    if not _time(gain) or not isinstance(micros, dict):
        raise TunedFileError(f"{name}: gain or micros is of another type")
    for times in micros.values():
        if not isinstance(times, dict) or not all(time is None or _time(time) for time in times.values()):
            raise TunedFileError(f"{name}: micros are numbers by point")
    return TunedChoice(value, builtin, gain, micros)


def _value(name: str, key: str, found: Any) -> Value:
    if type(found) is int:
        return found
    if isinstance(found, list) and all(type(part) is int for part in found):
        return tuple(found)
    raise TunedFileError(f"{name}: {key} is no whole number and no list of such")


def _time(found: Any) -> bool:
    return type(found) in (int, float) and 0 <= found < 1e15  # false for NaN too


def _text(found: Any, name: str) -> str:
    if not isinstance(found, str):
        raise TunedFileError(f"{name} is no text")
    return found
