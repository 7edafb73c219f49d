"""Declaring models, and what travels of a declaration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headwater import Classification, Embedding, Model, Parameter, Reranking, State, Tensor, Transcription
from headwater.errors import DeclarationError
from headwater.signature import CONTEXT, Signature


class Plain(Model):
    """Does something.

    And more of it.
    """

    inputs = (Tensor("x", "FP32", [-1, 3]), Tensor("mask", "BOOL", [2], optional=True), Tensor("t", "BYTES", [1]))
    outputs = (Tensor("y", "FP32", [4]),)
    parameters = (Parameter("k", "int", 3, minimum=1, maximum=9),)


def signature_of(model: Model) -> Signature:
    return Signature.of(model, name="m", max_batch_size=8)


def changed(**attributes: Any) -> Model:
    model: Model = type("Changed", (Plain,), attributes)()
    return model


def test_a_signature_has_everything_and_survives_the_way_to_the_gateway() -> None:
    signature = signature_of(Plain())
    assert [spec.name for spec in signature.inputs] == ["x", "mask", "t"]
    assert signature.description == "Does something."
    assert msgspec.json.decode(msgspec.json.encode(signature), type=Signature) == signature


def test_an_example_is_made_up_where_none_is_given() -> None:
    assert signature_of(Plain()).example_row() == {"x": [[0.0, 0.0, 0.0]], "t": ["example"]}


def test_a_models_own_example_comes_first() -> None:
    row = signature_of(changed(example={"x": [[1.0, 2.0, 3.0]], "mask": [True, False]})).example_row()
    assert row == {"x": [[1.0, 2.0, 3.0]], "mask": [True, False], "t": ["example"]}


def test_labels_travel_with_their_tensor() -> None:
    model = changed(outputs=(Tensor("y", "FP32", [2, 3], labels=["low", "middle", "high"]), Tensor("z", "FP32", [3])))
    signature = msgspec.json.decode(msgspec.json.encode(signature_of(model)), type=Signature)
    assert [spec.labels for spec in signature.outputs] == [("low", "middle", "high"), ()]


@pytest.mark.parametrize("labels", [["a", "b"], ["a", "b", 3], "abc"])
def test_labels_that_fit_no_tensor_are_refused(labels: Any) -> None:
    with pytest.raises(DeclarationError, match="'y', labels: expected"):
        Tensor("y", "FP32", [3], labels=labels)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "FP32", [1]), "tensor name"),
        (("1x", "FP32", [1]), "tensor name"),
        (("headwater_report", "FP32", [1]), "reserved"),
        (("x", "FLOAT", [1]), "datatype: expected one of BOOL"),
        (("x", "FP32", [0]), "shape: expected positive dimensions"),
        (("x", "FP32", [-2]), "shape: expected positive dimensions"),
        (("x", "FP32", [True]), "shape: expected positive dimensions"),
        (("x", "FP32", []), r"expected one row's shape such as \[1\]"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        Tensor(*arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"default": "a"}, "expected int, got 'a'"),
        ({"default": True}, "expected int, got True"),
        ({"default": 1.0}, r"expected int, got 1\.0"),
        ({"default": 0, "minimum": 1}, "expected at least 1, got 0"),
        ({"default": 5, "maximum": 4}, "expected at most 4, got 5"),
        ({"default": 5, "choices": (1, 2)}, "expected one of 1, 2, got 5"),
        ({"default": 1, "per": "call"}, "expected 'batch' or 'row'"),
        ({"default": 1, "name": "timeout"}, "the protocol already uses this name"),
        ({"default": 1, "type": "number"}, "type: expected one of str"),
    ],
)
def test_a_parameter_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        Parameter(**{"name": "k", "type": "int", **fields})


@pytest.mark.parametrize("value", [float("nan"), 10**400], ids=["nan", "huge"])
def test_a_number_that_is_none_fits_no_bounds(value: Any) -> None:
    with pytest.raises(DeclarationError):
        Parameter("p", "float", 1.0, minimum=0, maximum=2).check(value)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"inputs": ()}, "Changed.inputs: expected at least one Tensor"),
        ({"outputs": ()}, "Changed.outputs: expected at least one Tensor"),
        ({"inputs": "x"}, "Changed.inputs: expected a list of Tensor"),
        ({"inputs": (Tensor("x", "FP32", [1]), Tensor("x", "FP32", [1]))}, "'x' is declared 2 times"),
        ({"inputs": (Tensor("x", "FP32", [1], optional=True),)}, "at least one input that isn't optional"),
        ({"outputs": (Tensor("y", "FP32", [1], optional=True),)}, "'y': an output can't be optional"),
        ({"parameters": (1,)}, "Changed.parameters: expected a list of Parameter"),
        ({"parameters": (Parameter("a", "int", 1),) * 2}, "'a' is declared 2 times"),
        ({"example": {"z": 1}}, "Changed.example, 'z': expected the name of an input"),
        ({"embedding": Embedding("x", "y")}, "embedding, input: expected a BYTES"),
        ({"embedding": Embedding("t", "z")}, "embedding, output: expected an FP32 output"),
        ({"embedding": Embedding("t", "y", tokens="y")}, "embedding, tokens: expected an INT32"),
        (
            {"embedding": Embedding("t", "y", dimensions="k")},
            "embedding, dimensions: expected an int parameter per row",
        ),
        ({"embedding": Embedding("t", "y", prompt="k")}, "embedding, prompt: expected a str parameter per row"),
        ({"reranking": Reranking("t", "x", "y")}, r"reranking, document: expected a BYTES \[1\] input, got 'x'"),
        ({"reranking": Reranking("t", "t", "z")}, r"reranking, score: expected an FP32 \[1\] output, got 'z'"),
        ({"classification": Classification("t", "y")}, "scores: expected an FP32 output of one dimension with labels"),
        (
            {"inputs": (Tensor("requests", "FP32", [1]),), "takes_requests": True},
            "inputs, 'requests': with takes_requests the name is reserved",
        ),
        ({"transcription": Transcription("t", "y")}, r"transcription, text: expected a BYTES \[1\] output, got 'y'"),
        ({"state": "h"}, "Changed.state: expected a list of State, got 'h'"),
        ({"state": (State("h", "FP32", [1]),) * 2}, "Changed.state: 'h' is declared 2 times"),
        (
            {"state": (State("h", "FP32", [1]), State("g", "FP32", [1], output="h"))},
            "Changed.state, outputs: 'h' is declared 2 times",
        ),
        ({"state": (State("t", "FP32", [1]),)}, r"inputs, 't': expected FP32 \[1\] as its state, .* got BYTES \[1\]"),
        ({"state": (State("h", "FP32", [5], output="y"),)}, r"outputs, 'y': expected FP32 \[5\] as its state"),
        ({"state": (State("h", "FP64", [2**23 + 1]),)}, "expected at most 67108864 bytes a row, got 67108872"),
        (
            {"inputs": (Tensor("x", "FP32", [1]),), "state": (State("x", "FP32", [1]),)},
            "at least one input that isn't optional",
        ),
    ],
)
def test_a_model_that_contradicts_itself_is_refused_by_name(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        signature_of(changed(**attributes))


def through(method: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that calls a method with one more argument."""

    @functools.wraps(method)
    def wrapper(self: Model, *args: Any, **kwargs: Any) -> Any:
        return method(self, None, *args, **kwargs)

    return wrapper


TWO_INPUTS: dict[str, Any] = {"inputs": (Tensor("x", "FP32", [1]), Tensor("t", "BYTES", [1])), "parameters": ()}
METHODS: dict[str, dict[str, Any]] = {
    "by name": {"__call__": lambda self, x, t: None},
    "with a default": {"__call__": lambda self, *, t, x, more=1: None},
    "any": {"__call__": lambda self, **inputs: None},
    "static": {"__call__": staticmethod(lambda x, t: None)},
    "wrapped": {"__call__": through(lambda self, first, x, t: None)},
    "with parameters": {"__call__": lambda self, x, t, parameters: None, "parameters": (Parameter("a", "int", 1),)},
    "hooks": {"load": lambda self, where="cpu": None, "unload": lambda self: None},
}


@pytest.mark.parametrize("attributes", METHODS.values(), ids=METHODS)
def test_a_model_whose_methods_take_what_they_are_called_with(attributes: dict[str, Any]) -> None:
    signature_of(changed(**{**TWO_INPUTS, **attributes}))


@pytest.mark.parametrize(
    ("attributes", "expected", "got"),
    [
        ({"__call__": lambda self, x: None}, "__call__: expected the parameters (self, x, t), named", "'t'"),
        ({"__call__": lambda self, x, t, z: None}, "__call__: expected the parameters (self, x, t), named", "'z'"),
        ({"__call__": lambda self, x, t, /: None}, "__call__: expected the parameters (self, x, t), named", "'x'"),
        (
            {"__call__": lambda self, x, t: None, "parameters": (Parameter("a", "int", 1),)},
            "__call__: expected the parameters (self, x, t, parameters), named",
            "'parameters'",
        ),
        ({"load": lambda self: None}, "load: expected the parameters (self, device), got", "too many"),
        ({"unload": lambda self, device: None}, "unload: expected the parameters (self), got", "'device'"),
    ],
)
def test_a_model_with_a_method_that_takes_something_else_is_refused(
    attributes: dict[str, Any], expected: str, got: str
) -> None:
    with pytest.raises(DeclarationError) as raised:
        signature_of(changed(**{**TWO_INPUTS, "__call__": lambda self, x, t: None, **attributes}))
    assert str(raised.value).startswith(f"Changed.{expected}")
    assert got in str(raised.value)


@pytest.mark.parametrize(
    ("datatype", "padding", "words"),
    [
        ("INT8", 128, "padding: expected a number that INT8 has, got 128"),
        ("INT64", 0.5, "padding: expected a number that INT64 has, got 0.5"),
        ("BOOL", 2, "padding: expected a number that BOOL has, got 2"),
        ("BYTES", 1, "padding: expected a number that BYTES has, got 1"),
        ("FP32", "0", "padding: expected a number that FP32 has, got '0'"),
    ],
)
def test_padding_is_a_value_of_the_datatype(datatype: str, padding: Any, words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        Tensor("x", datatype, [-1], ragged=True, padding=padding)


def test_ragged_tensors_vary_in_their_first_dimension_and_only_they_have_padding() -> None:
    for datatype, padding in [("BF16", -1.5), ("FP16", float("nan")), ("UINT8", 255), ("BOOL", 1), ("BYTES", 0)]:
        Tensor("x", datatype, [-1, 3], ragged=True, padding=padding)
    with pytest.raises(DeclarationError, match="expected a shape that begins with -1, got"):
        Tensor("x", "FP32", [1, -1], ragged=True)
    with pytest.raises(DeclarationError, match="padding: expected no padding: the tensor is not ragged, got 1"):
        Tensor("x", "FP32", [-1], padding=1)


def test_a_model_that_takes_requests_declares_it_to_the_gateway_and_is_not_cached() -> None:
    class Told(Plain):
        takes_requests = True

        def __call__(self, requests: Any, **inputs: Any) -> None:
            """Nothing."""

    model = Told()
    model.request_headers = ("x-user",)
    signature = signature_of(model)
    assert signature.takes_requests
    assert not signature.takes_any_parameter
    assert signature.headers == ("x-user",)
    assert CONTEXT not in [parameter.name for parameter in signature.own_parameters]
    with pytest.raises(DeclarationError, match=r"which is told of each request \(`takes_requests`\)"):
        signature.check_cacheable()
    assert not signature_of(Plain()).takes_requests


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h", "BYTES", [1]), "state 'h': expected a datatype of numbers, and fixed dimensions, got BYTES"),
        (("h", "FP32", [-1]), r"state 'h': expected a datatype of numbers, and fixed dimensions, got \[-1\]"),
        (("h", "INT8", [1], 300), "state 'h', initial: expected a number that INT8 has, got 300"),
        (("h", "FP32", [1], 0, "no name"), "tensor name: expected letters"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        State(*arguments)


class Remembers(Plain):
    """Keeps a state."""

    state = (State("h", "FP32", [2], initial=0.5), State("t0", "INT64", [1], output="t1"))

    def __call__(self, *, x: Any, mask: Any, t: Any, h: Any, t0: Any, parameters: Any) -> Any:
        """Not called."""


def test_clients_do_not_see_states() -> None:
    signature = msgspec.json.decode(msgspec.json.encode(signature_of(Remembers())), type=Signature)
    assert [spec.name for spec in signature.inputs] == ["x", "mask", "t", "h", "t0"]
    assert [spec.name for spec in signature.outputs] == ["y", "h", "t1"]
    assert [spec.name for spec in signature.public.inputs] == ["x", "mask", "t"]
    assert [spec.name for spec in signature.public.outputs] == ["y"]
    assert {name: signature.example_row()[name] for name in ("h", "t0")} == {"h": [0.5, 0.5], "t0": [0]}
    assert [spec.name for spec in signature.invented] == ["x", "t"]
    assert signature.public.example_row().keys() == {"x", "t"}
    assert signature_of(Plain()).public == signature_of(Plain())


def test_states_may_be_declared_among_the_tensors() -> None:
    states = Tensor("h", "FP32", [2]), Tensor("t0", "INT64", [1])
    model = type("Both", (Remembers,), {"inputs": (*Plain.inputs, *states), "example": {"h": [1, 2]}})()
    signature = signature_of(model)
    assert signature.inputs == signature_of(Remembers()).inputs
    assert signature.example_row()["h"] == [0.5, 0.5]
    assert signature.public.example is None


def test_a_model_with_states_is_not_cached_does_not_stream_and_has_no_mappings() -> None:
    with pytest.raises(DeclarationError, match="got `m`, which has states"):
        signature_of(Remembers()).check_cacheable()

    class Streams(Remembers):
        def __call__(self, **inputs: Any) -> Any:
            yield inputs

    with pytest.raises(DeclarationError, match=r"Streams\.state: expected no states beside a generator"):
        signature_of(Streams())
    embedding = Embedding("t", "y")
    with pytest.raises(DeclarationError, match="state: expected no states beside embedding"):
        signature_of(type("Maps", (Remembers,), {"embedding": embedding})())
