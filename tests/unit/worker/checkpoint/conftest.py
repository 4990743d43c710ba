"""A checkpoint of three layers, written once, and ways to damage copies of it."""

import json
import shutil
from pathlib import Path

import pytest

from worker_svc.checkpoint.census import preset
from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.generate import generate_checkpoint


def micro_config() -> V4Config:
    """The tiny preset cut to window, C128 and C4 layers, plus its MTP block."""
    return preset("tiny").with_layers(3)


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """One undamaged checkpoint in a single file; read only."""
    return generate_checkpoint(micro_config(), tmp_path_factory.mktemp("whole"), 0, content="lively")


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """A private copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


class Header:
    """The parsed header of a safetensors file, to be changed and written back over the same data."""

    def __init__(self, path: Path) -> None:
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        self.path, self.content, self.data = path, json.loads(raw[8 : 8 + size]), bytearray(raw[8 + size :])

    def write(self) -> None:
        text = json.dumps(self.content).encode()
        self.path.write_bytes(len(text).to_bytes(8, "little") + text + self.data)

    def poke(self, name: str, offset: int, value: bytes) -> None:
        at = self.content[name]["data_offsets"][0] + offset
        self.data[at : at + len(value)] = value

    def drop(self, name: str) -> None:
        """Remove a tensor and its bytes, moving what lies behind it."""
        begin, end = self.content.pop(name)["data_offsets"]
        del self.data[begin:end]
        for entry in self.content.values():
            if entry["data_offsets"][0] >= end:
                entry["data_offsets"] = [offset - (end - begin) for offset in entry["data_offsets"]]

    def add(self, name: str, dtype: str, shape: list[int], data: bytes) -> None:
        at = len(self.data)
        self.content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        self.data += data


@pytest.fixture
def header(copy) -> Header:
    return Header(copy / "model.safetensors")
