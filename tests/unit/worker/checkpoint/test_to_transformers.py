"""The export meets transformers' own model: no name missing, none unexpected, none of another shape."""

from pathlib import Path

import pytest
import torch

import meshkit
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.checkpoint.to_transformers import transformers_config, transformers_state_dict

transformers = pytest.importorskip("transformers")
NANO = Path(meshkit.__file__).parent / "models" / "v4-nano"


@pytest.mark.parametrize("model", ["micro", "nano"])
def test_every_name_is_known_there(model, whole):
    checkpoint = load_checkpoint(NANO if model == "nano" else whole)
    arguments = transformers_config(checkpoint.config)
    config = transformers.DeepseekV4Config(**arguments, attn_implementation="eager")
    with torch.device("meta"):
        theirs = transformers.DeepseekV4ForCausalLM(config).state_dict()
    ours = transformers_state_dict(checkpoint)
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: t.shape for name, t in theirs.items()}
    yarn = config.rope_parameters["compress"]
    assert yarn["rope_type"] == "yarn"
    assert yarn.get("attention_factor", 1.0) == 1.0
    assert config.rope_parameters["main"]["rope_type"] == "default"
