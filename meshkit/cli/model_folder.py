"""Says what is wrong with a model's folder, before anything starts.

Looks at names, sizes and headers only, in milliseconds also for a 160 GB checkpoint; the worker's loader checks every
tensor. Knows DeepSeek's layout: config.json, tokenizer.json, one or many .safetensors files with an index.
"""

import json
import math
import os
import stat
import struct
from pathlib import Path
from typing import Any

from meshkit.errors import ModelDirError, PermError
from meshkit.exit_codes import Exit, Problem, ProblemsError
from meshkit.models import resolve_model

SUPPORTED_TYPE = "deepseek_v4"
PACKED = ("I8", "U8", "F4")
LONGEST_HEADER = 100 << 20  # bytes; a real V4 shard's header has about 0.3 MB


def check_model_folder(folder: Path) -> list[Problem]:
    """Everything wrong with a folder that `find_model` found, as far as names, sizes and headers tell."""
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

    Never downloads. Raises ProblemsError where there is no such model here.
    """
    try:
        return resolve_model(name or "").absolute()
    except (ModelDirError, PermError) as e:
        raise ProblemsError(Problem(e.code, Exit(e.exit_code), e.message)) from e


def weight_bytes(folder: Path) -> int:
    """Bytes of all weight files."""
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def cpu_bytes(folder: Path) -> int:
    """Bytes of all weights as the CPU worker holds them: FP32, with packed FP4 (two values per byte) unfolded."""
    total = 0
    for path in folder.glob("*.safetensors"):
        for name, tensor in _read_header(path)[1].items():
            if name != "__metadata__" and not name.endswith("scale"):
                total += 4 * math.prod(tensor["shape"]) * (2 if tensor["dtype"] in PACKED else 1)
    return total


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where a safetensors file's data begins, and its header; ValueError and its kin where it is none."""
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if not 2 <= length <= min(LONGEST_HEADER, size):
            raise ValueError("header length")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("header is no object")
    return 8 + length, header


def _bad(fact: str, fix: str = "", code: str = "MODEL_DIR") -> Problem:
    return Problem(code, Exit.MODEL, fact, fix)


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
        start, header = _read_header(path)
        ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
    except PermissionError:
        return [_unreadable(path)]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        return [_bad(f"{path}: {label} is no safetensors file, or cut off in its header", "download it again")]
    wanted = start + max(ends, default=0)
    if size < wanted:
        gb = f"{size / 1e9:.2f} of {wanted / 1e9:.2f} GB" if wanted > 1e8 else f"{size:,} of {wanted:,} bytes"
        return [_bad(f"{path.parent}: {label}: {gb} (interrupted download?)", "download it again")]
    return []
