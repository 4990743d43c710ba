"""The independent implementation that this engine is compared with: transformers, FP32, eager attention."""

from typing import Any

import torch
from torch import Tensor

from worker_svc.checkpoint.loader import Checkpoint
from worker_svc.checkpoint.to_transformers import transformers_config, transformers_state_dict


class Reference:
    """A checkpoint in transformers, dequantised: the same numbers as ours."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

        config = DeepseekV4Config(**transformers_config(checkpoint.config))
        config._attn_implementation = "eager"
        with torch.device("meta"):
            build: Any = DeepseekV4ForCausalLM
            self.model: Any = build(config)
        self.model.eval().to_empty(device="cpu")
        self._restore_buffers(config)
        missing, unexpected = self.model.load_state_dict(transformers_state_dict(checkpoint), strict=False)
        assert not missing and not unexpected, (missing, unexpected)

    def _restore_buffers(self, config: Any) -> None:
        """Rotary frequencies are buffers outside the state dict: build them anew on the CPU."""
        for module in list(self.model.modules()):
            for name, child in list(module.named_children()):
                if type(child).__name__ == "DeepseekV4RotaryEmbedding":
                    setattr(module, name, type(child)(config))

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """[S] -> [S, V], the whole sequence at once."""
        result: Tensor = self.model(ids.unsqueeze(0)).logits[0]
        return result

    @torch.inference_mode()
    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """`count` greedy ids by cached decode, with the gap between the two best logits at each."""
        output = self.model(torch.tensor([prompt]), use_cache=True)
        ids, gaps = [], []
        for _ in range(count):
            best = output.logits[0, -1].topk(2)
            ids.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            output = self.model(torch.tensor([[ids[-1]]]), cache=output.past_key_values, use_cache=True)
        return ids, gaps
