"""Edits of logits on the device against the host's sampler, on tensors of the CPU: the same ids left, step by step."""

import numpy as np
import pytest
import torch

from meshkit.types import NO_LOGPROBS, SamplingParams
from worker_svc.core.work import RowWork, SlotInit
from worker_svc.gpu.logits import LogitEdits
from worker_svc.ops.slot_step import Field
from worker_svc.sampling import RowSampling, RowState, SamplerState, VocabRules, sample

V, SLOTS = 50, 3
RULES = VocabRules(vocab_size=V, eos_ids=(1,))
CASES = {
    "allowed": {"allowed_ids": (4, 7, 30)},
    "bad words": {"bad_words": ((8,), (9, 10), (3, 4, 5), (4, 5))},
    "given": {"given_ids": (5, 6, 1, 30), "min_tokens": 6, "allowed_ids": (2, 3)},
    "all at once": {
        "allowed_ids": tuple(range(1, 30)),
        "bad_words": ((12,), (13, 14)),
        "given_ids": (13,),
        "presence_penalty": 1.0,
        "bias": ((14, 9.0), (12, 9.0)),
        "min_tokens": 3,
    },
}


def fields(slot, emitted):
    table = torch.zeros(max(Field) + 1, SLOTS, dtype=torch.int32)
    table[Field.EMITTED, slot] = emitted
    return table


@pytest.mark.parametrize("resumed", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_greedy_draws_equal_the_hosts(name, resumed):
    params = SamplingParams(temperature=0.0, max_tokens=40, **CASES[name])
    host = SamplerState(RowSampling(params=params, seed=0, choice=0, rules=RULES))
    edits = LogitEdits(RULES, torch.device("cpu"))
    row, drawn = RowWork(slot=1, pages=[1]), []
    for step in range(24):
        if step in (0, resumed):
            emitted = tuple(drawn) if params.reads_output else ()
            edits.init(SlotInit(slot=1, params=params, seed=0, choice=0, n_emitted=step, emitted=emitted))
        values = torch.randn(1, V, generator=torch.Generator().manual_seed(step // 3)) * 3
        (expected,) = sample(values, [RowState(state=host, position=step)])
        if edits.wanted([row]):
            edits.apply([row], values, fields(1, step))
        token = int(values[0].argmax())
        assert token == expected.token, (step, drawn)
        assert np.isfinite(float(values[0, token]))
        edits.accept([row], torch.tensor([token], dtype=torch.int32))
        host.accept([token])
        drawn.append(token)


def test_values_of_further_ids_come_home_behind_the_alternatives():
    edits = LogitEdits(RULES, torch.device("cpu"))
    for slot, more in ((0, ()), (2, (9, 0))):
        params = SamplingParams(top_logprobs=1 if more else NO_LOGPROBS, logprob_ids=more)
        edits.init(SlotInit(slot=slot, params=params, seed=0, choice=0, n_emitted=0))
    rows = [RowWork(slot=0, pages=[1]), RowWork(slot=2, pages=[2])]
    values = torch.randn(2, V, generator=torch.Generator().manual_seed(1))
    home = edits.logprobs(rows, values).home(torch.tensor([3, 4], dtype=torch.int32))
    assert home.of_row(0) == ()
    (entry,) = home.of_row(1)
    expected = values[1].log_softmax(0)
    assert entry.ids == (4, int(expected.argmax()), 9, 0)
    assert np.allclose(entry.values, expected[list(entry.ids)].numpy(), atol=1e-6)
