"""The loader accounts for every tensor, names what is wrong, and dequantises exactly."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import meshkit
from worker_svc.checkpoint import names
from worker_svc.checkpoint.census import PUBLISHED, census, preset
from worker_svc.checkpoint.errors import FileFormatError, TensorError, UnsupportedModelError
from worker_svc.checkpoint.generate import generate_checkpoint, main
from worker_svc.checkpoint.loader import Fp4Weight, Fp8Weight, load_checkpoint

from .conftest import Header, micro_config

NANO = Path(meshkit.__file__).parent / "models" / "v4-nano"


@pytest.mark.parametrize("name", PUBLISHED)
def test_census_equals_the_published_totals(name):
    found = census(preset(name))
    assert (found.num_tensors, found.num_bytes) == PUBLISHED[name]


def test_flash_census_by_dtype():
    expected = {"BF16": 433, "F32": 417, "F8_E4M3": 375, "F8_E8M0": 34_167, "I64": 3, "I8": 33_792}
    assert census(preset("flash")).by_dtype == expected


def test_default_model_loads_and_dequantises():
    checkpoint = load_checkpoint(NANO)
    assert checkpoint.expert_format == "fp4" and checkpoint.config.num_hidden_layers == 5
    assert len(list(checkpoint)) == len({*checkpoint})
    assert checkpoint.float32("embed").dtype == torch.float32
    assert checkpoint.dense("layers.0.ffn.gate.tid2eid").dtype == torch.int64
    stacked = checkpoint.experts(2, "w1")
    assert isinstance(stacked, Fp4Weight) and stacked.shape == (16, 128, 256)
    assert torch.equal(stacked.dequantise()[7], checkpoint.float32("layers.2.ffn.experts.7.w1"))
    assert checkpoint.experts(5, "w2").shape == (16, 256, 128), "layers count on through the MTP block"


def test_fp8_and_fp4_values_match_a_scalar_reading():
    """Decode single elements by hand from the file's bytes."""
    checkpoint = load_checkpoint(NANO)
    raw = Header(NANO / "model.safetensors")

    def byte(name, row, column):
        entry = raw.content[name]
        return raw.data[entry["data_offsets"][0] + row * entry["shape"][1] + column]

    def e4m3(code):
        sign, power, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
        return sign * (mantissa * 2.0**-9 if power == 0 else (1 + mantissa / 8) * 2.0 ** (power - 7))

    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    rng = np.random.default_rng(0)
    fp8, fp4 = checkpoint.float32("layers.1.attn.wq_b"), checkpoint.float32("layers.1.ffn.experts.5.w2")
    for _ in range(200):
        i, j = int(rng.integers(2048)), int(rng.integers(128))
        scale = 2.0 ** (byte("layers.1.attn.wq_b.scale", i // 128, j // 128) - 127)
        assert float(fp8[i, j]) == e4m3(byte("layers.1.attn.wq_b.weight", i, j)) * scale
        i, j = int(rng.integers(256)), int(rng.integers(128))
        nibble = byte("layers.1.ffn.experts.5.w2.weight", i, j // 2) >> 4 * (j % 2) & 15
        scale = 2.0 ** (byte("layers.1.ffn.experts.5.w2.scale", i, j // 32) - 127)
        assert float(fp4[i, j]) == (-1) ** (nibble >> 3) * magnitudes[nibble & 7] * scale


def test_shards_hold_the_same_weights(whole, tmp_path):
    sharded = generate_checkpoint(micro_config(), tmp_path, 0, content="lively", shard_bytes=200_000)
    assert len(list(sharded.glob("*.safetensors"))) > 3
    one, many = load_checkpoint(whole), load_checkpoint(sharded)
    assert set(one) == set(many)
    for name in one:
        if not name.endswith("tid2eid"):
            assert torch.equal(one.float32(name), many.float32(name)), name


def test_generation_is_seeded_and_independent_of_the_cut(whole, tmp_path):
    again = generate_checkpoint(micro_config(), tmp_path / "again", 0, content="lively")
    assert (again / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    other = load_checkpoint(generate_checkpoint(micro_config(), tmp_path / "other", 1, content="lively"))
    cut = load_checkpoint(generate_checkpoint(micro_config(), tmp_path / "cut", 0, content="lively", layers=2))
    one = load_checkpoint(whole)
    assert torch.equal(cut.float32("layers.1.attn.wq_a"), one.float32("layers.1.attn.wq_a"))
    assert not torch.equal(other.float32("layers.1.attn.wq_a"), one.float32("layers.1.attn.wq_a"))


def test_fp8_experts_are_probed_not_trusted(tmp_path):
    config = micro_config()
    assert config.expert_dtype == "fp4"
    folder = generate_checkpoint(config, tmp_path, 0, content="lively", expert_format="fp8")
    checkpoint = load_checkpoint(folder)
    assert checkpoint.expert_format == "fp8"
    stacked = checkpoint.experts(1, "w3")
    assert isinstance(stacked, Fp8Weight) and stacked.shape == (8, 64, 128)
    assert torch.equal(stacked.dequantise()[2], checkpoint.float32("layers.1.ffn.experts.2.w3"))


def test_flat_content_has_the_stated_statistics(tmp_path):
    checkpoint = load_checkpoint(generate_checkpoint(micro_config(), tmp_path, 0))
    assert checkpoint.dense("layers.0.attn_norm").float().unique().tolist() == [1.0]
    assert not checkpoint.dense("layers.2.attn.attn_sink").any()
    assert not checkpoint.dense("mtp.0.ffn.gate.bias").any()
    assert abs(float(checkpoint.dense("embed").float().std()) - 1) < 0.05
    assert abs(float(checkpoint.dense("head").float().std()) - 0.0156) < 1e-3
    assert abs(float(checkpoint.dense("layers.0.hc_attn_fn").std()) - 0.01) < 1e-3
    fp8, fp4 = checkpoint["layers.1.attn.wq_b"], checkpoint["layers.1.ffn.experts.0.w1"]
    assert fp8.scale.unique().tolist() == [121]
    assert abs(float(fp8.data.float().std()) - 1) < 0.05
    assert fp4.scale.unique().tolist() == [118, 119, 120, 121]
    assert len(fp4.packed.unique()) == 256
    table = checkpoint.dense("layers.1.ffn.gate.tid2eid")
    assert all(len(set(row)) == len(row) for row in table.tolist())


class TestEveryTensorIsAccountedFor:
    def problems(self, folder):
        with pytest.raises(TensorError) as caught:
            load_checkpoint(folder)
        return str(caught.value)

    def test_missing(self, header):
        header.drop("layers.2.attn.indexer.weights_proj.weight")
        header.write()
        assert "layers.2.attn.indexer.weights_proj.weight: missing (BF16 [32, 128])" in self.problems(
            header.path.parent
        )

    def test_unexpected(self, header):
        header.add("layers.0.attn.indexer.extra", "F32", [1], b"\0" * 4)
        header.write()
        assert "layers.0.attn.indexer.extra: unexpected" in self.problems(header.path.parent)

    def test_wrong_shape(self, header):
        header.content["layers.0.attn.wq_a.weight"]["shape"].reverse()
        header.content["norm.weight"]["shape"] = [1, 128]
        header.write()
        assert "norm.weight: shape [1, 128], expected [128]" in self.problems(header.path.parent)

    def test_wrong_dtype(self, header):
        header.content["norm.weight"]["dtype"] = "F16"
        header.write()
        assert "norm.weight: dtype F16, expected BF16" in self.problems(header.path.parent)

    def test_scale_stored_as_plain_bytes(self, header):
        header.content["layers.0.attn.wq_a.scale"]["dtype"] = "U8"
        header.write()
        assert "layers.0.attn.wq_a.scale: dtype U8, expected F8_E8M0" in self.problems(header.path.parent)

    def test_ten_are_shown_and_the_rest_counted(self, header):
        for name in list(header.content)[:13]:
            header.drop(name)
        header.write()
        text = self.problems(header.path.parent)
        assert text.count("missing") == 10 and "13 tensors do not match" in text and "and 3 more" in text

    @pytest.mark.parametrize(
        ("name", "value", "says"),
        [
            ("layers.1.ffn.experts.3.w2.scale", b"\xff", "layers.1.ffn.experts.3.w2.scale: holds NaN (byte 255)"),
            ("mtp.0.e_proj.scale", b"\xff", "mtp.0.e_proj.scale: holds NaN"),
            ("layers.0.attn.wkv.weight", b"\x7f", "layers.0.attn.wkv.weight: holds NaN"),
            ("layers.0.attn.wkv.weight", b"\xff", "layers.0.attn.wkv.weight: holds NaN"),
            ("embed.weight", b"\xc0\x7f", "embed.weight: holds NaN"),
            ("embed.weight", b"\x81\xff", "embed.weight: holds NaN"),
            ("layers.0.attn.attn_sink", b"\x00\x00\xc0\xff", "layers.0.attn.attn_sink: holds NaN"),
            ("layers.0.ffn.gate.tid2eid", b"\x08", "layers.0.ffn.gate.tid2eid: holds expert ids 0..8"),
        ],
    )
    def test_impossible_values(self, header, name, value, says):
        header.poke(name, 0, value)
        header.write()
        assert says in self.problems(header.path.parent)

    def test_a_nan_is_found_wherever_it_is(self, header):
        begin, end = header.content["head.weight"]["data_offsets"]
        header.poke("head.weight", end - begin - 2, b"\xc0\x7f")
        header.write()
        assert "head.weight: holds NaN" in self.problems(header.path.parent)

    def test_an_infinite_sink_is_no_nan(self, header):
        header.poke("layers.0.attn.attn_sink", 0, b"\x00\x00\x80\xff")
        header.write()
        assert load_checkpoint(header.path.parent).dense("layers.0.attn.attn_sink")[0] == -torch.inf

    def test_copies_of_embedding_and_head_under_mtp_are_dropped(self, header):
        header.add("mtp.0.emb.tok_emb.weight", "BF16", [2], b"\0" * 4)
        header.add("mtp.0.head.weight", "BF16", [2], b"\0" * 4)
        header.write()
        assert "mtp.0.head" not in load_checkpoint(header.path.parent)

    def test_drafters_and_relatives_are_recognised_by_their_tensors(self, header):
        header.add("mtp.0.main_proj.weight", "BF16", [2], b"\0" * 4)
        header.write()
        with pytest.raises(UnsupportedModelError, match="DSpark"):
            load_checkpoint(header.path.parent)

    def test_truncated_shard_is_named(self, tmp_path):
        folder = generate_checkpoint(micro_config(), tmp_path, 0, shard_bytes=200_000)
        shard = sorted(folder.glob("*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-1000])
        with pytest.raises(FileFormatError, match=rf"{shard.name}: .* of .* kB \(interrupted download\?\)"):
            load_checkpoint(folder)


def test_progress_ends_at_the_total(whole):
    seen = []
    load_checkpoint(whole, progress=lambda done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(done) and seen[-1][0] == seen[-1][1] == census(micro_config()).num_bytes


def test_command_line_writes_a_checkpoint(tmp_path, capsys):
    assert main(["--config", "tiny", "--layers", "1", "--out", str(tmp_path / "out"), "--seed", "3"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    assert load_checkpoint(tmp_path / "out").config.num_hidden_layers == 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["compress_ratios"] == [0, 0]
    assert main(["--config", "tiny", "--layers", "99", "--out", str(tmp_path / "no")]) == 6
    assert "choose 1..7" in capsys.readouterr().err


def test_names_are_unique_and_complete():
    specs = list(names.tensors(micro_config(), "fp4"))
    assert len({spec.name for spec in specs}) == len(specs)
    assert any(spec.name == names.expert_probe(micro_config()) for spec in specs)
