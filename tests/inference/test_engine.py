"""What travels to an engine and back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headwater.engine import Sampling, SequenceRequest, TokenEvent


@pytest.mark.parametrize(
    "value",
    [
        SequenceRequest("a", [1, 2], 3),
        SequenceRequest(
            "a", [], 0, Sampling(0.5, 3, 0.9, 0.1, 1.2, 1.0, -1.0, {5: -3.5}, -9, 4, 2), frozenset([7]), True
        ),
        TokenEvent("a", 0, 7),
        TokenEvent("a", 5, 7, -0.5, ((7, -0.5), (8, -2.0)), "stop"),
        TokenEvent("a", 5, None, finish="error", error="RuntimeError: on purpose"),
    ],
)
def test_it_travels_unchanged(value: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 100.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {3: 101.0}),
        ("logprobs", 21),
        ("typical_p", 0.5),
    ],
)
def test_what_is_out_of_range_or_unknown_is_refused(field: str, value: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.msgpack.decode(msgspec.msgpack.encode({field: value}), type=Sampling)


def test_an_event_is_small() -> None:
    assert len(msgspec.msgpack.encode(TokenEvent("0123456789", 100, 5000))) <= 22
