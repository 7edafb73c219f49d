"""Sampling: each filter against transformers' own, and draws that depend on nothing but the seed."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headwater.engine import Sampling
from headwater.lm import sampling as module
from headwater.lm.sampling import Allowed, Biases, Choice, Sampler, choose, filtered, penalised

pytestmark = pytest.mark.heavy
CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**31)
VOCABS = st.sampled_from([1, 2, 5, 50, 3000])


def logits_of(rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def sampler(sampling: Sampling, prompt: Sequence[int] = (0,), vocab_size: int = 50) -> Sampler:
    return Sampler(sampling, prompt, vocab_size, CPU)


def only(logits: Any, sampling: Sampling) -> Choice:
    rows = torch.as_tensor(logits, dtype=torch.float32)[None]
    return choose(rows, [sampler(sampling, vocab_size=rows.shape[1])])[0]


class TestFiltersKeepWhatTransformersKeeps:
    @example(seed=0, vocab_size=50, temperature=0.5, top_k=0, top_p=1 - 2**-53, min_p=0)  # rows sum to above 1
    @given(
        seed=SEEDS,
        vocab_size=VOCABS,
        temperature=st.floats(0.1, 3),
        top_k=st.integers(0, 60),
        top_p=st.floats(0.01, 1),
        min_p=st.floats(0, 1),
    )
    def test_in_any_combination(
        self, seed: int, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> None:
        warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if top_k:
            warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            warpers.append(TopPLogitsWarper(top_p))
        if min_p:
            warpers.append(MinPLogitsWarper(min_p))
        logits = logits_of(1, vocab_size, seed)
        expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits.clone()).softmax(-1)
        one = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        got = filtered(logits.clone(), [one])
        # What lies within rounding of a threshold may fall on either side of it: one token, or many so improbable that
        # a sum near 1 is the same without them.
        differing = (got > 0) != (expected > 0)
        assert int(differing.sum()) <= 1 or float(expected[differing].sum()) < 1e-12
        if not differing.any():
            torch.testing.assert_close(got / got.sum(), expected, atol=1e-5, rtol=1e-4)

    @given(seed=SEEDS, data=st.data())
    def test_each_row_by_its_own(self, seed: int, data: st.DataObject) -> None:
        one = st.builds(
            Sampling,
            temperature=st.floats(0.1, 3),
            top_k=st.integers(0, 60),
            top_p=st.floats(0, 1),
            min_p=st.floats(0, 1),
        )
        samplings = data.draw(st.lists(one, min_size=1, max_size=6))
        logits = logits_of(len(samplings), 50, seed)
        together = filtered(logits.clone(), samplings)
        for row, each in enumerate(samplings):
            torch.testing.assert_close(together[row : row + 1], filtered(logits[row : row + 1].clone(), [each]))

    @given(seed=SEEDS, top_p=st.floats(0, 1))
    def test_top_p_also_where_it_needs_more_tokens_than_it_tries_first(self, seed: int, top_p: float) -> None:
        logits = logits_of(2, 3000, seed, scale=0.01)
        samplings = [Sampling(top_p=top_p), Sampling(top_p=0.1)]
        tried = filtered(logits.clone(), samplings)
        before, module.NUCLEUS_TRIED = module.NUCLEUS_TRIED, 3000  # type: ignore[misc]
        try:
            torch.testing.assert_close(tried, filtered(logits.clone(), samplings))
        finally:
            module.NUCLEUS_TRIED = before  # type: ignore[misc]

    def test_and_all_of_several_equals(self) -> None:
        equal = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
        for one in Sampling(top_k=2), Sampling(top_p=0.6):
            assert (filtered(equal.clone(), [one]) > 0).tolist() == [[True, True, True, True, False]]

    @pytest.mark.parametrize(
        "one", [Sampling(top_k=1), Sampling(top_p=0.0), Sampling(min_p=1.0), Sampling(temperature=1e-40)]
    )
    def test_and_at_least_the_best(self, one: Sampling) -> None:
        assert filtered(torch.tensor([[1.0, 3.0, 2.0]]), [one]).tolist()[0][1] > 0
        assert {only([1.0, 3.0, 2.0], one).token for _ in range(20)} == {1}


class TestPenalties:
    @given(seed=SEEDS, penalty=st.floats(0.1, 5), ids=st.lists(st.integers(0, 49), min_size=1), split=st.integers(0, 9))
    def test_of_repetition_is_that_of_transformers(self, seed: int, penalty: float, ids: list[int], split: int) -> None:
        logits = logits_of(1, 50, seed)
        one = sampler(Sampling(repetition_penalty=penalty), ids[: split + 1])
        for token in ids[split + 1 :]:
            one.note(token)
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits.clone())
        torch.testing.assert_close(penalised(logits.clone(), [one]), expected)

    @given(seed=SEEDS, frequency=st.floats(-2, 2), presence=st.floats(-2, 2), answer=st.lists(st.integers(0, 49)))
    def test_of_presence_and_frequency_are_openais(
        self, seed: int, frequency: float, presence: float, answer: list[int]
    ) -> None:
        logits = logits_of(1, 50, seed)
        one = sampler(Sampling(frequency_penalty=frequency, presence_penalty=presence), range(50))
        for token in answer:
            one.note(token)
        got = penalised(logits.clone(), [one])[0]
        for token in range(50):
            count = answer.count(token)
            expected = float(logits[0, token]) - count * frequency - (count > 0) * presence
            assert float(got[token]) == pytest.approx(expected, abs=1e-3)

    def test_come_after_the_bias(self) -> None:
        one = sampler(Sampling(logit_bias={1: -5.0}, repetition_penalty=2.0), [1], 3)
        assert penalised(torch.tensor([[1.0, 3.0, 2.0]]), [one]).tolist() == [[1.0, -4.0, 2.0]]

    def test_count_the_tokens_that_were_chosen(self) -> None:
        one = sampler(Sampling(temperature=0, presence_penalty=2.0), vocab_size=3)
        logits = torch.tensor([[0.0, 1.5, 1.0]])
        assert [choose(logits, [one])[0].token for _ in range(4)] == [1, 2, 0, 1]


class TestGreedy:
    def test_takes_the_first_of_the_best(self) -> None:
        assert only([0.0, 2.0, 2.0], Sampling(temperature=0)).token == 1

    def test_heeds_the_bias(self) -> None:
        assert only([0.0, 2.0, 1.0], Sampling(temperature=0, logit_bias={1: -100.0})).token == 2


class TestMinTokens:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_hold_back_what_would_end_the_answer(self, temperature: float) -> None:
        sampling = Sampling(temperature=temperature, min_tokens=2, seed=1)
        one = Sampler(sampling, [0], 3, CPU, frozenset([1, 99]))
        rows = torch.tensor([[0.0, 60.0, 1.0]])
        assert [choose(rows, [one])[0].token == 1 for _ in range(4)] == [False, False, True, True]
        assert one.is_plain == (temperature == 0)

    def test_let_it_end_where_nothing_else_is_left(self) -> None:
        one = Sampler(Sampling(temperature=0, min_tokens=1), [0], 2, CPU, frozenset([0, 1]))
        assert choose(torch.tensor([[0.0, 1.0]]), [one])[0].is_valid


class TestADraw:
    @given(
        seed=st.integers(-(2**63), 2**63 - 1),
        others=st.lists(
            st.builds(Sampling, temperature=st.sampled_from([0.0, 0.5, 1.0]), top_k=st.integers(0, 9)), max_size=7
        ),
        place=st.integers(0, 7),
    )
    def test_depends_on_no_neighbour(self, seed: int, others: list[Sampling], place: int) -> None:
        mine = Sampling(seed=seed, top_p=0.9, frequency_penalty=0.5)
        place = min(place, len(others))
        alone, among = sampler(mine), sampler(mine)
        neighbours = [sampler(one) for one in others]
        for step in range(6):
            logits = logits_of(len(others) + 1, 50, step)
            logits[place] = logits_of(1, 50, 100 + step)[0]
            together = choose(logits, [*neighbours[:place], among, *neighbours[place:]])
            assert together[place] == choose(logits[place : place + 1], [alone])[0]

    def test_follows_the_distribution(self) -> None:
        one = sampler(Sampling(seed=0), vocab_size=4)
        shares = torch.tensor([[0.1, 0.0, 0.6, 0.3]])
        counts = torch.zeros(4)
        for _ in range(4000):
            counts[choose(shares.log(), [one])[0].token] += 1
        # Five standard deviations of the count's share at most.
        torch.testing.assert_close(counts / 4000, shares[0], atol=5 * math.sqrt(0.25 / 4000), rtol=0)
        assert counts[1] == 0

    @pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
    def test_at_either_end_finds_a_token_that_has_a_probability(
        self, draw: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Sampler, "draw", lambda self: draw)
        logits = torch.full((7,), -math.inf)
        logits[[2, 4]] = 1.0
        assert only(logits, Sampling()).token == (2 if draw == 0 else 4)

    def test_moves_only_at_a_boundary_when_logits_are_rounded_otherwise(self) -> None:
        # Two tokens as probable as each other: in an order by probability their intervals would change places.
        exact, rounded = [1.0, 1.0, 0.5], [1.0, 1.0 + 1e-6, 0.5]
        for seed in range(200):
            assert only(exact, Sampling(seed=seed)).token == only(rounded, Sampling(seed=seed)).token


class TestLogprobs:
    def test_are_of_the_distribution_before_anything_is_done_to_it(self) -> None:
        logits = [1.0, 3.0, 2.0]
        choice = only(logits, Sampling(temperature=0, logit_bias={1: -50.0}, logprobs=2))
        expected = torch.tensor(logits).log_softmax(-1).tolist()
        assert choice.token == 2
        assert choice.logprob == pytest.approx(expected[2])
        assert [token for token, _ in choice.top] == [1, 2]
        assert [logprob for _, logprob in choice.top] == pytest.approx(expected[1:])

    def test_are_as_many_as_asked_for(self) -> None:
        samplers = [sampler(Sampling(temperature=0, logprobs=count), vocab_size=5) for count in (None, 0, 1, 20)]
        choices = choose(logits_of(4, 5, 0), samplers)
        assert [len(choice.top) for choice in choices] == [0, 0, 1, 5]
        assert [choice.logprob is None for choice in choices] == [True, False, False, False]


class TestLogitsThatAreNoNumbers:
    @pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize(
        "one", [Sampling(temperature=0), Sampling(seed=1), Sampling(top_p=0.5, min_p=0.1, logprobs=3)]
    )
    def test_are_said_to_be_invalid_and_leave_the_neighbours_alone(self, wrong: float, one: Sampling) -> None:
        logits = logits_of(3, 50, 1)
        logits[1] = wrong
        choices = choose(logits, [sampler(one) for _ in range(3)])
        assert [choice.is_valid for choice in choices] == [True, False, True]


EXTREMES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 5e-324, 1e-300, 2.0),
    "top_k": (0, 1, 2**31 - 1),
    "top_p": (0.0, 1e-9, 1.0),
    "min_p": (0.0, 1e-300, 1.0),
    "repetition_penalty": (0.01, 1.0, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 0.0, 2.0),
    "logit_bias": ({}, {0: 100.0}, {0: -100.0}, dict.fromkeys(range(50), -100.0), dict.fromkeys(range(50), 100.0)),
}


@given(
    fields=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in EXTREMES.items()}),
    scale=st.sampled_from([0.0, 1e-30, 3.0, 1e4]),
    seed=SEEDS,
)
def test_whatever_may_be_asked_for_finite_logits_give_a_token(fields: dict[str, Any], scale: float, seed: int) -> None:
    sampling = msgspec.convert({**fields, "seed": seed}, Sampling)
    one = sampler(sampling, [0, 1, 2])
    for step in range(5):
        (choice,) = choose(logits_of(1, 50, seed + step, scale), [one])
        assert choice.is_valid
        assert 0 <= choice.token < 50


@given(
    seed=SEEDS,
    temperature=st.sampled_from([0, 0.5, 2]),
    top_k=st.integers(0, 60),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.sampled_from([1, 1.5]),
    frequency_penalty=st.sampled_from([0, 2]),
)
def test_forbidden_tokens_are_never_chosen_and_change_no_other_row(seed: int, **options: Any) -> None:
    logits = logits_of(4, 50, seed)
    allowed = torch.rand(2, 50, generator=torch.Generator().manual_seed(seed)) < 0.1
    allowed[:, seed % 50] = True
    sampling = Sampling(**options, seed=seed, logprobs=2, logit_bias={7: 100})
    free = choose(logits.clone(), [sampler(sampling) for _ in range(4)])
    held = choose(logits.clone(), [sampler(sampling) for _ in range(4)], Allowed([0, 2], allowed))
    assert (held[1], held[3]) == (free[1], free[3])
    for place, row in enumerate((0, 2)):
        assert held[row].is_valid
        assert allowed[place, held[row].token]
        assert held[row].top == free[row].top


def test_sequences_that_share_a_bias_share_its_tensors() -> None:
    bias, biases = {1: -100.0, 2: 3.5}, Biases()
    samplers = [Sampler(Sampling(logit_bias=bias, seed=n), [0], 3, CPU, biases=biases) for n in range(3)]
    assert len({id(one.bias) for one in samplers}) == 1
    assert samplers[0].bias is not None
    assert (samplers[0].bias.ids.tolist(), samplers[0].bias.values.tolist()) == ([1, 2], [-100.0, 3.5])
    other = Sampler(Sampling(logit_bias={1: 1.0}), [0], 3, CPU, biases=biases)
    assert other.bias is not samplers[0].bias
    tensors = weakref.ref(samplers[0].bias)
    del samplers
    assert tensors() is None
