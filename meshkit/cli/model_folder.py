"""Finds a model folder and says what is wrong with it, before anything starts.

Looks at names, sizes and headers only, in milliseconds also for a 160 GB checkpoint; the worker's loader checks every
tensor. Knows DeepSeek's layout: config.json, tokenizer.json, one or many .safetensors files with an index.
"""

import json
import os
import re
import stat
import struct
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import meshkit
from meshkit.config import environment
from meshkit.exit_codes import Exit, Problem, ProblemsError

DEFAULT_MODEL = Path(meshkit.__file__).parent / "models" / "v4-nano-trial"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SUPPORTED_TYPE = "deepseek_v4"
LONGEST_HEADER = 100 << 20  # bytes; a real V4 shard's header has about 0.3 MB


def check_model_folder(folder: Path) -> list[Problem]:
    """Everything wrong with this folder as far as names, sizes and headers tell; empty if nothing is."""
    if not folder.is_dir():
        what = "is a file, not a model folder" if folder.exists() else "does not exist"
        return [_bad(f"{folder} {what}", _nearest_sibling(folder))]
    if not (folder / "config.json").exists():
        held = sorted(p.name + ("/" if p.is_dir() else "") for p in folder.iterdir())[:6]
        inside = next(_configs_below(folder), None)
        hint = f"did you mean {inside}?" if inside else "give the folder that holds config.json and the weights"
        return [_bad(f"{folder} has no config.json. It holds: {', '.join(held) or 'nothing'}", hint)]
    config, problems = _read_json(folder / "config.json")
    if config is None:
        return problems
    problems += _check_type(folder, config)
    problems += _check_shards(folder)
    if not (folder / "tokenizer.json").exists():
        problems.append(_bad(f"{folder} has no tokenizer.json", "copy it from the checkpoint's repository"))
    return problems


def find_model(name: str | None) -> Path:
    """The folder for what the user named: nothing (the demo model), a folder, or a hub id in a local cache.

    Never downloads. A path that is wrong is returned as it is, for `check_model_folder` to explain; an id that no
    cache holds raises ProblemsError with the places looked at.
    """
    if not name:
        return DEFAULT_MODEL
    folder = Path(name).expanduser()
    if folder.exists() or not HUB_ID.fullmatch(name):
        return folder.absolute()
    looked = []
    for cache in _hub_caches():
        repository = cache / f"models--{name.replace('/', '--')}"
        looked.append(str(repository))
        if snapshot := _snapshot(repository):
            return snapshot
    fix = f"download it first (hf download {name}), or give a local folder; nothing is downloaded silently"
    details = tuple(f"looked in {place}" for place in (str(folder.absolute()), *looked))
    raise ProblemsError(Problem("MODEL_DIR", Exit.MODEL, f"{name} is not on this machine", fix, details))


def _hub_caches() -> list[Path]:
    """Where Hugging Face tools keep repositories, most specific first."""
    env = environment()
    home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface")
    places = [env.get("HF_HUB_CACHE"), env.get("HUGGINGFACE_HUB_CACHE"), str(home.expanduser() / "hub")]
    return [Path(p) for p in dict.fromkeys(places) if p]


def _snapshot(repository: Path) -> Path | None:
    """The checked-out revision of a cached repository: main's, else the newest that has a config."""
    snapshots = repository / "snapshots"
    main = repository / "refs" / "main"
    if main.is_file() and (snapshots / main.read_text().strip() / "config.json").exists():
        return snapshots / main.read_text().strip()
    if not snapshots.is_dir():
        return None
    found = [p for p in snapshots.iterdir() if (p / "config.json").exists()]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


def weight_bytes(folder: Path) -> int:
    """Bytes of all weight files."""
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def served_name(folder: Path) -> str:
    """The name clients use: v4mesh.json's if it says one, else the folder's."""
    card = folder / "v4mesh.json"
    if card.exists():
        data, _ = _read_json(card)
        if data and isinstance(data.get("served_model_name"), str):
            return str(data["served_model_name"])
    if folder.parent.name == "snapshots":  # models--org--name/snapshots/<revision>
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.resolve().name


def _bad(fact: str, fix: str = "", code: str = "MODEL_DIR") -> Problem:
    return Problem(code, Exit.MODEL, fact, fix)


def _nearest_sibling(folder: Path) -> str:
    parent = folder.parent
    if not parent.is_dir():
        return f"{parent} does not exist either; give a local folder (nothing is downloaded)"
    near = get_close_matches(folder.name, [p.name for p in parent.iterdir() if p.is_dir()], n=1, cutoff=0.6)
    return f"did you mean {parent / near[0]}?" if near else "give a local folder (nothing is downloaded)"


def _configs_below(folder: Path, depth: int = 4) -> Iterator[Path]:
    """Folders below that hold a config.json, nearest first; looks at 200 folders at most."""
    level, seen = [folder], 0
    for _ in range(depth):
        below: list[Path] = []
        for parent in level:
            try:
                below += sorted(p for p in parent.iterdir() if p.is_dir())
            except OSError:
                continue
        for child in below:
            seen += 1
            if (child / "config.json").exists():
                yield child
            if seen >= 200:
                return
        level = below


def _read_json(path: Path) -> tuple[dict[str, Any] | None, list[Problem]]:
    try:
        data = json.loads(path.read_bytes())
    except PermissionError:
        return None, [_unreadable(path)]
    except ValueError as e:
        return None, [_bad(f"{path} is no JSON: {e}", "download it again")]
    if not isinstance(data, dict):
        return None, [_bad(f"{path} holds a {type(data).__name__}, not an object", "download it again")]
    return data, []


def _unreadable(path: Path) -> Problem:
    info = path.stat()
    fact = f"cannot read {path}: owner {info.st_uid} mode {stat.S_IMODE(info.st_mode):04o}, we are uid {os.getuid()}"
    return _bad(fact, f"chmod a+r {path}, or set `user:` in compose", "PERM")


def _check_type(folder: Path, config: dict[str, Any]) -> list[Problem]:
    kind = config.get("model_type")
    if kind == SUPPORTED_TYPE:
        return []
    name = "V4.1" if str(kind).startswith("deepseek_v4") else "another model"
    return [_bad(f"{folder}: this is {name} (model_type {kind!r}), not supported", f"serves: {SUPPORTED_TYPE}")]


def _check_shards(folder: Path) -> list[Problem]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        data, problems = _read_json(index)
        if data is None:
            return problems
        names = sorted(set(data.get("weight_map", {}).values()))
    else:
        names, problems = sorted(p.name for p in folder.glob("*.safetensors")), []
    if not names:
        return [_bad(f"{folder} holds no .safetensors weights", "download the weights, or give another folder")]
    for number, name in enumerate(names, 1):
        path = folder / name
        label = f"shard {number} of {len(names)} ({name})" if len(names) > 1 else name
        if not path.exists():
            problems.append(_bad(f"{folder}: {label} is missing", "download it again"))
            continue
        problems += _check_size(path, label)
    return problems


def _check_size(path: Path, label: str) -> list[Problem]:
    """Does the file hold as many bytes as its own header promises?"""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 2 <= length <= min(LONGEST_HEADER, size):
                raise ValueError("header length")
            header = json.loads(file.read(length))
        ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
    except PermissionError:
        return [_unreadable(path)]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        return [_bad(f"{path}: {label} is no safetensors file, or cut off in its header", "download it again")]
    wanted = 8 + length + max(ends, default=0)
    if size < wanted:
        gb = f"{size / 1e9:.2f} of {wanted / 1e9:.2f} GB" if wanted > 1e8 else f"{size:,} of {wanted:,} bytes"
        return [_bad(f"{path.parent}: {label}: {gb} (interrupted download?)", "download it again")]
    return []
