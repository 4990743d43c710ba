"""Bookkeeping of the GPU benchmarks that needs no GPU: which choices differed, and whose a launch is."""

import torch

from benchmarks._gpu_choices import Choices
from benchmarks._gpu_profile import attention_kernels


def test_experts_differ_by_token_whatever_their_order_and_the_widest_margin_is_kept():
    choices = Choices()
    choices.experts[0] = torch.tensor([[1, 2], [3, 4], [5, 6]])
    choices.margins[0] = torch.tensor([0.5, 0.25, 0.125])
    choices.saw_experts(0, torch.tensor([[2, 1], [3, 7], [5, 9], [0, 0]], dtype=torch.int32))  # the last is padding
    assert choices.summary() == {"experts_differing": 2 / 3, "widest_margin": 0.25, "entries_differing": 0.0}


def test_entries_differ_by_what_the_gpu_left_out_and_counts_outlive_a_forward():
    choices, other = Choices(), Choices()
    other.entries[2] = [[0, 1, 2], [4]]
    choices.take(other)
    choices.saw_entries(2, [{0, 1, 9}, {4}])
    choices.forget()
    assert choices.entries == {} and choices.summary()["entries_differing"] == 1 / 4


def test_attention_launches_are_those_between_two_norms_without_the_mixers():
    layer = ["collapse_norm", "gemm", "scores", "attend", "mix_few", "collapse_norm", "router", "experts", "mix_few"]
    other = ["collapse_norm", "gemm", "attend", "mixing_weights", "mix_many", "collapse_norm", "experts", "mix_many"]
    first = ["collapse_norm", "once", *layer[1:]]
    names = ["_begin_step", *first, *other, *layer, "collapse_norm", "head"]
    assert attention_kernels(names, (4, 128, 4)) == {4: 3, 128: 2}
