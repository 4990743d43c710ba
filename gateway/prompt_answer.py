"""Log-probabilities of a prompt's tokens as the dialects write them; the first token has none.

Pure: a job with its scores in, JSON values out.
"""

from collections.abc import Iterator
from typing import Any

from gateway.generation import Job
from gateway.text.tokenizer import Tokenizer
from meshkit.types import TokenLogprobs

LEAST = -9999.0
"""Stands for minus infinity, which JSON lacks."""


def scored(job: Job) -> Iterator[tuple[int, TokenLogprobs | None]]:
    """Each id of the prompt from the first one that was asked for; None where there is no value."""
    scores = job.scores
    assert scores is not None, "nothing was asked of this prompt"
    first = scores.first
    for position in range(first, len(job.prompt)):
        place = position - scores.start
        yield job.prompt[position], scores.entries[place] if 0 <= place < len(scores.entries) else None


def completion_lists(job: Job, tokenizer: Tokenizer, top: int, length: int) -> dict[str, Any]:
    """The four parallel lists of /v1/completions, for a text of `length` characters."""
    tokens, values, tops, offsets, data = [], [], [], [], b""
    text_of = tokenizer.token_text
    for token, entry in scored(job):
        offsets.append(min(length, len(data.decode(errors="ignore"))))
        data += tokenizer.token_bytes(token)
        tokens.append(text_of(token))
        values.append(None if entry is None else max(LEAST, entry.values[0]))
        shown = None if entry is None else list(zip(entry.ids, entry.values, strict=True))[: 1 + top]
        tops.append(None if shown is None else {text_of(other): max(LEAST, value) for other, value in shown})
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def vllm_list(job: Job, tokenizer: Tokenizer, top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: of each token a map of ids. The rank of a token below the alternatives is not known."""
    rows: list[dict[str, Any] | None] = []
    for _, entry in scored(job):
        if entry is None:
            rows.append(None)
            continue
        row: dict[str, Any] = {}
        for place, (token, value) in enumerate(zip(entry.ids[: 1 + top], entry.values, strict=False)):
            known = row.get(str(token), {"rank": None})
            rank = place or known["rank"]
            row[str(token)] = {"logprob": max(LEAST, value), "rank": rank, "decoded_token": tokenizer.token_text(token)}
        rows.append(row)
    return rows
