"""Which ids of a vocabulary must never be sampled, read from a model folder's `tokenizer.json`.

Those are the ids without a token (a model's vocabulary may be larger than its tokenizer's) and the reserved
placeholders of DeepSeek's files. Plain JSON reading: nothing is tokenized here.
"""

import json
from pathlib import Path

from meshkit.errors import ModelDirError

_PLACEHOLDERS = ("<｜place▁holder▁", "<|place_holder_")


def unsampleable_ids(folder: Path, vocab_size: int) -> list[int]:
    """Ids below `vocab_size` (rows of the model's output layer) to mask, ascending.

    Raises `ModelDirError` when `tokenizer.json` is missing, broken or has no token at all below `vocab_size`.
    """
    tokens = _tokens(folder / "tokenizer.json")
    masked = [i for i in range(vocab_size) if i not in tokens or tokens[i].startswith(_PLACEHOLDERS)]
    if len(masked) == vocab_size:
        raise ModelDirError(
            f"{folder / 'tokenizer.json'}: no token has an id below the model's vocab_size {vocab_size}"
        )
    return masked


def _tokens(path: Path) -> dict[int, str]:
    """Id -> spelling of every token; added tokens override the vocabulary."""
    try:
        spec = json.loads(path.read_bytes())
        tokens = {int(token_id): str(token) for token, token_id in spec["model"]["vocab"].items()}
        tokens |= {int(entry["id"]): str(entry["content"]) for entry in spec.get("added_tokens", [])}
    except OSError as exc:
        raise ModelDirError(f"{path}: {exc.strerror}; the model folder must hold a readable tokenizer.json") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ModelDirError(f"{path}: not a tokenizer file with model.vocab and added_tokens: {exc!r}") from exc
    return tokens
