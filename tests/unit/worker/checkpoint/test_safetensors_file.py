"""The safetensors reader: agrees with the reference package, refuses every damaged or hostile file by name."""

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker_svc.checkpoint.errors import FileFormatError
from worker_svc.checkpoint.safetensors_file import INDEX_NAME, SafetensorsFile, open_folder


def put(path, content, data=b""):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def f32(begin, end, shape=None):
    return {"dtype": "F32", "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_reads_what_the_reference_package_writes(tmp_path):
    safetensors_torch = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.randn(4, 4).bfloat16(),
        "c": torch.arange(5),
        "d": torch.randn(8).to(torch.float8_e4m3fn),
        "e": torch.tensor(3.5),
        "f": torch.empty(0, 4),
        "g": torch.arange(3, dtype=torch.int8),
    }
    safetensors_torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.entries) == set(tensors)
    for name, tensor in tensors.items():
        got = file.tensor(name)
        assert got.dtype == tensor.dtype and got.shape == tensor.shape
        assert torch.equal(got.float(), tensor.float())


def test_the_reference_package_reads_what_we_write(whole):
    safetensors_torch = pytest.importorskip("safetensors.torch")
    theirs = safetensors_torch.load_file(whole / "model.safetensors")
    ours = SafetensorsFile(whole / "model.safetensors")
    assert set(theirs) == set(ours.entries)
    for name, tensor in theirs.items():
        got = ours.tensor(name)
        assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)), name


def test_unaligned_tensors_are_copied(tmp_path):
    data = b"\x01" + struct.pack("<2f", 1.5, -2.0)
    content = {"pad": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "x": f32(1, 9)}
    file = SafetensorsFile(put(tmp_path / "x.safetensors", content, data))
    assert file.tensor("x").tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("content", "data", "says"),
    [
        ({"a": f32(0, 4)}, b"\0" * 3, "3 of|bytes"),
        ({"a": f32(0, 4)}, b"\0" * 5, "1 bytes behind the last tensor"),
        ({"a": f32(0, 4), "b": f32(8, 12)}, b"\0" * 12, "b at offset 8 leaves a hole"),
        ({"a": f32(0, 8), "b": f32(4, 12)}, b"\0" * 12, "b at offset 4 overlaps"),
        ({"a": f32(4, 8)}, b"\0" * 8, "hole"),
        ({"a": f32(0, 8, [3])}, b"\0" * 8, r"a: shape \[3\] of F32 needs 12 bytes, data_offsets hold 8"),
        ({"a": f32(0, 0, [1 << 40, 1 << 40])}, b"", "needs"),
        ({"a": f32(0, 8, [-2])}, b"\0" * 8, "shape"),
        ({"a": f32(0, 8, [2.0])}, b"\0" * 8, "shape"),
        ({"a": f32(0, 8, [True, 2])}, b"\0" * 8, "shape"),
        ({"a": f32(0, 4, [1] * 9)}, b"\0" * 4, "at most 8"),
        ({"a": f32(8, 4, [0])}, b"\0" * 8, "rising"),
        ({"a": f32(0, 4) | {"data_offsets": [0]}}, b"\0" * 4, "data_offsets"),
        ({"a": f32(0, 4) | {"dtype": "F4"}}, b"\0" * 4, "unknown dtype 'F4'"),
        ({"a": f32(0, 4) | {"dtype": []}}, b"\0" * 4, "unknown dtype"),
        ({"a": f32(0, 4) | {"more": 1}}, b"\0" * 4, "nothing else"),
        ({"a": 7}, b"", "required"),
        ({"__metadata__": {"format": 1}}, b"", "strings to strings"),
        (b"[]", b"", "not a JSON object"),
        (b"{", b"", "not valid JSON"),
        (b"\xff{}", b"", "not valid JSON"),
        (b"[" * 200_000, b"", "not valid JSON"),
        (b'{"a":{"dtype":"F32","dtype":"F32"}}', b"", "a key appears twice"),
        (b'{"a":NaN}', b"", "NaN is not JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", b"", "not valid JSON"),
    ],
)
def test_damaged_headers_are_refused(tmp_path, content, data, says):
    path = put(tmp_path / "bad.safetensors", content, data)
    with pytest.raises(FileFormatError, match=says) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


def test_header_size_is_limited(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(FileFormatError, match="limit is 33554432"):
        SafetensorsFile(path)
    path.write_bytes(struct.pack("<Q", 1000) + b"{}")
    with pytest.raises(FileFormatError, match=r"10 of 1008 bytes|0\.01 of 1\.01 kB"):
        SafetensorsFile(path)
    path.write_bytes(b"{}")
    with pytest.raises(FileFormatError, match="empty download"):
        SafetensorsFile(path)


def test_truncation_says_how_much_is_there(copy):
    path = copy / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(FileFormatError, match=rf"{len(raw) / 2e6:.2f} of {len(raw) / 1e6:.2f} MB .interrupted"):
        SafetensorsFile(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 3000), byte=st.integers(0, 255))
def test_a_changed_header_byte_is_refused_or_stays_inside_the_file(whole, tmp_path, position, byte):
    raw = bytearray((whole / "model.safetensors").read_bytes())
    raw[position] = byte
    path = tmp_path / "changed.safetensors"
    path.write_bytes(raw)
    try:
        entries = SafetensorsFile(path).entries
    except FileFormatError:
        return
    at = 8 + int.from_bytes(raw[:8], "little")
    for entry in sorted(entries.values(), key=lambda entry: entry.begin):
        assert entry.begin == at and entry.begin <= entry.end
        at = entry.end
    assert at == len(raw)


class TestIndex:
    """A sharded folder: the index is checked against the shards both ways."""

    @pytest.fixture
    def folder(self, tmp_path):
        put(tmp_path / "s1.safetensors", {"a": f32(0, 4)}, b"\0" * 4)
        put(tmp_path / "s2.safetensors", {"b": f32(0, 4)}, b"\0" * 4)
        self.index(tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors"})
        return tmp_path

    @staticmethod
    def index(folder, weight_map):
        (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))

    def test_whole(self, folder):
        assert sorted(open_folder(folder).names()) == ["a", "b"]

    def test_missing_shard(self, folder):
        (folder / "s2.safetensors").unlink()
        with pytest.raises(FileFormatError, match=r"s2\.safetensors: shard 2 of 2 missing"):
            open_folder(folder)

    def test_tensor_mapped_to_the_wrong_shard(self, folder):
        self.index(folder, {"a": "s2.safetensors", "b": "s2.safetensors"})
        with pytest.raises(FileFormatError, match=r"a is mapped to s2\.safetensors, which does not hold it"):
            open_folder(folder)

    def test_tensor_the_index_does_not_know(self, folder):
        put(folder / "s1.safetensors", {"a": f32(0, 4), "c": f32(4, 8)}, b"\0" * 8)
        with pytest.raises(FileFormatError, match="holds c, which the index does not map"):
            open_folder(folder)

    @pytest.mark.parametrize(
        "shard",
        [
            "../s1.safetensors",
            "/etc/s1.safetensors",
            "x/s1.safetensors",
            "c:s1.safetensors",
            "s1.bin",
            3,
            "a\0.safetensors",
        ],
    )
    def test_paths_are_refused(self, folder, shard):
        self.index(folder, {"a": shard})
        with pytest.raises(FileFormatError, match="which is no shard name"):
            open_folder(folder)

    @pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": [1]}', "[" * 100_000])
    def test_broken_index(self, folder, text):
        (folder / INDEX_NAME).write_text(text)
        with pytest.raises(FileFormatError, match=r"index\.json"):
            open_folder(folder)

    def test_neither_file_nor_index(self, folder):
        (folder / INDEX_NAME).unlink()
        with pytest.raises(FileFormatError, match=r"holds s1\.safetensors, s2\.safetensors but no index"):
            open_folder(folder)
