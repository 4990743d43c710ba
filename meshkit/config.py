"""One TOML file with a section per service, overridden by the environment and then by flags. The only reader of both.

A section is a frozen dataclass; its fields are the only keys. An unknown key, section or variable, or a value of the
wrong type or range, is a `ConfigError` (KEY, exit 3) that names where it stands and the nearest valid name.
Every value knows its source: `default`, `file:line`, `env NAME` or `flag --name`.
"""

import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, Union, get_args, get_origin

from meshkit.errors import ConfigError, PermError

SECTIONS: Final = ("gateway", "scheduler", "worker", "cache", "grammar", "up")
ENV_PREFIX: Final = "V4MESH_"

C = TypeVar("C")

# gRPC reads these when it is imported, which every service does after this module. Its fork handlers are for programs
# that fork after using it (this mesh spawns), its log repeats what we raise.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Read by torch's OpenMP when it loads: spinning threads starve the other services of a small machine (a prefill of
# 1,024 tokens took 12.6 s instead of 0.65 s on two busy cores).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([kKmMgGtT]?)(i?)([bB]?)")
_POWER: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_BOOLS: Final = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


class FieldError(ValueError):
    """For a section's `__post_init__`: field `field` has a value that cannot be; `why` says what would be right."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field, self.why = field, why


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """A section's value, and for each field where it came from."""

    value: C
    sources: Mapping[str, str]

    def rows(self) -> list[tuple[str, Any, str]]:
        """(name, value, source) of every field, in the order of the class."""
        return [(name, getattr(self.value, name), source) for name, source in self.sources.items()]


def environment() -> Mapping[str, str]:
    """The process's environment, read-only."""
    return types.MappingProxyType(os.environ)


def export(values: Mapping[str, str]) -> None:
    """Set variables that libraries of this process will read; one that is set already stays as it is."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def env(name: str, default: str = "") -> str:
    """One variable of the environment; unset and empty are the same."""
    return os.environ.get(name) or default


def parse_size(text: str) -> int:
    """`64GB` = 64e9, `64GiB` = 64 * 2**30, `25.6k` = 25,600, `32K` = 32,768, `1M` = 2**20, `1m` = 10**6.

    With a B the i decides; without one a capital letter means powers of 1024, as in other servers' flags.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size: write 4096, 25.6k, 32K, 64GB or 64GiB")
    number, unit, binary, is_bytes = match.groups()
    if binary and not unit:
        raise ValueError(f"{text!r} is no size: an i needs a unit before it, as in 64GiB")
    base = 1024 if binary or (not is_bytes and unit.isupper()) else 1000
    value = float(number) * base ** _POWER[unit.lower()]
    if value != int(value):
        raise ValueError(f"{text!r} is no whole number")
    return int(value)


def load(
    section_cls: type[C],
    section_name: str,
    *,
    file: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded[C]:
    """Read one section. `flags` maps field names to values from the command line; None there means "not given".

    Values from file, environment and flags are converted to the field's type (int fields take sizes).
    """
    hints = typing.get_type_hints(section_cls)
    found: dict[str, tuple[Any, str]] = {}
    if file is not None:
        found |= _from_file(Path(file), section_name, hints)
    found |= _from_environment(os.environ if environ is None else environ, section_name, hints)
    for name, value in (flags or {}).items():
        if value is not None:
            assert name in hints, f"flag {name} has no field in {section_cls.__name__}"
            found[name] = (value, f"flag --{name.replace('_', '-')}")
    return _build(section_cls, section_name, hints, found)


def _build(cls: type[C], section: str, hints: Mapping[str, Any], found: Mapping[str, tuple[Any, str]]) -> Loaded[C]:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for field in fields(cls):  # type: ignore[arg-type]  # C is a dataclass; typing has no bound for that
        if field.name in found:
            raw, source = found[field.name]
            try:
                values[field.name] = _convert(raw, hints[field.name])
            except ValueError as error:
                raise ConfigError(f"[{section}] {field.name} = {raw!r} ({source}): {error}") from error
            sources[field.name] = source
        else:
            sources[field.name] = "default"
            if field.default is MISSING and field.default_factory is MISSING:
                variable = f"{ENV_PREFIX}{section}_{field.name}".upper()
                flag = f"--{field.name.replace('_', '-')}"
                raise ConfigError(f"[{section}] {field.name} is required: set it in the file, {variable} or {flag}")
    try:
        return Loaded(cls(**values), types.MappingProxyType(sources))
    except FieldError as error:
        source = sources[error.field]
        shown = values.get(error.field, "default")
        raise ConfigError(f"[{section}] {error.field} = {shown!r} ({source}): {error.why}") from error


def _from_file(path: Path, section: str, hints: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    text = _read(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    lines = _line_numbers(text)

    def place(*names: str) -> str:
        line = lines.get(names)
        return f"{path}:{line}" if line else str(path)

    for name in document:
        if name != section and name not in SECTIONS:
            raise ConfigError(f"unknown section [{name}] ({place(name)}).{_nearest(name, (*SECTIONS, section))}")
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section} ({place(section)}) must be a section: [{section}]")
    found = {}
    for key, value in table.items():
        if key not in hints:
            raise ConfigError(f"unknown option {key} in [{section}] ({place(section, key)}).{_nearest(key, hints)}")
        found[key] = (value, place(section, key))
    return found


def _from_environment(environ: Mapping[str, str], section: str, hints: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    prefix = f"{ENV_PREFIX}{section.upper()}_"
    found = {}
    for name in sorted(environ):
        if not name.startswith(prefix) or environ[name] == "":
            continue
        key = name.removeprefix(prefix).lower()
        if key not in hints:
            near = _nearest(name, [prefix + hint.upper() for hint in hints])
            raise ConfigError(f"unknown option {key} in [{section}] (env {name}).{near}")
        found[key] = (environ[name], f"env {name}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no config file {path}") from error
    except PermissionError as error:
        raise PermError(f"cannot read {path}: {error.strerror}; we are uid {os.getuid()}. chmod a+r {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config file {path}: {error}") from error


_HEADER = re.compile(r"\s*\[\s*([A-Za-z0-9_-]+)\s*\]")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")


def _line_numbers(text: str) -> dict[tuple[str, ...], int]:
    """Lines of sections and of plain keys; exotic spellings are simply not found and shown without a line."""
    lines: dict[tuple[str, ...], int] = {}
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = (header[1],)
            lines.setdefault(section, number)
        elif key := _KEY.match(line):
            lines.setdefault((*section, key[1]), number)
    return lines


def _nearest(name: str, valid: Iterable[str]) -> str:
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Nearest: {close[0]}" if close else f" There is: {', '.join(names)}"


def _convert(raw: Any, hint: Any) -> Any:
    """`raw` (a TOML value, a string of the environment, or a flag) as type `hint`; ValueError says what is right."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        if isinstance(raw, str) and raw.lower() in ("none", "") and len(inner) < len(args):
            return None
        return _convert(raw, inner[0])
    if origin is Literal:
        if raw not in args:
            raise ValueError(f"must be one of {', '.join(map(str, args))}.{_nearest(str(raw), map(str, args))}")
        return raw
    if origin is tuple:
        items = [part.strip() for part in raw.split(",") if part.strip()] if isinstance(raw, str) else raw
        if not isinstance(items, (list, tuple)):
            raise ValueError("must be a list")
        return tuple(_convert(item, args[0]) for item in items)
    return _convert_plain(raw, hint)


def _convert_plain(raw: Any, hint: Any) -> Any:
    if hint is bool:
        if isinstance(raw, str) and raw.lower() in _BOOLS:
            return _BOOLS[raw.lower()]
        if isinstance(raw, bool):
            return raw
        raise ValueError("must be true or false")
    if isinstance(raw, bool):
        raise ValueError(f"must be {'a number' if hint in (int, float) else 'text'}, not {str(raw).lower()}")
    if hint is int:
        return raw if isinstance(raw, int) else parse_size(str(raw))
    if hint is float:
        try:
            return float(raw)
        except (TypeError, ValueError):
            raise ValueError("must be a number") from None
    if hint in (str, Path):
        if not isinstance(raw, (str, Path)):
            raise ValueError("must be text in quotes")
        return hint(raw)
    raise AssertionError(f"config fields of type {hint} are not supported")
