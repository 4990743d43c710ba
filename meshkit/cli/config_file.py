"""Which config file is in force, and whether every section in it and in the environment can be read.

A section's class is a dataclass in its service's package, found by name when needed (`SECTION_CLASSES`); a service that
is not part of this installation has no keys to check.
"""

import importlib
import importlib.util
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from meshkit.cli.screen import Screen
from meshkit.config import env, load
from meshkit.errors import ConfigError, PermError
from meshkit.exit_codes import Exit, Problem

DEFAULT_FILE = Path("v4mesh.toml")
SECTION_CLASSES = {
    "up": ("meshkit.cli.up", "UpConfig"),
    "gateway": ("gateway.config", "GatewayConfig"),
    "scheduler": ("scheduler_svc.config", "SchedulerConfig"),
    "worker": ("worker_svc.config", "WorkerConfig"),
    "cache": ("cache_svc.config", "CacheConfig"),
    "grammar": ("grammar_svc.config", "GrammarConfig"),
}
SECRET = ("api_keys", "admin_key")


def config_path(screen: Screen) -> Path | None:
    """What --config or V4MESH_CONFIG says, else v4mesh.toml here if there is one; absolute, for child processes."""
    named = screen.config_file or env("V4MESH_CONFIG")
    if named:
        return Path(named).absolute()
    return DEFAULT_FILE.absolute() if DEFAULT_FILE.exists() else None


def section_class(name: str) -> type[Any] | None:
    """The dataclass of a section, None where its service is not part of this installation."""
    module, attribute = SECTION_CLASSES[name]
    if importlib.util.find_spec(module.partition(".")[0]) is None or importlib.util.find_spec(module) is None:
        return None
    found = getattr(importlib.import_module(module), attribute, None)
    return found if isinstance(found, type) else None


def load_section(name: str, file: Path | None) -> list[tuple[str, Any, str]] | None:
    """(key, value, source) of a section; None where its service is not there. Raises ConfigError, PermError."""
    cls = section_class(name)
    if cls is None:
        return None
    required = {f.name: "x" for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    rows = []
    for key, value, source in load(cls, name, file=file, flags=required).rows():
        if key in required:
            value, source = "", "required: `up` gives it"
        rows.append((key, "(secret)" if key in SECRET and value else value, source))
    return rows


def check_config(file: Path | None) -> list[Problem]:
    """One problem per section that cannot be read; an empty list if all can."""
    problems: list[Problem] = []
    for name in SECTION_CLASSES:
        try:
            load_section(name, file)
        except (ConfigError, PermError) as e:
            if all(p.fact != e.message for p in problems):
                problems.append(Problem(e.code, Exit(e.exit_code), e.message))
    return problems
