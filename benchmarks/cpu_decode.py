"""Decode speed on the CPU, batch 1, FP32, end to end over REST, against transformers with the same weights, same run.

Both sides decode the same number of tokens greedily after the same prompt; rounds alternate so that a noisy machine
hits both. Rates count the tokens after the first, so prompt work is left out on both sides.
"""

import statistics
import time
from typing import Any

from benchmarks._mesh import running_mesh, stream_tokens

TITLE = "CPU decode over REST, batch 1, against transformers in-process (same weights, same run)"
PROMPT = "Once upon a time there was a kind child called Mia who lived near the hill."
TOKENS = 192
ROUNDS = 7


def _transformers_model() -> Any:
    import torch
    import transformers

    from meshkit.models import DEFAULT_MODEL
    from worker_svc.checkpoint.loader import load_checkpoint
    from worker_svc.checkpoint.to_transformers import transformers_config, transformers_state_dict

    checkpoint = load_checkpoint(DEFAULT_MODEL)
    peer: Any = transformers
    config = peer.DeepseekV4Config(**transformers_config(checkpoint.config), attn_implementation="eager")
    model = peer.DeepseekV4ForCausalLM(config).to(torch.float32).eval()
    missing, unexpected = model.load_state_dict(transformers_state_dict(checkpoint), strict=False)
    assert not unexpected, unexpected
    assert all("rotary" in name or "inv_freq" in name for name in missing), missing
    return model


def _transformers_rate(model: Any, ids: list[int]) -> float:
    import torch

    with torch.inference_mode():
        out = model(input_ids=torch.tensor([ids]), use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        for _ in range(TOKENS - 1):
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return (TOKENS - 1) / (time.perf_counter() - start)


def _mesh_rate(url: str) -> float:
    body = {"model": "v4-nano", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    times = stream_tokens(url, body)
    # Events can carry several tokens or none (a finish event): the count of tokens is known, the span is measured.
    return (TOKENS - 1) / (times[-1] - times[0])


def run(args: list[str]) -> dict[str, float | int | str]:
    """Print a table of medians and return the ratio."""
    del args
    from gateway.text.tokenizer import Tokenizer
    from meshkit.models import DEFAULT_MODEL

    model = _transformers_model()
    ids = Tokenizer.load(DEFAULT_MODEL).encode(PROMPT)
    with running_mesh() as url:
        _mesh_rate(url), _transformers_rate(model, ids)
        pairs = [(_mesh_rate(url), _transformers_rate(model, ids)) for _ in range(ROUNDS)]
    with running_mesh("--deterministic") as url:
        _mesh_rate(url)
        deterministic = [(_mesh_rate(url), _transformers_rate(model, ids)) for _ in range(ROUNDS)]
    mesh, peer = (statistics.median(column) for column in zip(*pairs, strict=True))
    exact, exact_peer = (statistics.median(column) for column in zip(*deterministic, strict=True))
    print(f"{'tokens/s, median of ' + str(ROUNDS):34}{'mesh over REST':>16}{'transformers':>14}{'ratio':>8}")
    print(f"{'fast mode':34}{mesh:16.1f}{peer:14.1f}{mesh / peer:8.2f}")
    print(f"{'deterministic mode':34}{exact:16.1f}{exact_peer:14.1f}{exact / exact_peer:8.2f}")
    return {
        "tokens_per_s": round(mesh, 1),
        "transformers_tokens_per_s": round(peer, 1),
        "ratio_to_transformers": round(mesh / peer, 3),
        "deterministic_tokens_per_s": round(exact, 1),
        "deterministic_ratio_to_transformers": round(exact / exact_peer, 3),
    }
