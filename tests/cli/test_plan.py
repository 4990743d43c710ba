"""`v4mesh plan` and the memory arithmetic: Flash's known sizes, the worker's own formulas, refusals."""

import json
from pathlib import Path

import pytest

from meshkit.cli.main import main
from meshkit.exit_codes import Exit
from meshkit.memory_plan import GPUS, Shape, page_bytes, plan, slot_bytes, tail_bytes, weight_lines
from meshkit.models import DEFAULT_MODEL
from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.quant_choice import choose_numerics
from worker_svc.gpu.layout import GpuSizes
from worker_svc.kv.layout import KvLayout

FLASH = Shape(
    hidden_size=4096,
    num_hidden_layers=43,
    vocab_size=129280,
    num_attention_heads=64,
    head_dim=512,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
    compress_ratios=(0, 0, *(4, 128) * 20, 4, 0),
    index_n_heads=64,
    index_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    num_hash_layers=3,
    hc_mult=4,
    max_position_embeddings=1 << 20,
)


def test_flash_has_its_published_weight():
    lines = {line.name: line.bytes for line in weight_lines(FLASH)}
    assert lines["experts"] == 43 * 256 * (12_582_912 + 786_432)
    published = 159_609_485_896  # of the files, with the draft layer: one of 44, and no embedding of its own
    assert sum(lines.values()) == pytest.approx(published * 43 / 44, rel=0.02)


@pytest.mark.parametrize("kv", ["fp8_e4m3", "bf16"])
def test_pool_sizes_are_the_workers(kv):
    config = V4Config.load(DEFAULT_MODEL)
    shape = Shape.of(json.loads((DEFAULT_MODEL / "config.json").read_text()))
    numerics = choose_numerics("fp4", quantization="fp4", kv_cache_dtype=kv, indexer_dtype="fp8")
    sizes = GpuSizes(KvLayout(config=config, numerics=numerics, max_verify=1))
    assert page_bytes(shape, kv) == sizes.bytes_per_page
    assert slot_bytes(shape, kv) == sizes.bytes_per_slot
    assert tail_bytes(shape, kv) == sizes.bytes_per_tail


def test_flash_needs_two_cards_and_then_has_room():
    one = plan(FLASH, GPUS["H200"], slots=64, step_tokens=8192)
    two = plan(FLASH, GPUS["H200"], slots=64, step_tokens=8192, gpus=2)
    assert not one.fits and two.fits
    assert two.tokens > 5_000_000
    assert two.used + two.pages * two.page_bytes <= two.usable < two.used + (two.pages + 1) * two.page_bytes


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--gpu", "H200"]) == 0
    out = capsys.readouterr().out
    assert "experts" in out and "150.75 GB (H200)" in out
    assert main(["plan", "--gpu", "H200", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exit"] == 0 and report["pages"] > 1000
    assert report["tokens"] == report["pages"] * 256


def _flash_folder(tmp_path: Path) -> Path:
    config = {name: getattr(FLASH, name) for name in Shape.__slots__} | {"model_type": "deepseek_v4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_what_does_not_fit_is_refused_with_the_arithmetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = str(_flash_folder(tmp_path))
    assert main(["plan", folder, "--gpu", "H200"]) == Exit.MEMORY
    out, err = capsys.readouterr()
    assert "147.1" in out
    assert "does not fit on 1 x H200" in err and "--gpus 2 or more" in err
    assert main(["plan", folder, "--gpu", "H200", "--layers", "8"]) == 0
    assert main(["plan", folder, "--gpu", "H200", "--layers", "8", "--pages", "100000000"]) == Exit.MEMORY


def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--gpu", "H2000"]) == Exit.USAGE
    assert "H200" in capsys.readouterr().err
    folder = _flash_folder(tmp_path)
    broken = json.loads((folder / "config.json").read_text()) | {"o_groups": "eight"}
    (folder / "config.json").write_text(json.dumps(broken))
    assert main(["plan", str(folder)]) == Exit.MODEL
    assert "o_groups" in capsys.readouterr().err
