"""Messages to an engine: what sequences share travels once, and is one object again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.engine import Grammar, Sampling
from headwater.wire.lm import Open, Post, Submit, decode_message, encode, most_bytes

BIAS = {token: -100.0 + token % 200 for token in range(99_000)}
TOKENS = st.lists(st.integers(0, 2**20), max_size=3)
VALUES = st.tuples(
    TOKENS,
    TOKENS.map(frozenset),
    st.dictionaries(st.integers(0, 2**20), st.floats(-100, 100), max_size=3),
    st.none() | st.builds(Grammar, st.just("regex"), st.text(max_size=5), st.just("structured_outputs.regex")),
)


def submit(number: int, values: Any, seed: int | None = None) -> Submit:
    prompt, stop_ids, bias, grammar = values
    sampling = Sampling(logit_bias=bias, seed=seed)
    return Submit(number, "r", prompt, 5, sampling, stop_ids, grammar=grammar)


@given(st.lists(VALUES, min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 9)))
def test_a_post_is_the_same_afterwards(values: list[Any], places: list[int], cancels: list[int]) -> None:
    post = Post("c", [submit(n, values[place % len(values)], n) for n, place in enumerate(places)], cancels)
    assert decode_message(encode(post)) == post
    assert decode_message(encode(Open("c"))) == Open("c")


def test_answers_with_a_large_bias_take_one_of_it() -> None:
    values = list(range(1000)), frozenset(range(500)), BIAS, Grammar("regex", "a" * 60_000, "structured_outputs.regex")
    one = encode(Post("c", [submit(0, values, 0)]))
    many = encode(Post("c", [submit(n, values, n) for n in range(256)]))
    assert len(many) < len(one) + 256 * 64
    assert len(one) < sum(map(most_bytes, submit(0, values).shared)) + 64
    message = decode_message(many)
    assert isinstance(message, Post)
    for part in zip(*(one.shared for one in message.submits), strict=True):
        assert len({id(value) for value in part}) == 1


def test_a_place_that_is_not_there_is_refused() -> None:
    raw: Any = msgspec.msgpack.decode(encode(Post("c", [submit(0, ([1], frozenset(), {}, None))])))
    for table in range(4, 8):
        wrong = [*raw]
        wrong[table] = []
        with pytest.raises(msgspec.ValidationError, match="expected the place of a value"):
            decode_message(msgspec.msgpack.encode(wrong))
