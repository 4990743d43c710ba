"""Reader of one .safetensors file and of a sharded folder's index. Trusts nothing it reads.

Everything is checked before a byte is handed out: header size, JSON, dtypes, shapes against offsets, offsets
against each other (contiguous, not overlapping) and against the file's size. Tensors are views of a private
memory map: no copy, pages are read on first use. Knows no model; `loader` says which tensors must be there.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from worker_svc.checkpoint.errors import FileFormatError, UnreadableError

MAX_HEADER_BYTES = 32 << 20
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_MAX_DIMS = 8

DTYPES: dict[str, tuple[int, torch.dtype]] = {
    "BOOL": (1, torch.bool),
    "U8": (1, torch.uint8),
    "I8": (1, torch.int8),
    "F8_E5M2": (1, torch.float8_e5m2),
    "F8_E4M3": (1, torch.float8_e4m3fn),
    "F8_E8M0": (1, torch.uint8),  # the exponent byte itself; 2^(byte - 127), 255 is NaN
    "I16": (2, torch.int16),
    "F16": (2, torch.float16),
    "BF16": (2, torch.bfloat16),
    "I32": (4, torch.int32),
    "F32": (4, torch.float32),
    "I64": (8, torch.int64),
    "F64": (8, torch.float64),
}
"""File dtype -> (bytes per element, torch dtype of the view)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a header: where it lies in the file, absolute byte offsets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One open file: `entries` by name, `tensor(name)` as a view that keeps the map alive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if size < 8:
                    raise FileFormatError(str(path), f"{size} bytes are no safetensors file (empty download?)")
                # Copy-on-write: torch asks for a writable buffer, the file itself stays untouched.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise UnreadableError(path, error) from None
        self.entries = _read_header(str(path), self._map, size)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored: no conversion, no copy unless its offset is unaligned."""
        entry = self.entries[name]
        item_bytes, dtype = DTYPES[entry.dtype]
        count = (entry.end - entry.begin) // item_bytes
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.begin % item_bytes:
            data = bytearray(self._map[entry.begin : entry.end])
            return torch.frombuffer(data, dtype=dtype, count=count).view(entry.shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.begin).view(entry.shape)


def _read_header(path: str, data: mmap.mmap, size: int) -> dict[str, Entry]:
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise FileFormatError(
            path, f"the header claims {header_bytes} bytes, the limit is {MAX_HEADER_BYTES}: not a safetensors file"
        )
    if 8 + header_bytes > size:
        raise FileFormatError(path, _truncated(size, 8 + header_bytes))
    raw = bytes(data[8 : 8 + header_bytes])
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(path, f"the header is not valid JSON: {error or type(error).__name__}") from None
    if not isinstance(header, dict):
        raise FileFormatError(path, "the header is not a JSON object")
    _check_metadata(path, header.pop("__metadata__", None))
    entries = [_entry(path, name, value, 8 + header_bytes) for name, value in header.items()]
    _check_layout(path, entries, 8 + header_bytes, size)
    return {entry.name: entry for entry in entries}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key appears twice")
    return content


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _check_metadata(path: str, metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileFormatError(path, "__metadata__ must map strings to strings")


def _entry(path: str, name: str, value: object, base: int) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise FileFormatError(path, f"{name}: dtype, shape and data_offsets are required, nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FileFormatError(path, f"{name}: unknown dtype {dtype!r}")
    if not _is_int_list(shape) or len(shape) > _MAX_DIMS:
        raise FileFormatError(path, f"{name}: shape {shape!r} is no list of at most {_MAX_DIMS} sizes")
    if not _is_int_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FileFormatError(path, f"{name}: data_offsets {offsets!r} is no pair of rising offsets")
    needed = math.prod(shape) * DTYPES[dtype][0]
    if needed != offsets[1] - offsets[0]:
        raise FileFormatError(
            path, f"{name}: shape {shape} of {dtype} needs {needed} bytes, data_offsets hold {offsets[1] - offsets[0]}"
        )
    return Entry(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _is_int_list(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _check_layout(path: str, entries: list[Entry], base: int, size: int) -> None:
    """Tensors must cover the data part exactly: no hole, no overlap, no end beyond the file, nothing behind."""
    at = base
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != at:
            kind = "overlaps its predecessor" if entry.begin < at else "leaves a hole before it"
            raise FileFormatError(path, f"{entry.name} at offset {entry.begin - base} {kind} (at {at - base})")
        at = entry.end
    if at > size:
        raise FileFormatError(path, _truncated(size, at))
    if at < size:
        raise FileFormatError(path, f"{size - at} bytes behind the last tensor belong to nothing")


def _truncated(have: int, want: int) -> str:
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if want >= u), (1, "bytes"))
    have_text, want_text = (f"{have / unit:.2f}", f"{want / unit:.2f}") if unit > 1 else (str(have), str(want))
    if have_text == want_text:
        have_text, want_text, name = str(have), str(want), "bytes"
    return f"{have_text} of {want_text} {name} (interrupted download?)"


@dataclass(frozen=True, slots=True)
class TensorFolder:
    """All tensors of a checkpoint folder, whichever file holds them."""

    folder: Path
    files: tuple[SafetensorsFile, ...]
    where: Mapping[str, SafetensorsFile]

    def entry(self, name: str) -> Entry:
        return self.where[name].entries[name]

    def tensor(self, name: str) -> torch.Tensor:
        return self.where[name].tensor(name)

    def names(self) -> Iterator[str]:
        return iter(self.where)


def open_folder(folder: str | Path) -> TensorFolder:
    """Open model.safetensors.index.json with its shards, or model.safetensors; FileFormatError if neither holds."""
    folder = Path(folder)
    if (folder / INDEX_NAME).exists():
        return _open_sharded(folder)
    if (folder / SINGLE_NAME).exists():
        file = SafetensorsFile(folder / SINGLE_NAME)
        return TensorFolder(folder, (file,), dict.fromkeys(file.entries, file))
    loose = sorted(path.name for path in folder.glob("*.safetensors")) if folder.is_dir() else []
    held = f"; it holds {', '.join(loose[:4])} but no index" if loose else ""
    raise FileFormatError(str(folder), f"has neither {SINGLE_NAME} nor {INDEX_NAME}{held}")


def _open_sharded(folder: Path) -> TensorFolder:
    weight_map = _read_index(folder / INDEX_NAME)
    names = sorted(set(weight_map.values()))
    missing = [number for number, name in enumerate(names, 1) if not (folder / name).is_file()]
    if missing:
        first = names[missing[0] - 1]
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise FileFormatError(str(folder / first), f"shard {missing[0]} of {len(names)} missing{more}")
    files = {name: SafetensorsFile(folder / name) for name in names}
    for name, shard in weight_map.items():
        if name not in files[shard].entries:
            raise FileFormatError(str(folder / INDEX_NAME), f"{name} is mapped to {shard}, which does not hold it")
    for shard, file in files.items():
        stray = next((name for name in file.entries if weight_map.get(name) != shard), None)
        if stray is not None:
            raise FileFormatError(str(folder / shard), f"holds {stray}, which the index does not map to it")
    return TensorFolder(folder, tuple(files.values()), {name: files[shard] for name, shard in weight_map.items()})


def _read_index(path: Path) -> dict[str, str]:
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise FileFormatError(str(path), f"is larger than {MAX_HEADER_BYTES} bytes")
    try:
        content = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(str(path), f"is not valid JSON: {error}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileFormatError(str(path), "has no weight_map")
    for name, shard in weight_map.items():
        # A shard is a file name, never a path: an index must not be able to open files elsewhere.
        plain = isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set("/\\\0:")
        if not plain:
            raise FileFormatError(str(path), f"{name} is mapped to {shard!r}, which is no shard name")
    return weight_map
