"""The small per-row operations: norm, rotation, window compression, and products of fixed size."""

import pytest
import torch

from worker_svc.ops.compress_kv import compress_kv
from worker_svc.ops.matmul import DETERMINISTIC_ROWS, matmul, rows_agree
from worker_svc.ops.rms_norm import inverse_rms, rms_norm
from worker_svc.ops.rope import rotate_


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_norm_keeps_its_eps_inside_the_root():
    x, weight = _random(3, 8) * 1e-3, _random(8, seed=1)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm(x, None, 1e-6), expected)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected * weight)
    torch.testing.assert_close(inverse_rms(x, 1e-6) * x, expected)
    assert float(rms_norm(torch.zeros(1, 8), weight, 1e-6).abs().max()) == 0.0


def test_rotation_turns_adjacent_pairs_of_the_last_dims_and_back():
    x = _random(2, 3, 10)
    angle = torch.tensor([[0.3, 1.2], [0.6, 2.4]])
    turns = torch.polar(torch.ones(2, 2), angle).unsqueeze(1)
    got = rotate_(x.clone(), turns)
    assert torch.equal(got[..., :6], x[..., :6])
    a, b = x[1, 2, 6], x[1, 2, 7]
    assert got[1, 2, 6] == pytest.approx(float(a * angle[1, 0].cos() - b * angle[1, 0].sin()), abs=1e-6)
    assert got[1, 2, 7] == pytest.approx(float(a * angle[1, 0].sin() + b * angle[1, 0].cos()), abs=1e-6)
    back = rotate_(got, turns.conj().resolve_conj())
    torch.testing.assert_close(back, x, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
def test_each_channel_weighs_the_slots_by_itself(deterministic):
    values, scores = _random(4, 8, 6), _random(4, 8, 6, seed=1) * 3
    scores[0, :4] = -torch.inf
    expected = (scores.double().softmax(1) * values.double()).sum(1).float()
    torch.testing.assert_close(compress_kv(values, scores, deterministic=deterministic), expected)


def test_a_window_has_the_same_bits_in_any_company():
    values, scores = _random(9, 128, 64), _random(9, 128, 64, seed=1)
    whole = compress_kv(values, scores, deterministic=True)
    assert torch.equal(compress_kv(values[4:5], scores[4:5], deterministic=True), whole[4:5])


@pytest.mark.parametrize("rows", [1, DETERMINISTIC_ROWS - 1, DETERMINISTIC_ROWS, 3 * DETERMINISTIC_ROWS + 1])
def test_fixed_rows_compute_the_product(rows):
    x, weight_t = _random(rows, 40), _random(40, 24, seed=1)
    got = matmul(x, weight_t, deterministic=True)
    assert got.shape == (rows, 24)
    torch.testing.assert_close(got, x @ weight_t)


def test_equal_rows_of_a_fixed_product_have_equal_bits(monkeypatch):
    assert rows_agree(_random(300, 70))
    monkeypatch.setattr("worker_svc.ops.matmul.ref.fixed_rows", lambda x, w: (x @ w) + torch.arange(8.0).unsqueeze(1))
    assert not rows_agree(_random(300, 70))
