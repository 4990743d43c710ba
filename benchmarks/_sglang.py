"""SGLang's own radix cache, from its wheel on PyPI, without SGLang's dependencies: for a comparison in one process.

The wheel is fetched and unpacked into a folder that is thrown away. Only the tree and what it is made of are imported;
every other SGLang module is stood in for by an empty one, since none of them takes part in matching or inserting.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REAL = ("radix_cache", "base_prefix_cache", "cache_init_params", "events", "evict_policy")
TIMEOUT_S = 180.0


class UnavailableError(Exception):
    """The wheel cannot be had, or is not made as expected."""


class _Nothing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls


class _StandIn(metaclass=_Nothing):
    """Whatever is asked of it: a class, a decorator, a value."""

    def __init__(self, *args: object, **more: object) -> None:
        del args, more

    def __init_subclass__(cls, **more: object) -> None:
        del more

    def __call__(self, *args: Any, **more: object) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn()


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.real = {f"sglang.srt.mem_cache.{name}" for name in REAL}

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "sglang" or name in self.real:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Empty(spec.name)
        module.__path__ = [str(self.folder / spec.name.replace(".", "/"))]
        if spec.name == "sglang.srt.utils.common":
            vars(module)["ceil_align"] = lambda value, size: -(-value // size) * size
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        del module


@contextlib.contextmanager
def radix_cache() -> Iterator[tuple[str, Any, Any]]:
    """(version, module radix_cache, module base_prefix_cache). Raises UnavailableError."""
    with tempfile.TemporaryDirectory(prefix="sglang-") as folder:
        version = _fetch(Path(folder))
        finder = _Finder(Path(folder))
        sys.meta_path.insert(0, finder)
        try:
            yield version, *_load()
        finally:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
                del sys.modules[name]


def _fetch(folder: Path) -> str:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    try:
        subprocess.run([*command, "--dest", folder, "sglang"], check=True, timeout=TIMEOUT_S, capture_output=True)
        (wheel,) = folder.glob("sglang-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [n for n in archive.namelist() if n.startswith("sglang/srt/mem_cache/")])
    except (subprocess.SubprocessError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise UnavailableError(f"no wheel of sglang can be had: {error}") from error
    return wheel.name.split("-")[1]


def _load() -> tuple[Any, Any]:
    try:
        tree = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        tree.RadixCache.create_simulated(page_size=256)
    except Exception as error:  # somebody else's code, made for other surroundings
        raise UnavailableError(f"this sglang is not made as expected: {type(error).__name__}: {error}") from error
    return tree, base
