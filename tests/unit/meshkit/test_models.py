"""Finding a model folder: default name, path, hub id in local folders and in the hub cache; errors that help."""

from pathlib import Path

import pytest

from meshkit.errors import ModelDirError, PermError
from meshkit.models import DEFAULT_MODEL, resolve_model, served_name

HUB_ID = "deepseek-ai/DeepSeek-V4-Flash"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path


def make_model(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_default_model_is_shipped_whole():
    assert resolve_model("v4-nano") == resolve_model("") == DEFAULT_MODEL
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in DEFAULT_MODEL.iterdir()}


def test_folder_and_hub_id_in_local_folders(here):
    folder = make_model(here / "weights")
    assert resolve_model(folder) == resolve_model("./weights").absolute() == folder
    assert resolve_model("weights").absolute() == folder
    local = make_model(here / "models" / "DeepSeek-V4-Flash")
    assert resolve_model(HUB_ID) == local


def test_hub_cache_takes_main_then_newest(here):
    cached = here / "hf" / "hub" / "models--deepseek-ai--DeepSeek-V4-Flash"
    make_model(cached / "snapshots" / "8a1f")
    main = make_model(cached / "snapshots" / "77aa")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("77aa\n")
    assert resolve_model(HUB_ID) == main
    (cached / "refs" / "main").write_text("gone")
    assert resolve_model(HUB_ID).name in ("8a1f", "77aa")


def test_folder_with_a_hub_cache_entry_inside(here):
    make_model(here / "model" / "models--deepseek-ai--DeepSeek-V4-Flash" / "snapshots" / "8a1f")
    with pytest.raises(ModelDirError) as caught:
        resolve_model(here / "model")
    assert "has no config.json. It holds: models--deepseek-ai--DeepSeek-V4-Flash/." in caught.value.message
    assert caught.value.message.endswith("snapshots/8a1f?")
    assert (caught.value.code, caught.value.exit_code) == ("MODEL_DIR", 6)


def test_nothing_found_says_where_it_looked(here):
    with pytest.raises(
        ModelDirError, match=r"no model deepseek-ai/DeepSeek-V4-Flash on this machine.*models--deepseek"
    ):
        resolve_model(HUB_ID)
    make_model(here / "there")
    with pytest.raises(ModelDirError, match=r"there is no folder .*absent\. .* holds: there"):
        resolve_model(here / "absent")
    (here / "empty").mkdir()
    with pytest.raises(ModelDirError, match="It is empty"):
        resolve_model(here / "empty")
    with pytest.raises(ModelDirError, match="is a file"):
        resolve_model(here / "there" / "config.json")


def test_unreadable_config_names_owner_and_mode(here, monkeypatch):
    folder = make_model(here / "secret")

    def refuse(self, *_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        PermError, match=r"cannot read .*config.json: owner \d+ mode 0\d{3}, we are uid \d+\. chmod a\+r"
    ):
        resolve_model(folder)


def test_served_name(here):
    assert served_name(DEFAULT_MODEL) == "v4-nano"
    folder = make_model(here / "flash")
    assert served_name(folder) == "flash"
    for text in ("[]", "{", '{"served_model_name": 3}', '{"served_model_name": ""}'):
        (folder / "v4mesh.json").write_text(text)
        assert served_name(folder) == "flash"
    assert served_name(make_model(here / "models--deepseek-ai--DeepSeek-V4-Flash" / "snapshots" / "8a1f")) == (
        "DeepSeek-V4-Flash"
    )
