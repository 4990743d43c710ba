"""Run-time quantisation: what is stored is really smaller, what is read is what was rounded, and the text survives."""

import json

import pytest
import torch

from benchmarks._scenarios import Rig, prefill, random_chunks
from tests.model.conftest import NANO
from worker_svc.checkpoint.census import preset
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.kv.formats import RowStore, fp8_kv_rows
from worker_svc.kv.layout import KvLayout
from worker_svc.kv.pools import KvPools
from worker_svc.model.linear import Linear
from worker_svc.ops import quant_fp8

QUANTISED = Numerics(activations="fp8", kv="fp8_e4m3", indexer="fp4")


def test_row_sizes_are_those_of_the_formats():
    flash = preset("flash")
    sizes = {}
    for kv, indexer in (("fp32", "none"), ("bf16", "fp8"), ("fp8_e4m3", "fp4")):
        layout = KvLayout(config=flash, numerics=Numerics(kv=kv, indexer=indexer))
        sizes[kv] = (layout.kv_format().bytes_per_row, layout.index_format().bytes_per_row)
    # 448 E4M3 + 7 scales + 64 BF16; 64 bytes of pairs + 4 scales
    assert sizes == {"fp32": (2048, 512), "bf16": (1024, 129), "fp8_e4m3": (583, 68)}


@pytest.mark.parametrize("numerics", [Numerics(), Numerics(kv="bf16"), QUANTISED], ids=lambda n: n.kv)
def test_sizes_in_bytes_are_what_is_allocated(tiny, numerics):
    layout = KvLayout(config=tiny.checkpoint.config, numerics=numerics)
    slots, pages, tails = 3, 5, 2
    pools = KvPools(layout, slots=slots, pages=pages, tails=tails)
    held = pools.streams.nbytes
    for layer in pools.layers:
        for store in (layer.window, layer.tail_window, *layer.page_stores()):
            held += sum(plane.nbytes for plane in store.planes)
        held += sum(plane.nbytes for plane in (layer.states, layer.carries) if plane is not None)
    planned = slots * layout.bytes_per_slot + pages * layout.bytes_per_page + tails * layout.bytes_per_tail
    assert held == planned


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_row_reads_back_as_it_was_rounded_and_rounding_again_changes_nothing(dtype):
    store = RowStore(fp8_kv_rows(448, 64, dtype), 10)
    rows = (
        torch.randn(4, 512, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-6, 1.0, 30.0, 1e4])[:, None]
    )
    index = torch.tensor([7, 0, 3, 9])
    store.write(index, rows)
    rounded = store.round(rows)
    assert torch.equal(store.read(index), rounded)
    assert torch.equal(store.round(rounded), rounded)
    assert torch.equal(rounded[:, 448:], rows[:, 448:].bfloat16().float())
    assert not torch.equal(rounded[:, :448], rows[:, :448].bfloat16().float())


def test_only_inputs_of_quantised_weights_are_rounded():
    x, weight = torch.randn(5, 256), torch.randn(30, 256)
    rounded = quant_fp8.fake_quant(x, 128)
    quantised = Linear([weight], fp8_input=True, deterministic=True)
    plain = Linear([weight], fp8_input=False, deterministic=True)
    assert torch.equal(quantised(x), plain(rounded))
    assert not torch.equal(quantised(x), plain(x))


def test_the_right_inputs_are_rounded(tiny, monkeypatch):
    """Per layer: attention input, wq_b, wo_b, then experts. Not wo_a, router, compressors, index weights, head."""
    rounded = []

    def record(x):
        rounded.append((x.shape[0], x.shape[-1]))
        return x

    monkeypatch.setattr("worker_svc.model.linear.round_fp8", record)
    monkeypatch.setattr("worker_svc.model.moe.round_fp8", record)
    rig = Rig(tiny.checkpoint, numerics=Numerics(activations="fp8"))
    rig.feed(tiny.sequences[0], 0, 0, 1, [0])
    c = tiny.checkpoint.config
    attention = [(1, c.hidden_size), (1, c.q_lora_rank), (1, c.o_groups * c.o_lora_rank)]
    experts = [(1, c.hidden_size), (c.num_experts_per_tok + 1, c.moe_intermediate_size)]
    assert rounded == (attention + experts) * c.num_hidden_layers


@pytest.mark.parametrize(
    "numerics",
    [
        Numerics(kv="bf16"),
        Numerics(kv="fp8_e4m3"),
        Numerics(kv="fp8_e5m2", indexer="fp8"),
        Numerics(indexer="fp4"),
        Numerics(activations="fp8"),
        QUANTISED,
    ],
    ids=lambda n: n.describe().replace(" ", "_"),
)
def test_every_choice_rounds_something_and_stays_repeatable(tiny, numerics):
    """Chunked and mixed runs of quantised numerics have the bits of a whole prefill: rounding hides no state."""
    rig = Rig(tiny.checkpoint, numerics=numerics, deterministic=True)
    rig.forget()
    (whole,) = prefill(rig, tiny.sequences)
    assert float((whole.logits - tiny.logits[0]).abs().max()) > 1e-3
    assert bool(torch.isfinite(whole.logits).all())
    rig.forget()
    for piece in random_chunks(60, 1)(rig, tiny.sequences):
        assert torch.equal(piece.logits, whole.logits[piece.first : piece.first + len(piece.logits)])


def test_tails_keep_quantised_rows(tiny):
    rig = Rig(tiny.checkpoint, numerics=QUANTISED, deterministic=True)
    rig.forget()
    (whole,) = prefill(rig, tiny.sequences)
    ids = tiny.sequences[0]
    rig.forget()
    rig.feed(ids, 0, 0, 280, [0, 1], saves=((256, 0),))
    rig.forget(pages=False)
    rig.pools.load_tail(1, 256, 0)
    assert torch.equal(rig.feed(ids, 1, 256, 300, [0, 2]), whole.logits[256:])


def test_the_default_model_keeps_its_text_quantised():
    """It was trained with this rounding: cross-entropy moves by hundredths of a nat at most."""
    sample = json.loads((NANO.parent.parent.parent / "tests" / "data" / "nano_sample.json").read_text())
    ids = torch.tensor(sample["text"][:400])
    checkpoint = load_checkpoint(NANO)
    losses = []
    for numerics in (Numerics(), QUANTISED):
        (piece,) = prefill(Rig(checkpoint, numerics=numerics), [ids])
        losses.append(float(torch.nn.functional.cross_entropy(piece.logits[:-1], ids[1:])))
    assert losses[0] != losses[1]
    assert abs(losses[0] - losses[1]) < 0.03


def test_the_layout_id_tells_formats_apart(tiny):
    config = tiny.checkpoint.config
    ids = {
        KvLayout(config=config, numerics=numerics).layout_id
        for numerics in (Numerics(), Numerics(kv="bf16"), QUANTISED, Numerics(kv="fp8_e4m3", indexer="fp8"))
    }
    assert len(ids) == 4
    assert KvLayout(config=config, numerics=Numerics(activations="fp8")).layout_id not in ids, "other values"
    assert KvLayout(config=config, numerics=Numerics(), max_verify=2).layout_id in ids, "rings are private"


@pytest.mark.parametrize("indexer, share", [("fp8", 0.85), ("fp4", 0.75)])
def test_a_rounded_indexer_mostly_picks_the_same_entries(tiny, indexer, share, monkeypatch):
    """Rounding moves a pick here and there; the Hadamard transform on one side only would move nearly all."""
    import worker_svc.model.indexer as module

    def close() -> float:
        (piece,) = prefill(Rig(tiny.checkpoint, numerics=Numerics(indexer=indexer)), tiny.sequences)
        difference = (piece.logits - tiny.logits[0]).abs().amax(1)
        return float((difference[60:] < 0.3).float().mean())  # from there on more entries are visible than picked

    assert close() > share
    transform = module.hadamard
    monkeypatch.setattr(module, "hadamard", lambda x: x if x.dim() == 2 else transform(x))
    assert close() < 0.4
