"""Where a model is: the shipped default, a folder, or a hub id found in local folders and the Hugging Face cache.

Nothing is ever downloaded. A folder counts as a model when it holds config.json; otherwise the error says what the
folder does hold and which folder was probably meant. What is inside is the loader's concern.
"""

import json
import os
from pathlib import Path
from typing import Final

from meshkit.config import env
from meshkit.errors import ModelDirError, PermError

DEFAULT_MODEL: Final = Path(__file__).parent / "v4-nano"
DEFAULT_NAMES: Final = ("v4-nano", "nano", "")
_CONFIG: Final = "config.json"


def resolve_model(name_or_path: str | Path) -> Path:
    """The model folder meant by a path, a hub id (`deepseek-ai/DeepSeek-V4-Flash`) or a name of the default model.

    ModelDirError (MODEL_DIR) if there is none, PermError if its config.json cannot be read.
    """
    name = str(name_or_path)
    if name in DEFAULT_NAMES:
        return DEFAULT_MODEL
    folder = Path(name).expanduser()
    if folder.exists():
        return _check(folder)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelDirError(f"there is no folder {name}.{_parent_hint(folder)}")
    tried = [Path.cwd() / folder.name, Path.cwd() / "models" / folder.name, Path.cwd() / "models" / folder]
    for candidate in tried:
        if (candidate / _CONFIG).is_file():
            return _check(candidate)
    cached = hub_cache() / f"models--{name.replace('/', '--')}"
    if (snapshot := _snapshot(cached)) is not None:
        return _check(snapshot)
    places = ", ".join([f"./{name}", *(_short(path) for path in tried), str(cached)])
    raise ModelDirError(
        f"no model {name} on this machine; nothing is downloaded. Looked in {places}. "
        f"Fetch it first (hf download {name}), pass a folder, or take the shipped {DEFAULT_NAMES[0]}"
    )


def served_name(folder: Path) -> str:
    """The name clients see: `served_model_name` of the folder's v4mesh.json, else the folder's or hub id's own name."""
    try:
        told = json.loads((folder / "v4mesh.json").read_bytes())["served_model_name"]
    except (OSError, ValueError, KeyError, TypeError):
        told = None
    if isinstance(told, str) and told:
        return told
    whole = folder.resolve()
    if whole.parent.name == "snapshots":  # models--org--name/snapshots/<revision>
        return whole.parent.parent.name.rpartition("--")[2]
    return whole.name


def hub_cache() -> Path:
    """The folder of the Hugging Face hub cache, by its own rules."""
    if explicit := env("HF_HUB_CACHE"):
        return Path(explicit).expanduser()
    home = env("HF_HOME") or str(Path(env("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    return Path(home).expanduser() / "hub"


def _snapshot(repository: Path) -> Path | None:
    """The folder of the revision `main`, else the newest one, of a cache entry."""
    snapshots = repository / "snapshots"
    if not snapshots.is_dir():
        return None
    reference = repository / "refs" / "main"
    if reference.is_file() and (main := snapshots / reference.read_text().strip()).is_dir():
        return main
    revisions = [entry for entry in snapshots.iterdir() if entry.is_dir()]
    return max(revisions, key=lambda entry: entry.stat().st_mtime, default=None)


def _check(folder: Path) -> Path:
    config = folder / _CONFIG
    try:
        if not folder.is_dir():
            raise ModelDirError(f"{folder} is a file, not a model folder. Pass the folder that holds {_CONFIG}")
        if not config.is_file():
            raise ModelDirError(f"{folder} has no {_CONFIG}. {_contents(folder)}")
        with config.open("rb") as file:
            file.read(1)
    except PermissionError as error:
        raise PermError(_permission_text(config)) from error
    return folder


def _contents(folder: Path) -> str:
    """What the folder holds, and the model inside it that was probably meant."""
    entries = sorted(folder.iterdir())
    shown = [entry.name + "/" * entry.is_dir() for entry in entries[:5]] + ["…"] * (len(entries) > 5)
    text = f"It holds: {', '.join(shown)}." if shown else "It is empty."
    for entry in entries:
        if not entry.is_dir():
            continue
        meant = _snapshot(entry) if entry.name.startswith("models--") else entry
        if meant is not None and (meant / _CONFIG).is_file():
            return f"{text} Did you mean {meant}?"
    return text


def _parent_hint(folder: Path) -> str:
    parent = folder.parent
    try:
        folders = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())[:5]
    except OSError:
        return f" {parent} cannot be listed either"
    return f" {parent} holds: {', '.join(folders)}" if folders else f" {parent} holds no folders"


def _permission_text(config: Path) -> str:
    try:
        status = config.stat()
        owner = f"owner {status.st_uid} mode {status.st_mode & 0o7777:04o}"
    except OSError:
        owner = "not even its mode is visible"
    return f"cannot read {config}: {owner}, we are uid {os.getuid()}. chmod a+r or set user: in compose"


def _short(path: Path) -> str:
    return f"./{path.relative_to(Path.cwd())}"
