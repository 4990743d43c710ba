"""The draft layer against transformers' own layer, fed with the same streams; and in any chunks."""

import pytest
import torch

from benchmarks._reference import Reference
from benchmarks._scenarios import Rig, full_row
from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.loader import Checkpoint
from worker_svc.kv.pools import LayerPools
from worker_svc.model.step import ForwardInputs, plan_step

TOKENS = 170


@pytest.fixture(scope="module")
def draft(tiny):
    rig = Rig(tiny.checkpoint)
    layer = rig.builder.draft_layer(rig.model)
    assert layer is not None
    return rig, layer


@pytest.fixture(scope="module")
def inputs(tiny):
    draw = torch.Generator().manual_seed(2)
    config = tiny.checkpoint.config
    streams = torch.randn(TOKENS, config.hc_mult, config.hidden_size, generator=draw)
    return streams, tiny.sequences[0][:TOKENS]


def run(draft, inputs, cuts):
    rig, layer = draft
    streams, ids = inputs
    pools = LayerPools(rig.pools.layout, 0, slots=1, pages=0, tails=0)
    pools.window.poison()
    logits, carried, start = [], [], 0
    for end in cuts:
        batch = ForwardInputs(ids[start:end], (full_row(0, start, end, [0]),))
        step = plan_step(batch, rig.pools, rig.model.ropes, deterministic=False)
        out, after = layer.forward(streams[start:end], step, pools)
        logits.append(out)
        carried.append(after)
        start = end
    return torch.cat(logits), torch.cat(carried)


def test_logits_equal_a_transformers_layer_on_the_same_streams(draft, inputs, tiny):
    """The entry formula is spelled out here; everything after it is transformers' own code."""
    source, (streams, ids) = tiny.checkpoint, inputs
    e, h = source.float32("mtp.0.e_proj"), source.float32("mtp.0.h_proj")
    embedded = _norm(source.float32("embed")[ids], source.float32("mtp.0.enorm")) @ e.t()
    entry = embedded.unsqueeze(1) + _norm(streams, source.float32("mtp.0.hnorm")) @ h.t()
    reference = Reference(_as_trunk(source)).model
    reference.model.layers[0].register_forward_pre_hook(lambda module, args: (entry.unsqueeze(0), *args[1:]))
    with torch.inference_mode():
        wanted = reference(ids.unsqueeze(0)).logits[0]
    got, _ = run(draft, inputs, [TOKENS])
    assert float((got - wanted).abs().max()) < 1e-4


def test_chunks_do_not_matter(draft, inputs):
    whole, streams = run(draft, inputs, [TOKENS])
    parts, after = run(draft, inputs, [1, 2, 130, 131, TOKENS])
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after, streams, atol=1e-4, rtol=1e-4)


def _norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _as_trunk(source: Checkpoint) -> Checkpoint:
    """A model of one layer that is the draft layer, with its own norm and head mixer."""
    c = source.config
    content = c.to_dict() | {
        "num_hidden_layers": 1,
        "compress_ratios": [0],
        "num_hash_layers": 0,
        "num_nextn_predict_layers": 0,
    }
    weights = {name: source[name] for name in ("embed", "head")}
    for name in source:
        if name.startswith("mtp.0."):
            leaf = name.removeprefix("mtp.0.")
            if leaf not in ("e_proj", "h_proj", "enorm", "hnorm"):
                top = leaf == "norm" or leaf.startswith("hc_head")
                weights[leaf if top else f"layers.0.{leaf}"] = source[name]
    return Checkpoint(V4Config.from_dict(content), source.expert_format, weights)
