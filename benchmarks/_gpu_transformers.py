"""Decode steps of transformers' DeepseekV4 in BF16 on the same GPU: same layers, same batch, a short context."""
# mypy: disallow-untyped-calls=False

import gc
import inspect
import time
from typing import Any

import torch

from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.to_transformers import transformers_config

PROMPT = 128
STEPS = 4


def decode_ms(config: V4Config, device: torch.device, batch: int) -> float:
    """Milliseconds of a cached greedy decode step of `batch` sequences, weights random."""
    model = _model(config, device)
    keyword = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        ids = torch.randint(3, config.vocab_size, (batch, PROMPT), device=device)
        output = model(ids, use_cache=True)
        for step in range(STEPS + 1):
            if step == 1:
                torch.cuda.synchronize()
                begin = time.perf_counter()
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, use_cache=True, **{keyword: output.past_key_values})
        torch.cuda.synchronize()
        taken = (time.perf_counter() - begin) / STEPS * 1e3
    del model, output
    gc.collect()
    torch.cuda.empty_cache()
    return taken


def _model(config: V4Config, device: torch.device) -> Any:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    settings = DeepseekV4Config(**transformers_config(config))
    settings._attn_implementation = "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            build: Any = DeepseekV4ForCausalLM
            model = build(settings)
    finally:
        torch.set_default_dtype(before)
    model.eval().to_empty(device=device)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.0156)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "DeepseekV4RotaryEmbedding":
                setattr(module, name, type(child)(settings).to(device))
        for name, buffer in module.named_buffers(recurse=False):
            if name == "tid2eid":
                buffer.random_(0, config.n_routed_experts)
            elif name == "e_score_correction_bias":
                buffer.zero_()
    return model
