"""The model this gateway serves: names, sizes and chat defaults, read from its folder without the weights.

The scheduler's word on context and vocabulary (from the worker that holds the weights) replaces the folder's once
known; the gateway refuses to serve a worker whose vocabulary is not the tokenizer's model.
"""

import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from gateway.text.chat_encoding import EffortRevision
from gateway.text.chat_encoding import effort_revision as effort_revision_of
from meshkit.errors import ModelDirError, PermError
from meshkit.types import ModelInfo


class _ModelConfig(msgspec.Struct):
    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None


class _MeshConfig(msgspec.Struct):
    served_model_name: str | None = None
    default_thinking: bool | None = None
    effort_revision: EffortRevision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    aliases: tuple[str, ...] = ()
    root: str = ""
    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]
    revision: str = ""
    kv_layout_id: str = ""
    default_thinking: bool = True
    effort_revision: EffortRevision = "preview"
    default_effort: str = "high"
    created: int = field(default_factory=lambda: int(time.time()))

    def answers_to(self, name: str | None) -> bool:
        return name is None or name == "" or name == self.name or name in self.aliases

    def told_by(self, info: ModelInfo) -> "ServedModel":
        """The same model with what the worker knows better."""
        return replace(
            self,
            vocab_size=info.vocab_size,
            max_context=info.max_context,
            eos_ids=info.eos_ids,
            revision=info.revision,
            kv_layout_id=info.kv_layout_id,
        )

    def card(self) -> dict[str, Any]:
        """The entry of /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "v4mesh",
            "root": self.root or self.name,
            "parent": None,
            "type": "model",  # from here on Anthropic's names
            "display_name": self.name,
            "created_at": datetime.fromtimestamp(self.created, UTC).isoformat(),
            "max_model_len": self.max_context,
        }


def read_model_folder(
    folder: Path, *, served_names: tuple[str, ...] = (), effort_revision: EffortRevision | None = None
) -> ServedModel:
    """Read config.json and, if there, v4mesh.json. Raises ModelDirError naming the file at fault."""
    config = _read(folder / "config.json", _ModelConfig, required=True)
    mesh = _read(folder / "v4mesh.json", _MeshConfig, required=False)
    assert config is not None
    names = served_names or ((mesh.served_model_name,) if mesh and mesh.served_model_name else (folder.name,))
    eos = config.eos_token_id
    thinking = mesh.default_thinking if mesh else None
    return ServedModel(
        name=names[0],
        aliases=names[1:],
        root=folder.name,
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        eos_ids=tuple(eos) if isinstance(eos, list) else (eos,) if eos is not None else (),
        default_thinking=True if thinking is None else thinking,
        effort_revision=effort_revision or (mesh.effort_revision if mesh else None) or effort_revision_of(folder),
    )


def _read(path: Path, kind: Any, *, required: bool) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        if not required:
            return None
        raise ModelDirError(
            f"{path.parent} has no {path.name}: --model must name a folder with config.json and tokenizer.json"
        ) from None
    except OSError as error:
        raise PermError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelDirError(f"{path}: {error}") from None
