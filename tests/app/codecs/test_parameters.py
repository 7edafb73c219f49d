"""Parameters of requests."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.errors import DeclarationError
from headwater.model import Model, Parameter, Scalar, State, Tensor
from headwater.signature import Signature
from headwater_server.codecs.parameters import RequestParameters
from headwater_server.errors import BadRequest


class Tuned(Model):
    """Takes a number."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)
    parameters = (Parameter("rate", "float", 1.0, minimum=0, maximum=2), Parameter("kind", "str", "a", choices=["a"]))

    def __call__(self, *, x: Any, parameters: Any) -> Any:
        """Not called."""


def refused(name: str, value: object) -> str:
    parameters = RequestParameters(Signature.of(Tuned(), name="m", max_batch_size=1), binary=False)
    with pytest.raises(BadRequest) as caught:
        parameters.take({name: value}, parameters.request(None))
    return caught.value.message


CASES: list[tuple[str, object, str]] = [
    ("rate", "x", "parameters.rate: expected float, got 'x'"),
    ("rate", -1, "parameters.rate: expected at least 0, got -1"),
    ("rate", 3, "parameters.rate: expected at most 2, got 3"),
    ("rate", True, "parameters.rate: expected float, got true"),
    ("kind", "b, got c", "parameters.kind: expected one of 'a', got 'b, got c'"),
]


@pytest.mark.parametrize(("name", "value", "message"), CASES)
def test_a_value_that_does_not_fit_is_told_as_json(name: str, value: object, message: str) -> None:
    assert refused(name, value) == message


@pytest.mark.parametrize(("name", "value", "message"), CASES)
def test_the_declarations_own_words_do_not_matter(
    name: str, value: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Parameter.check

    def reworded(self: Parameter, value: object) -> Scalar:
        try:
            return check(self, value)
        except DeclarationError as error:
            raise DeclarationError("reworded, got something", expected=error.expected) from None

    monkeypatch.setattr(Parameter, "check", reworded)
    assert refused(name, value) == message


class Remembers(Model):
    """Keeps a state."""

    inputs = Tuned.inputs
    outputs = Tuned.outputs
    state = (State("h", "FP32", [1]),)

    def __call__(self, *, x: Any, h: Any) -> Any:
        """Not called."""


def sequence_parameters() -> RequestParameters:
    return RequestParameters(Signature.of(Remembers(), name="m", max_batch_size=1), binary=False)


@pytest.mark.parametrize("id", [1, 2**64 - 1, "a", "x" * 128])
def test_a_request_of_a_sequence(id: int | str) -> None:
    parameters = sequence_parameters()
    request = parameters.request(None)
    parameters.take({"sequence_id": id, "sequence_start": True}, request)
    assert (request.sequence_id, request.starts_sequence, request.ends_sequence) == (id, True, False)
    parameters.take({"sequence_end": True}, request)
    assert request.ends_sequence


@pytest.mark.parametrize("value", [0, -1, 2**64, 1.5, True, None, "", "x" * 129, [1]])
def test_an_id_of_a_sequence_that_is_none(value: object) -> None:
    parameters = sequence_parameters()
    with pytest.raises(
        BadRequest, match=r"parameters\.sequence_id: expected an integer from 1 on, or a text of 1 to 128"
    ):
        parameters.take({"sequence_id": value}, parameters.request(None))


def test_sequences_need_states() -> None:
    assert "parameters.sequence_id: not supported by this server" in refused("sequence_id", 1)
