"""Logits against transformers, however they are computed; and every rule of the forward, broken, shows."""

import pytest
import torch

from benchmarks._scenarios import SCENARIOS, Piece, Rig, exact_replay, prefill
from tests.model.conftest import known
from worker_svc.checkpoint.census import preset
from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.generate import generate_checkpoint
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.ops.hyper_mix import ref as hyper_ref

TOLERANCE = 1e-4
VISIBLE = 1e-3


@pytest.fixture(scope="module")
def rig(tiny):
    return Rig(tiny.checkpoint)


def worst(pieces, known) -> float:
    found = 0.0
    for piece in pieces:
        difference = (piece.logits - known.logits[piece.of][piece.first :][: len(piece.logits)]).abs().max()
        found = float("inf") if difference.isnan() else max(found, float(difference))
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_logits_equal_transformers(rig, tiny, name):
    rig.forget()
    assert worst(SCENARIOS[name](rig, tiny.sequences), tiny) < TOLERANCE


def test_every_scenario_covers_every_position_it_claims(rig, tiny):
    """A scenario that yields nothing would pass silently."""
    for name, first in (("random_chunks_39", 0), ("resume_from_tail", 256), ("verify_rows", 0)):
        rig.forget()
        positions = [p for piece in SCENARIOS[name](rig, tiny.sequences) for p in _positions(piece)]
        assert positions == list(range(first, 300)), name


def _positions(piece):
    return range(piece.first, piece.first + len(piece.logits))


def test_an_exact_replay_equals_transformers_and_a_shorter_one_does_not(shallow):
    rig = Rig(shallow.checkpoint)
    rig.forget()
    assert worst(exact_replay()(rig, shallow.sequences), shallow) < TOLERANCE
    rig.forget()
    assert worst(exact_replay(missing=192)(rig, shallow.sequences), shallow) > VISIBLE


def test_a_replay_leaves_the_retained_pages_alone(shallow):
    rig = Rig(shallow.checkpoint)
    ids, pages = shallow.sequences[0], [0, 1, 2]
    rig.feed(ids, 0, 0, 512, pages)
    stores = [store for layer in rig.pools.layers for store in layer.page_stores()]
    before = [plane.clone() for store in stores for plane in store.planes]
    rig.feed(ids, 1, 130, 512, pages, write_from=512, fresh_from=130)
    after = [plane for store in stores for plane in store.planes]
    assert all(torch.equal(old, new) for old, new in zip(before, after))


def test_a_model_without_window_only_layers_equals_transformers(tmp_path):
    """Pro's pattern, C128 from layer 0 on, and positions far enough that C128 layers hold several entries."""
    content = preset("tiny").to_dict() | {"num_hidden_layers": 5, "compress_ratios": [128, 128, 4, 128, 4, 0]}
    folder = generate_checkpoint(V4Config.from_dict(content), tmp_path, seed=9, content="lively")
    pro = known(load_checkpoint(folder), 900)
    rig, ids, start = Rig(pro.checkpoint), pro.sequences[0], 0
    rig.forget()
    for size in (255, 1, 2, 130, 256, 256):
        piece = Piece(0, start, rig.feed(ids, 0, start, start + size, [3, 1, 0, 2]))
        assert worst([piece], pro) < TOLERANCE
        start += size
    assert start == 900


# ---- mutations: break one rule of a built model, and the logits must move -------------------------------------------


def _attentions(rig):
    return [block.attn for block in rig.model.blocks]


def no_sink(rig, patch):
    for attn in _attentions(rig):
        patch.setattr(attn, "sink", attn.sink - 1e9)


def swapped_rope_bases(rig, patch):
    plain, compressed = rig.builder.ropes[False], rig.builder.ropes[True]
    for attn in _attentions(rig):
        patch.setattr(attn, "rope", plain if attn.rope is compressed else compressed)


def scaled_softmax(rig, patch):
    for attn in _attentions(rig):
        patch.setattr(attn, "scale", attn.scale * 1.2)


def no_inverse_rope(rig, patch):
    for rope in rig.model.ropes:
        patch.setattr(rope, "inverse", torch.ones_like(rope.inverse))


def window_of_127(rig, patch):
    import worker_svc.model.step as module

    tiles = module._tiles
    patch.setattr(
        module, "_tiles", lambda start, length, first, window, det: tiles(start, length, first, window - 1, det)
    )


def own_entry_hidden(rig, patch):
    import worker_svc.model.step as module

    plan = module._plan_entries

    def late(row, ratio, pools):
        found = plan(row, ratio, pools)
        object.__setattr__(found, "visible", (found.visible - 1).clamp_min(0))
        return found

    patch.setattr(module, "_plan_entries", late)


def swapped_halves(rig, patch):
    from worker_svc.model.compressor import Compressor

    overlapping = Compressor._overlapping

    def swapped(self, states, count, no_past):
        parts = states.view(-1, 4, self.head_dim)[:, [1, 0, 3, 2]].reshape(states.shape)
        return overlapping(self, parts, count, no_past)

    patch.setattr(Compressor, "_overlapping", swapped)


def entries_without_ape(rig, patch):
    for attn in _attentions(rig):
        if attn.compressor is not None:
            patch.setattr(attn, "position_bias", attn.position_bias * 0)


def index_relu_missing(rig, patch):
    import worker_svc.ops.index_scores.ref as module

    patch.setattr(module, "index_scores", lambda q, k, w: torch.einsum("the,ne,th->tn", q, k, w))


def too_few_entries(rig, patch):
    for attn in _attentions(rig):
        if attn.indexer is not None:
            patch.setattr(attn.indexer, "top_k", attn.indexer.top_k - 1)


def comb_untransposed(rig, patch):
    patch.setattr(
        hyper_ref,
        "expand",
        lambda out, x, post, comb: torch.baddbmm(post.unsqueeze(-1) * out.unsqueeze(1), comb, x),
    )


def one_sinkhorn_round_less(rig, patch):
    import worker_svc.ops.hyper_mix.host as module

    sinkhorn = module._sinkhorn
    patch.setattr(module, "_sinkhorn", lambda scores, rounds, eps: sinkhorn(scores, rounds - 1, eps))


def post_without_factor_two(rig, patch):
    import worker_svc.model.glue as module

    mix = module.mix_weights
    patch.setattr(module, "mix_weights", lambda *args: (lambda pre, post, comb: (pre, post / 2, comb))(*mix(*args)))


def bias_in_weights(rig, patch):
    import worker_svc.model.glue as module

    weights = module.expert_weights
    bias = next(block.ffn.router.bias for block in rig.model.blocks if block.ffn.router.bias is not None)
    patch.setattr(
        module, "expert_weights", lambda scores, experts, factor: weights(scores + bias.abs(), experts, factor)
    )


def shared_expert_scaled(rig, patch):
    for block in rig.model.blocks:
        scaled = block.ffn.w2_t.clone()
        scaled[-1] *= 1.5
        patch.setattr(block.ffn, "w2_t", scaled)


def symmetric_gate_clamp(rig, patch):
    import worker_svc.ops.swiglu_experts.ref as module

    def clamped(hidden, limit):
        gate, up = hidden.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.clamp(-limit, limit)) * up.clamp(-limit, limit)

    patch.setattr(module, "clamped_swiglu", clamped)


def hash_layers_route_by_score(rig, patch):
    for block in rig.model.blocks:
        if block.ffn.router.table is not None:
            patch.setattr(block.ffn.router, "bias", torch.zeros(block.ffn.router.weight_t.shape[1]))
            patch.setattr(block.ffn.router, "table", None)


MUTATIONS = [
    no_sink,
    swapped_rope_bases,
    scaled_softmax,
    no_inverse_rope,
    window_of_127,
    own_entry_hidden,
    swapped_halves,
    entries_without_ape,
    index_relu_missing,
    too_few_entries,
    comb_untransposed,
    one_sinkhorn_round_less,
    post_without_factor_two,
    bias_in_weights,
    shared_expert_scaled,
    symmetric_gate_clamp,
    hash_layers_route_by_score,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_broken_rule_shows_in_the_logits(rig, tiny, mutate, monkeypatch):
    rig.forget()
    mutate(rig, monkeypatch)
    assert worst(prefill(rig, tiny.sequences), tiny) > VISIBLE


@pytest.mark.parametrize("ring", ["window_ring", "state_ring"])
def test_a_ring_below_its_minimum_shows(tiny, ring, monkeypatch):
    """Verify rows of 8: the window ring needs W + k - 2 rows (old ones are read first), states w + k - 2."""
    from worker_svc.kv.layout import KvLayout

    if ring == "window_ring":
        monkeypatch.setattr(KvLayout, "window_ring", property(lambda self: self.window + self.max_verify - 3))
    else:
        monkeypatch.setattr(KvLayout, "state_ring", lambda self, ratio: max(8, ratio) + self.max_verify - 3)
    rig = Rig(tiny.checkpoint)
    rig.forget()
    assert worst(SCENARIOS["verify_rows"](rig, tiny.sequences), tiny) > VISIBLE


def test_the_smallest_rings_suffice(tiny, monkeypatch):
    from worker_svc.kv.layout import KvLayout

    monkeypatch.setattr(KvLayout, "window_ring", property(lambda self: self.window + self.max_verify - 2))
    monkeypatch.setattr(KvLayout, "state_ring", lambda self, ratio: max(8, ratio) + self.max_verify - 2)
    rig = Rig(tiny.checkpoint)
    rig.forget()
    assert worst(SCENARIOS["verify_rows"](rig, tiny.sequences), tiny) < TOLERANCE
