"""The model's vocabulary as the compiler needs it, read from `tokenizer.json` (byte-level BPE) and `config.json`.

Control tokens (chat markers, EOS, placeholders) have no text for a grammar: no text rule can ever produce them, so a
JSON string cannot hold a turn marker. The one exception is the marker that tool calls are written with. Rows beyond
the tokenizer's ids exist in the model's output layer only and are never allowed.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshkit.errors import ModelDirError

TEXT_MARKERS: Final = ("｜DSML｜",)
THINK_END: Final = "</think>"
STRAY: Final = ("<｜", "<|")  # spellings of control tokens that tokenizer files keep in the plain vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """`tokens[i]` is token i in byte-level spelling, "" for one that grammars never allow."""

    tokens: tuple[str, ...]
    eos_ids: tuple[int, ...]
    think_end: int  # -1: this model does not think
    digest: str

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def words(self) -> int:
        """int32 words of one mask row."""
        return -(-len(self.tokens) // 32)


def read_vocabulary(folder: Path, *, vocab_size: int = 0, eos_ids: tuple[int, ...] = ()) -> Vocabulary:
    """From a model folder; without a config.json both numbers must be given. Raises ModelDirError."""
    path = folder / "tokenizer.json"
    try:
        raw = path.read_bytes()
        spec = json.loads(raw)
        if not (vocab_size and eos_ids):
            config = json.loads((folder / "config.json").read_bytes())
            vocab_size = vocab_size or int(config["vocab_size"])
            eos = config["eos_token_id"]
            eos_ids = eos_ids or tuple(eos if isinstance(eos, list) else [eos])
        return _build(spec, vocab_size, eos_ids, hashlib.blake2b(raw, digest_size=16).hexdigest())
    except OSError as error:
        raise ModelDirError(f"{error.filename}: {error.strerror}; the model folder must hold it") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelDirError(f"{folder}: no byte-level tokenizer.json with its config.json: {error!r}") from error


def _build(spec: Any, vocab_size: int, eos_ids: tuple[int, ...], digest: str) -> Vocabulary:
    tokens = [""] * vocab_size
    for text, number in spec["model"]["vocab"].items():
        if number < vocab_size and not text.startswith(STRAY):
            tokens[number] = text
    think_end = -1
    for entry in spec.get("added_tokens", []):
        text, number = str(entry["content"]), int(entry["id"])
        if number < vocab_size:
            tokens[number] = text if text in TEXT_MARKERS else ""
            think_end = number if text == THINK_END else think_end
    for number in eos_ids:
        if not 0 <= number < vocab_size:
            raise ValueError(f"eos id {number} is not below vocab_size {vocab_size}")
        tokens[number] = ""
    if not any(tokens):
        raise ValueError(f"no token has an id below vocab_size {vocab_size}")
    name = f"{digest}\0{vocab_size}\0{eos_ids}"
    return Vocabulary(
        tokens=tuple(tokens),
        eos_ids=eos_ids,
        think_end=think_end,
        digest=hashlib.blake2b(name.encode(), digest_size=16).hexdigest(),
    )
