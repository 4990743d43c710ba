"""Config: three layers, every value with its source, every mistake with its place and the nearest right name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from meshkit.config import FieldError, env, environment, load, parse_size
from meshkit.errors import ConfigError, PermError


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    model: str = "nano"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    slots: int = 16
    fraction: float = 0.5
    deterministic: bool = False
    folder: Path | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self):
        if self.slots < 1:
            raise FieldError("slots", "at least 1")


def write(tmp_path, text):
    path = tmp_path / "v4mesh.toml"
    path.write_text(text)
    return path


def test_layers_and_sources(tmp_path):
    file = write(tmp_path, '[gateway]\nport = 1\n\n[worker]\nmodel = "a"\nslots = 2\nfraction = 1\n')
    loaded = load(
        Section,
        "worker",
        file=file,
        environ={"V4MESH_WORKER_SLOTS": "3", "V4MESH_WORKER_MODEL": "b", "V4MESH_GATEWAY_X": "ignored"},
        flags={"model": "c", "deterministic": None},
    )
    assert loaded.value == Section(model="c", slots=3, fraction=1.0)
    assert loaded.sources["model"] == "flag --model"
    assert loaded.sources["slots"] == "env V4MESH_WORKER_SLOTS"
    assert loaded.sources["fraction"] == f"{file}:7"
    assert loaded.sources["deterministic"] == "default"
    assert loaded.rows()[0] == ("model", "c", "flag --model")


def test_conversions():
    environ = {
        "V4MESH_WORKER_SLOTS": "2k",
        "V4MESH_WORKER_DETERMINISTIC": "on",
        "V4MESH_WORKER_FOLDER": "/x",
        "V4MESH_WORKER_NAMES": "a, b",
        "V4MESH_WORKER_FRACTION": "0.25",
    }
    value = load(Section, "worker", environ=environ).value
    assert value == Section(slots=2000, deterministic=True, folder=Path("/x"), names=("a", "b"), fraction=0.25)
    assert load(Section, "worker", environ={"V4MESH_WORKER_FOLDER": "none"}).value.folder is None


@pytest.mark.parametrize(
    "text, message",
    [
        (
            '[worker]\nmodel = "x"\nkv_cache_dtyp = "fp8"',
            r"unknown option kv_cache_dtyp in \[worker\] \(.*v4mesh.toml:3\). Nearest: kv_cache_dtype",
        ),
        ("[workers]\n", r"unknown section \[workers\] \(.*:1\). Nearest: worker"),
        ("worker = 3", r"worker \(.*:1\) must be a section"),
        ('[worker]\nslots = "many"', r"\[worker\] slots = 'many' \(.*:2\): 'many' is no size"),
        ("[worker]\nslots = true", "must be a number, not true"),
        ("[worker]\nslots = 0", r"\[worker\] slots = 0 \(.*:2\): at least 1"),
        ("[worker]\nmodel = 3", "must be text in quotes"),
        ("[worker]\ndeterministic = 3", "must be true or false"),
        ("[worker]\nnames = 3", "must be a list"),
        ('[worker]\nfraction = "x"', "must be a number"),
        ('[worker]\nkv_cache_dtype = "fp9"', "must be one of auto, fp8. Nearest: fp8"),
        ("[worker\n", "not TOML"),
    ],
)
def test_mistakes_in_the_file(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(Section, "worker", file=write(tmp_path, text), environ={})
    assert caught.value.exit_code == 3
    assert caught.value.code == "KEY"


def test_unknown_variable():
    with pytest.raises(ConfigError, match=r"env V4MESH_WORKER_SLOT\). Nearest: V4MESH_WORKER_SLOTS"):
        load(Section, "worker", environ={"V4MESH_WORKER_SLOT": "3"})


def test_required_field_says_all_three_ways():
    @dataclass(frozen=True, kw_only=True)
    class Needs:
        model_path: str

    with pytest.raises(ConfigError, match=r"model_path is required: .* V4MESH_WORKER_MODEL_PATH or --model-path"):
        load(Needs, "worker", environ={})


def test_missing_and_unreadable_file(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="there is no config file"):
        load(Section, "worker", file=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot read config file"):
        load(Section, "worker", file=tmp_path)

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    file = write(tmp_path, "")
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(PermError, match="chmod a\\+r"):
        load(Section, "worker", file=file)


@pytest.mark.parametrize(
    "text, value",
    [
        ("4096", 4096),
        ("25.6k", 25_600),
        ("32K", 32_768),
        ("1m", 10**6),
        ("1M", 2**20),
        ("64GB", 64 * 10**9),
        ("64 GiB", 64 * 2**30),
        ("1.5KiB", 1536),
        ("10b", 10),
        ("2kb", 2000),
    ],
)
def test_sizes(text, value):
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "k", "12q", "-1", "1.0001", "5i", "1e3", "0.5B"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is no"):
        parse_size(text)


def test_environment_accessors(monkeypatch):
    monkeypatch.setenv("V4MESH_TEST_THING", "x")
    monkeypatch.setenv("V4MESH_TEST_EMPTY", "")
    assert env("V4MESH_TEST_THING") == environment()["V4MESH_TEST_THING"] == "x"
    assert env("V4MESH_TEST_EMPTY", "d") == "d"
