"""The trainer's model is the serving model; rounding is the codecs'; a whole run leaves everything behind."""

import json
from dataclasses import replace

import pytest
import torch

from tools.nano.batch import Batch, empty_rows, place
from tools.nano.document import TokenizedDocument
from tools.nano.model import Attention, NanoModel, Switches
from tools.nano.rounding import fp4_weight, fp8_weight, round_input
from tools.nano.schedule import SCHEDULES
from tools.nano.train import Options, Trainer
from tools.nano.weights_io import export, load_shards, merge, model_of
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.kv.layout import KvLayout
from worker_svc.kv.pools import KvPools
from worker_svc.model.step import ForwardInputs, Row
from worker_svc.model.weights import ModelBuilder
from worker_svc.ops import quant_fp4, quant_fp8

ON, OFF = torch.tensor(True), torch.tensor(False)


def document(length: int, vocab: int, seed: int) -> TokenizedDocument:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (length,), generator=draw).int().numpy()
    return TokenizedDocument("x", ids, ids * 0.0 + 1.0, [(length - 5, length)])


def serving_logits(folder, ids):
    checkpoint = load_checkpoint(folder)
    layout = KvLayout(config=checkpoint.config, numerics=Numerics(), max_verify=1)
    pools = KvPools(layout, slots=1, pages=2, tails=0)
    model = ModelBuilder(checkpoint, layout, max_context=512, deterministic=False).transformer(pools)
    row = Row(slot=0, start=0, length=len(ids), pages=[0, 1], num_samples=len(ids))
    with torch.inference_mode():
        return model.forward(ForwardInputs(ids, (row,)))


def test_packed_rows_give_the_serving_models_logits(small, exact, tmp_path):
    """Two documents in one row, neither aware of the other; the weights are those that the file can hold."""
    torch.manual_seed(0)
    model = NanoModel(small, 512)
    folder = export(small, model.state_dict(), tmp_path)
    checkpoint = load_checkpoint(folder)
    with torch.no_grad():
        for name, value in model.named_parameters():
            own = name.replace("hc_attn.", "hc_attn_").replace("hc_ffn.", "hc_ffn_").replace("hc_head.", "hc_head_")
            if ".ffn.experts." in name:
                layer = 3 if name.startswith("mtp") else int(name.split(".")[1])
                value.copy_(checkpoint.experts(layer, name[-2:]).dequantise())
            else:
                value.copy_(checkpoint.float32(own))
    model.eval()
    rows, parts = empty_rows(1, 512), [document(150, small.vocab_size, 1), document(240, small.vocab_size, 2)]
    place(rows, 0, 0, 0, parts[0])
    place(rows, 0, 2, 1, parts[1])
    with torch.no_grad():
        logits, _ = model.logits(Batch.of(rows, torch.device("cpu")), Switches(OFF, OFF))
    for part, begin in zip(parts, (0, 256)):
        wanted = serving_logits(folder, torch.from_numpy(part.ids).long())
        torch.testing.assert_close(logits[0, begin : begin + len(part.ids)], wanted, atol=2e-4, rtol=1e-4)


def test_rounding_is_the_codecs_and_its_gradient_is_one():
    weight = torch.randn(128, 256, requires_grad=True)
    rounded = fp8_weight(weight, ON)
    assert torch.equal(rounded, quant_fp8.dequantise_weight(*quant_fp8.quantise_weight(weight.detach())))
    assert torch.equal(fp4_weight(weight, ON), quant_fp4.dequantise(*quant_fp4.quantise(weight.detach())))
    assert torch.equal(round_input(weight, OFF), weight)
    rounded.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_every_parameter_learns(small, exact):
    torch.manual_seed(0)
    model = NanoModel(small, 512)
    rows = empty_rows(1, 512)
    place(rows, 0, 0, 0, document(400, small.vocab_size, 1))
    rows.source[0, 394:399] = 20
    model.losses(Batch.of(rows, torch.device("cpu")), Switches(ON, OFF)).total(0.1).backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []


def test_a_short_window_and_hidden_entries_cut_what_a_query_sees(small, exact):
    attention = Attention(small, 4)
    starts = torch.tensor([[True, False]])
    short = attention._window_seen(starts, torch.tensor([[True, True]]), 256)
    whole = attention._window_seen(starts, torch.tensor([[False, False]]), 256)
    assert short[0, 200].sum() == 20
    assert whole[0, 200].sum() == 128


def test_the_schedule_climbs_stays_and_falls():
    schedule = SCHEDULES["whole"]
    assert schedule.rate(0.1, 0) < schedule.rate(0.1, 1000) == schedule.peak
    assert schedule.rate(1.0, 1000) == pytest.approx(schedule.peak * schedule.final)
    assert schedule.guidance(0.9) < schedule.guidance(0.1)


def test_a_run_leaves_log_twin_weights_and_export(small, exact, folder, tmp_path):
    options = Options(
        text=None,
        tokenizer=folder,
        out=tmp_path,
        resume=None,
        renew_c4=False,
        schedule="whole",
        device="cpu",
        train_secs=0.5,
        twin_secs=0.1,
        length=256,
        rows=1,
        processes=1,
        seed=0,
        exam_each=0,
        exam_every=100,
        log_every=1,
        compiled=False,
    )
    Trainer(options, small).run()
    events = [json.loads(line)["event"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert events[-1] == "done"
    assert {"twin", "step", "final_rounded"} <= set(events)
    state = load_shards(tmp_path / "weights")
    assert model_of(replace(small), state, 256).embed.shape == (small.vocab_size, small.hidden_size)
    assert merge(tmp_path / "export", tmp_path / "merged") == (tmp_path / "merged" / "model.safetensors").stat().st_size
