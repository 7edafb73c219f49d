"""Who may start: first come, first served, within the budget."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.engine import (
    SAMPLING_FIELDS,
    EngineFull,
    EngineLimits,
    RequestRejected,
    RequestTooLong,
    Sampling,
    SequenceRequest,
)
from headwater.lm.admission import Admission

LIMITS = EngineLimits(max_sequences=4, max_waiting=3, context_length=100, cache_tokens=200, vocab_size=10)


def request(id: str, tokens: int) -> SequenceRequest:
    return SequenceRequest(id, [0], tokens - 1)


@given(st.lists(st.one_of(st.integers(1, 110), st.none()), max_size=40), st.randoms(use_true_random=False))
def test_places_are_given_in_order_of_arrival_and_within_the_budget(
    actions: list[int | None], rng: random.Random
) -> None:
    admission = Admission(LIMITS)
    accepted: list[str] = []
    taken: list[str] = []
    present: list[str] = []
    for number, tokens in enumerate(actions):
        if tokens is None:
            if present:
                id = present.pop(rng.randrange(len(present)))
                if id not in taken:
                    accepted.remove(id)
                assert admission.release(id)
        else:
            try:
                admission.submit(request(str(number), tokens))
            except RequestTooLong:
                assert tokens > LIMITS.context_length
            except EngineFull:
                assert admission.waiting == LIMITS.max_waiting
            else:
                accepted.append(str(number))
                present.append(str(number))
        while rng.random() < 0.7 and (one := admission.take()) is not None:
            taken.append(one.id)
        assert taken == accepted[: len(taken)]
        assert admission.active <= LIMITS.max_sequences
        assert admission.waiting <= LIMITS.max_waiting
        assert admission.cache_used <= LIMITS.cache_tokens
        assert admission.active + admission.waiting == len(present)
    for id in present:
        assert admission.release(id)
    assert (admission.active, admission.waiting, admission.cache_used) == (0, 0, 0)
    assert admission.take() is None


def test_what_is_reserved_is_a_rectangle() -> None:
    admission = Admission(LIMITS)
    admission.submit(request("short", 20))
    assert admission.cache_used == 20
    admission.submit(request("long", 90))
    assert admission.cache_used == 180
    admission.submit(request("next", 10))
    assert (admission.active, admission.waiting) == (2, 1)
    admission.release("long")
    assert (admission.active, admission.waiting, admission.cache_used) == (2, 0, 40)


def test_one_that_does_not_fit_holds_back_those_behind_it() -> None:
    admission = Admission(LIMITS)
    for number in range(3):
        admission.submit(request(str(number), 60))
    admission.submit(request("long", 100))
    admission.submit(request("short", 1))
    assert (admission.active, admission.waiting) == (3, 2)
    admission.release("0")
    assert (admission.active, admission.waiting) == (2, 2)
    admission.release("1")
    assert (admission.active, admission.waiting) == (2, 1)


def test_a_place_that_is_free_is_no_wait() -> None:
    admission = Admission(msgspec.structs.replace(LIMITS, max_waiting=0))
    for number in range(4):
        admission.submit(request(str(number), 10))
    with pytest.raises(EngineFull):
        admission.submit(request("4", 10))


def test_a_field_that_the_engine_does_not_support_is_refused_if_it_is_set() -> None:
    admission = Admission(msgspec.structs.replace(LIMITS, sampling=SAMPLING_FIELDS - {"min_p"}))
    admission.submit(SequenceRequest("a", [0], 5, Sampling(top_p=0.5)))
    with pytest.raises(RequestRejected, match="min_p: this engine does not support it"):
        admission.submit(SequenceRequest("b", [0], 5, Sampling(min_p=0.5)))
