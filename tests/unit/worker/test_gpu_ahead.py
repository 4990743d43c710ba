"""What a GPU worker compiles before it is ready: which sizes are tried, and that the warm-up's steps are real ones."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from worker_svc.gpu import ahead
from worker_svc.ops import registry


def test_products_are_tried_wherever_a_tile_of_64_rows_could_change():
    rows = ahead.product_rows(8256)
    assert rows[:4] == [16, 32, 64, 128] and rows[-1] == 8256
    for tokens in (1, 17, 40, 65, 700, 8191):
        tried = next(size for size in rows if size >= tokens)
        assert -(-tried // 64) == -(-tokens // 64)


def test_experts_are_tried_at_every_small_size_and_at_every_bucket():
    tokens = ahead.expert_tokens(8256, [1, 48, 200])
    assert set(range(1, 65)) <= set(tokens) and 200 in tokens and tokens[-1] == 8256
    assert all(b - a <= max(8, a / 16) for a, b in pairwise(tokens))


def test_a_process_that_fails_is_counted_not_fatal(monkeypatch, caplog):
    monkeypatch.setattr(ahead, "_in_process", lambda part: part[0][1] == 256)
    with caplog.at_level("INFO"):
        ahead.compile_products([(0, 128, 256), (8, 256, 512)], [16, 64, 1024])
    assert "products compiled by 4 processes" in caplog.text and "2 of them failed" in caplog.text


def test_dense_products_are_tried_once_per_shape_at_the_rows_that_meet_them(monkeypatch):
    def block(states):
        weight = None if states is None else torch.empty(states, 8)
        return SimpleNamespace(ffn=SimpleNamespace(gate=torch.empty(4, 8)), attn=SimpleNamespace(states=weight))

    weights = SimpleNamespace(head=torch.empty(50, 8), blocks=[block(None), block(6), block(6), block(7)])
    found = ahead.dense_weights(weights, most=900, sampled=64)
    assert [(len(weight), most) for weight, most in found] == [(50, 64), (4, 900), (6, 900), (7, 900)]
    met = []
    monkeypatch.setattr(ahead, "bf16_gemm", lambda x, weight: met.append(len(x)))
    ahead.run_dense(weights.head, [16, 64, 32])
    assert met == [64, 32, 16]


@pytest.mark.parametrize(("pinned", "rows"), [("deep_gemm", [16, 64, 128, 192]), ("", [16, 64])])
def test_dense_products_compile_for_the_rows_that_the_library_gets(monkeypatch, pinned, rows):
    monkeypatch.setattr(registry, "backend", lambda op: "deep_gemm" if op == "bf16_gemm" else "torch")
    monkeypatch.setattr(registry, "pinned", lambda op: pinned)
    monkeypatch.setattr(ahead, "product_rows", lambda most: [size for size in (16, 64, 128, 192) if size <= most])
    met = []
    monkeypatch.setattr(ahead, "run_dense", lambda weight, sizes: met.append(sizes))
    experts = SimpleNamespace(prepare=lambda sizes, k: 0)
    block = SimpleNamespace(
        ffn=SimpleNamespace(gate=torch.empty(4, 8), experts=experts), attn=SimpleNamespace(states=torch.empty(4, 8))
    )
    weights = SimpleNamespace(head=torch.empty(4, 8), blocks=[block])
    monkeypatch.setattr(ahead, "product_shapes", lambda weights: [])
    model = SimpleNamespace(weights=weights, config=SimpleNamespace(num_experts_per_tok=2))
    executor = SimpleNamespace(model=model, pools=SimpleNamespace(slots=192), buckets=[1])
    ahead.compile_ahead(executor, 0, covered=True)
    assert met == [rows] and rows[-1] == (192 if pinned else 64)
