"""The sampler: known answers of the generator, brute-force truncation, distributions, batch independence."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.types import SamplingParams
from worker_svc.sampling import RowSampling, RowState, SamplerState, VocabRules, kept_ids, sample
from worker_svc.sampling.philox import GUMBEL_SPREAD, gumbel, philox4x32, random_words

V = 50
RULES = VocabRules(vocab_size=V, eos_ids=(1,))


def row(position=0, *, seed=7, choice=0, rules=RULES, prompt=(), emitted=(), mask=None, ahead=(), **params):
    sampling = RowSampling(params=SamplingParams(**params), seed=seed, choice=choice, rules=rules)
    state = SamplerState(sampling, prompt=prompt, emitted=emitted)
    return RowState(state=state, position=position, mask=mask, ahead=ahead)


def logits(seed=0, n=1, vocab=V, scale=2.0):
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def one(values, state):
    return sample(values, [state])[0]


def bits(*ids):
    mask = np.zeros(-(-V // 32), dtype=np.uint32)
    for i in ids:
        mask[i // 32] |= np.uint32(1 << i % 32)
    return mask.view(np.int32)


class TestPhilox:
    @pytest.mark.parametrize(
        ("counter", "key", "expected"),
        [
            ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
            ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
            (
                (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
                (0xA4093822, 0x299F31D0),
                (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
            ),
        ],
    )
    def test_published_known_answers(self, counter, key, expected):
        words = philox4x32(np.array([counter, counter], dtype=np.uint32).T.copy(), key)
        assert words.T.tolist() == [list(expected)] * 2

    def test_every_part_of_the_name_matters(self):
        blocks = np.arange(8, dtype=np.uint32)
        names = [(s, c, p) for s in (0, 1, 1 << 32, (1 << 64) - 1) for c in (0, 1) for p in (0, 1, 1 << 20)]
        drawn = {random_words(blocks, seed=s, choice=c, position=p).tobytes() for s, c, p in names}
        assert len(drawn) == len(names)

    def test_noise_of_a_few_tokens_equals_noise_of_all(self):
        whole = gumbel(np.arange(1003), 1003, seed=3, choice=1, position=9)
        for ids in ([0], [5, 6, 1002], list(range(0, 1003, 7)), list(range(0, 1003, 2))):
            some = gumbel(np.array(ids), 1003, seed=3, choice=1, position=9)
            assert np.array_equal(some, whole[ids])

    def test_noise_is_standard_gumbel(self):
        noise = np.concatenate([gumbel(np.arange(4000), 4000, seed=1, choice=0, position=p) for p in range(25)])
        assert abs(noise.mean() - 0.5772) < 4 * 1.2825 / math.sqrt(noise.size)
        assert abs(noise.std() - math.pi / math.sqrt(6)) < 0.02
        expected = np.exp(-np.exp(-np.array([-1.0, 0.0, 1.0, 3.0])))
        assert np.abs((noise[:, None] < [-1, 0, 1, 3]).mean(0) - expected).max() < 0.006

    def test_noise_range_is_what_pruning_assumes(self):
        ends = -np.log(-np.log((np.array([0.0, 2.0**32 - 1]) + 0.5) * 2.0**-32))
        assert ends[1] - ends[0] < GUMBEL_SPREAD - 0.01 and np.isfinite(ends).all()


class TestGreedy:
    def test_takes_the_highest_and_the_lowest_id_of_a_tie(self):
        values = torch.zeros(1, V)
        values[0, [9, 20, 33]] = 4.0
        assert one(values, row(temperature=0.0)).token == 9

    def test_seed_and_position_do_not_matter(self):
        values = logits()
        tokens = {one(values, row(p, seed=s, temperature=0.0)).token for p in range(3) for s in range(3)}
        assert tokens == {int(values.argmax())}

    def test_logits_are_left_unchanged(self):
        values = logits()
        before = values.clone()
        one(values, row(temperature=0.0, presence_penalty=1.0, bias=((3, 5.0),), emitted=(4, 4)))
        assert torch.equal(values, before)


def brute_force_kept(scaled, top_k, top_p, min_p):
    """The definition, one token at a time."""
    order = sorted((i for i, v in enumerate(scaled) if v > -math.inf), key=lambda i: (-scaled[i], i))
    if top_k > 0:
        order = order[:top_k]
    top = float(scaled[order[0]])
    weights = [math.exp(float(scaled[i]) - top) for i in order]
    if top_p < 1:
        total, mass, kept = math.fsum(weights), 0.0, []
        for i, weight in zip(order, weights, strict=True):
            kept.append(i)
            mass += weight
            if mass >= top_p * total:
                break
        order = kept
    if min_p > 0:
        order = [i for i in order if math.exp(float(scaled[i]) - top) >= min_p]
    return sorted(order)


class TestTruncation:
    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(
        values=st.lists(st.integers(-40, 40), min_size=1, max_size=60),  # coarse: many ties
        top_k=st.integers(0, 70),
        top_p=st.sampled_from([0.01, 0.3, 0.5001, 0.9, 0.99, 1.0]),
        min_p=st.sampled_from([0.0, 0.01, 0.2001, 1.0]),
    )
    def test_equals_the_definition(self, values, top_k, top_p, min_p):
        scaled = np.array(values, dtype=np.float32) / 8
        assert kept_ids(scaled, top_k, top_p, min_p).tolist() == brute_force_kept(scaled, top_k, top_p, min_p)

    @pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
    def test_large_vocabularies_take_the_short_way_to_the_same_answer(self, spread):
        scaled = np.random.default_rng(0).standard_normal(6000).astype(np.float32) * np.float32(spread)
        for top_p in (0.2, 0.6, 0.95):
            assert kept_ids(scaled, 0, top_p, 0.0).tolist() == brute_force_kept(scaled, 0, top_p, 0.0)

    def test_masked_tokens_are_never_kept(self):
        scaled = np.full(20, -np.inf, dtype=np.float32)
        scaled[[3, 7]] = 1.0
        assert kept_ids(scaled, 10, 0.99, 0.01).tolist() == [3, 7]

    def test_min_p_one_and_top_k_one_leave_the_best(self):
        values = logits(3)
        for params in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
            assert one(values, row(temperature=1.5, **params)).token == int(values.argmax())


def draw_many(values, count, **params):
    """Tokens at `count` output positions of one choice."""
    state = row(**params).state
    return [one(values, RowState(state=state, position=p)).token for p in range(count)]


class TestDistribution:
    @pytest.mark.parametrize(
        "params", [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.3, "top_k": 8, "top_p": 0.9}]
    )
    def test_frequencies_follow_the_softmax(self, params):
        values = logits(5, vocab=16, scale=1.2)
        rules = VocabRules(vocab_size=16, eos_ids=(1,))
        scaled = values[0].numpy() / np.float32(params["temperature"])
        ids = kept_ids(scaled, params.get("top_k", 0), params.get("top_p", 1.0), 0.0)
        weights = np.exp(scaled[ids] - scaled.max())
        expected = weights / weights.sum() * 4000
        tokens = draw_many(values, 4000, rules=rules, **params)
        assert set(tokens) <= set(ids.tolist())
        counts = np.bincount(tokens, minlength=16)[ids]
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        dof = len(ids) - 1
        assert chi2 < dof + 4 * math.sqrt(2 * dof), (chi2, dof)  # about 4 sigma, seed fixed

    def test_positions_seeds_and_choices_are_independent_streams(self):
        values = torch.zeros(1, V)
        streams = [draw_many(values, 60, seed=s, choice=c) for s, c in itertools.product((1, 2), (0, 1))]
        for a, b in itertools.combinations(streams, 2):
            assert sum(x == y for x, y in zip(a, b, strict=True)) < 8  # 60 / 50 expected

    def test_pruning_far_tokens_changes_no_draw(self):
        values = logits(8, scale=12.0)
        noise = np.stack([gumbel(np.arange(V), V, seed=7, choice=0, position=p) for p in range(300)])
        plain = (values.numpy().astype(np.float64) + noise).argmax(1)
        assert draw_many(values, 300, temperature=1.0) == plain.tolist()


class TestRepeatability:
    def test_a_row_does_not_depend_on_its_companions(self):
        values = logits(9, n=6, vocab=4096)
        rules = VocabRules(vocab_size=4096, eos_ids=(1,))
        kinds = [{}, {"top_k": 9}, {"top_p": 0.8}, {"temperature": 0.0}, {"min_p": 0.1}, {"repetition_penalty": 1.2}]
        rows = [row(i, rules=rules, top_logprobs=4, emitted=(i, 9), **kind) for i, kind in enumerate(kinds)]
        together = sample(values, rows)
        for order in ([5, 3, 1, 0, 2, 4], [2], [4, 2]):
            again = sample(values[order], [rows[i] for i in order])
            assert again == [together[i] for i in order]

    def test_a_resumed_state_equals_the_one_that_went_on(self):
        values = logits(10)
        params = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.3, "temperature": 0.9}
        going = row(prompt=(3, 4), **params).state
        emitted = []
        for position in range(40):
            token = one(values, RowState(state=going, position=position)).token
            going.accept([token])
            emitted.append(token)
        resumed = row(prompt=(3, 4), emitted=emitted, **params).state
        for state in (going, resumed):
            state.accept([5])
        assert one(values, RowState(state=going, position=41)) == one(values, RowState(state=resumed, position=41))

    def test_drafts_ahead_count_as_if_they_had_been_accepted(self):
        values = logits(11)
        params = {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.7, "temperature": 0.5}
        verify = row(9, emitted=(2, 3), ahead=(7, 7, 8), **params)
        plain = row(9, emitted=(2, 3, 7, 7, 8), **params)
        assert one(values, verify) == one(values, plain)
        assert one(values, row(9, emitted=(2, 3), **params)) == one(values, RowState(state=verify.state, position=9)), (
            "and leave no trace"
        )


class TestRules:
    def greedy_after(self, values, **params):
        return one(torch.tensor([values]), row(rules=VocabRules(vocab_size=len(values), eos_ids=(0,)), **params)).token

    def test_penalties(self):
        values = [0.0, 5.0, 4.6, 4.0]
        assert self.greedy_after(values, temperature=0.0, emitted=(1,)) == 1
        assert self.greedy_after(values, temperature=0.0, emitted=(1,), presence_penalty=0.5) == 2
        assert self.greedy_after(values, temperature=0.0, emitted=(1, 1), presence_penalty=0.3) == 1
        assert self.greedy_after(values, temperature=0.0, emitted=(1, 1), frequency_penalty=0.3) == 2
        assert self.greedy_after(values, temperature=0.0, emitted=(1,), frequency_penalty=0.3) == 1
        assert self.greedy_after(values, temperature=0.0, emitted=(2,), presence_penalty=-0.5) == 2

    def test_only_the_repetition_penalty_reads_the_prompt(self):
        values = [0.0, 5.0, 4.6]
        assert self.greedy_after(values, temperature=0.0, prompt=(1,), presence_penalty=2.0) == 1
        assert self.greedy_after(values, temperature=0.0, prompt=(1,), repetition_penalty=1.2) == 2
        assert self.greedy_after([-4.0, -1.0, -1.1], temperature=0.0, prompt=(1,), repetition_penalty=1.2) == 2

    def test_bias(self):
        assert self.greedy_after([0.0, 1.0, 2.0], temperature=0.0, bias=((1, 1.5),)) == 1
        assert self.greedy_after([0.0, 1.0, 2.0], temperature=0.0, bias=((2, -100.0), (1, -100.0))) == 0

    def test_min_tokens_masks_eos_and_stop_ids(self):
        values = torch.zeros(1, V)
        values[0, 1], values[0, 8], values[0, 30] = 9.0, 8.0, 7.0
        params = {"temperature": 0.0, "min_tokens": 3, "stop_ids": (8,)}
        assert [one(values, row(p, **params)).token for p in range(5)] == [30, 30, 30, 1, 1]

    def test_masked_ids_are_never_drawn(self):
        rules = VocabRules(vocab_size=V, eos_ids=(1,), masked_ids=(4, 49))
        values = torch.zeros(1, V)
        values[0, 4] = 50.0
        assert one(values, row(rules=rules, temperature=0.0)).token == 0
        tokens = draw_many(values, 400, rules=rules)
        assert not {4, 49} & set(tokens) and len(set(tokens)) == V - 2

    def test_grammar_mask_is_obeyed_by_every_mode(self):
        values, mask = logits(12), bits(0, 31, 32, 49)
        for params in ({"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"bias": ((5, 100.0),)}):
            tokens = {one(values, row(p, mask=mask, **params)).token for p in range(40)}
            assert tokens <= {0, 31, 32, 49}, params

    def test_a_finished_grammar_ends_before_min_tokens(self):
        assert one(logits(), row(0, mask=bits(1), min_tokens=5)).token == 1
        assert one(logits(), row(0, mask=bits(1, 40), min_tokens=5)).token == 40


class TestFaults:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_logits_that_are_no_numbers_end_the_row(self, bad):
        values = logits()
        values[0, 17] = bad
        for params in ({"temperature": 0.0}, {}, {"top_k": 3}, {"bias": ((2, 1.0),)}, {"mask": bits(1, 2)}):
            result = one(values, row(**params))
            assert (result.token, result.fault) == (-1, "broken_logits")
        assert one(values * 0 - math.inf, row()).fault == "broken_logits"

    def test_a_bias_that_overflows_ends_the_row(self):
        values = logits() * 1e38
        assert one(values, row(bias=tuple((i, 3e38) for i in range(V)))).fault == "broken_logits"

    def test_an_empty_grammar_ends_the_row(self):
        result = one(logits(), row(mask=bits()))
        assert (result.token, result.fault) == (-1, "nothing_allowed")

    def test_one_bad_row_leaves_the_others(self):
        values = logits(n=3)
        values[1] = math.nan
        results = sample(values, [row(temperature=0.0)] * 3)
        assert [r.fault for r in results] == [None, "broken_logits", None]

    def test_wrong_shapes_are_ours(self):
        with pytest.raises(AssertionError):
            sample(logits(n=2), [row()])
        with pytest.raises(AssertionError):
            sample(logits(vocab=V + 1), [row()])
        with pytest.raises(AssertionError):
            sample(logits().double(), [row()])


class TestLogprobs:
    def test_are_the_models_own_and_sorted(self):
        values = logits(13)
        expected = torch.log_softmax(values[0].double(), -1)
        result = one(values, row(temperature=0.3, top_k=2, bias=((5, 9.0),), mask=bits(40), top_logprobs=6))
        assert result.token == 40 == result.logprobs.ids[0] and len(result.logprobs.ids) == 7
        got = dict(zip(result.logprobs.ids, result.logprobs.values, strict=True))
        assert all(abs(value - float(expected[i])) < 1e-6 for i, value in got.items())
        assert list(result.logprobs.ids[1:]) == expected.topk(6).indices.tolist()

    def test_ties_list_the_lower_id_first(self):
        values = torch.zeros(1, V)
        assert one(values, row(temperature=0.0, top_logprobs=4)).logprobs.ids == (0, 0, 1, 2, 3)

    def test_none_unless_asked_and_zero_means_the_token_alone(self):
        assert one(logits(), row()).logprobs is None
        assert len(one(logits(), row(top_logprobs=0)).logprobs.ids) == 1

    def test_temperature_near_zero_is_greedy(self):
        assert one(logits(14), row(temperature=1e-30)).token == int(logits(14).argmax())

    def test_further_ids_follow_the_alternatives(self):
        expected = torch.log_softmax(logits(13)[0].double(), -1)
        entry = one(logits(13), row(temperature=0.0, top_logprobs=1, logprob_ids=(9, 0))).logprobs
        assert entry.ids[2:] == (9, 0) and len(entry.ids) == 4
        assert np.allclose(entry.values[2:], [expected[9], expected[0]], atol=1e-6)
        assert one(logits(13), row(logprob_ids=(9,))).logprobs is None


class TestRefusedIds:
    def test_only_allowed_ids_are_drawn(self):
        params = {"temperature": 1.5, "allowed_ids": (4, 7, 30)}
        drawn = {one(logits(3), row(position, **params)).token for position in range(200)}
        assert drawn == {4, 7, 30}
        assert one(logits(3), row(temperature=0.0, allowed_ids=(4,))).token == 4

    def test_a_bad_word_of_one_token_is_never_drawn(self):
        best = int(logits(5).argmax())
        assert one(logits(5), row(temperature=0.0)).token == best
        assert one(logits(5), row(temperature=0.0, bad_words=((best,),))).token != best

    def test_a_longer_bad_word_is_cut_before_its_last_token(self):
        best = int(logits(5).argmax())
        params = {"temperature": 0.0, "bad_words": ((8, 9, best), (3, best))}
        for emitted, ahead, refused in (
            ((), (), False),
            ((9,), (), False),
            ((8, 9), (), True),
            ((1, 8, 9), (), True),
            ((8, 9, 2), (), False),
            ((7, 3), (), True),
            ((8,), (9,), True),
            ((3,), (4,), False),
        ):
            token = one(logits(5), row(2, emitted=emitted, ahead=ahead, **params)).token
            assert (token != best) is refused, (emitted, ahead)

    def test_what_was_drawn_counts_and_a_resumed_slot_knows_it(self):
        best = int(logits(5).argmax())
        asked = row(temperature=0.0, bad_words=((3, best),))
        assert asked.state.row.params.reads_output
        asked.state.accept([3])
        assert one(logits(5), asked).token != best
        asked.state.accept([4])
        assert one(logits(5), asked).token == best

    def test_nothing_left_is_a_fault(self):
        assert one(logits(), row(allowed_ids=(4,), bad_words=((4,),))).fault == "nothing_allowed"


class TestGivenIds:
    def test_stand_whatever_else_is_asked_and_what_follows_is_drawn(self):
        params = {"temperature": 1.0, "given_ids": (5, 1, 6), "min_tokens": 9, "allowed_ids": (40,), "top_logprobs": 0}
        results = [one(logits(position), row(position, **params)) for position in range(4)]
        assert [result.token for result in results] == [5, 1, 6, 40]
        expected = torch.log_softmax(logits(1)[0].double(), -1)
        assert abs(results[1].logprobs.values[0] - float(expected[1])) < 1e-6

    def test_broken_logits_are_not_hidden(self):
        values = logits()
        values[0, 3] = float("nan")
        assert one(values, row(given_ids=(5,))).fault == "broken_logits"
