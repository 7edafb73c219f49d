"""Bindings and responses are refused where PyTriton refuses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pytriton.exceptions import PyTritonError
from pytriton.model_config.generator import ModelConfigGenerator
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig
from pytriton.proxy.validators import TritonResultsValidator

from headwater.errors import DeclarationError
from headwater.runtime.pytriton_checks import check_config, check_responses, declared

pytestmark = pytest.mark.heavy
Y = np.ones((2, 3), np.float32)
TEXT = np.array([[b"a"], [b"b"]], object)


def _config(*, batching: bool = True, **fields: Any) -> Any:
    outputs = [TensorSpec("y", (-1,), np.float32), TensorSpec("text", (1,), np.bytes_)]
    inputs = [TensorSpec("x", (-1,), np.float32)]
    return TritonModelConfig("model", batching=batching, **{"inputs": inputs, "outputs": outputs, **fields})


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("batching", [False, True])
@pytest.mark.parametrize(
    "responses",
    [
        [{"y": Y, "text": TEXT}],
        [{"y": Y, "text": TEXT.astype(np.bytes_)}],
        [{"y": Y[0], "text": TEXT[0]}],
        [{"y": Y[np.newaxis]}],
        [{"y": Y, "text": np.repeat(TEXT, 2, axis=1)}],
        [{"y": Y.astype(np.float64)}],
        [{"y": TEXT}],
        [{"text": Y}],
        [{"other": Y}],
        [{"y": Y.astype(np.complex64)}],
        [{"text": np.array([["a"]], object)}],
        [{"text": np.array([[1]], object)}],
        [{"y": [1.0]}],
        [{1: Y}],
        [Y],
        [],
        [{"y": Y}, {"y": Y}],
        ({"y": Y},),
        {"y": Y},
        None,
    ],
    ids=repr,
)
def test_responses_are_refused_as_pytriton_refuses_them(responses: Any, batching: bool, strict: bool) -> None:
    config = _config(batching=batching)
    theirs = ours = None
    try:
        TritonResultsValidator(config, strict).validate_responses([None], responses)
    except (ValueError, AttributeError) as error:  # AttributeError: what is no array has no shape to be logged
        theirs = error
    try:
        check_responses(config, responses, 1, strict=strict)
    except ValueError as error:
        ours = error
    assert (ours is None) == (theirs is None), (ours, theirs)
    if strict and "has invalid" in str(theirs):
        assert str(ours) == str(theirs)


@pytest.mark.parametrize(
    "dtype",
    [
        *(np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64),
        *(np.float16, np.float32, np.float64, bytes, np.bytes_, object, np.object_),
    ],
)
def test_tensors_have_the_types_that_pytriton_gives_them(dtype: Any) -> None:
    spec = TensorSpec("x", (-1, 2), dtype, True)
    described = ModelConfigGenerator(_config(inputs=[spec])).get_config()["input"][0]
    tensor = declared(spec)
    expected = described["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
    assert (tensor.datatype, list(tensor.shape), tensor.optional) == (expected, described["dims"], True)


@pytest.mark.parametrize("dtype", [np.complex64, np.str_, np.datetime64, "no type", None])
def test_other_types_are_refused(dtype: Any) -> None:
    with pytest.raises(DeclarationError, match="tensor 'x'"):
        declared(TensorSpec("x", (1,), dtype))


def test_a_shape_that_is_no_sequence_is_refused() -> None:
    with pytest.raises(
        DeclarationError, match=r"tensor 'x': expected a type of numpy's and a tuple of integers, got .* 3"
    ):
        declared(TensorSpec("x", 3, np.float32))


@pytest.mark.parametrize(
    "fields", [{"max_batch_size": 0}, {"outputs": [TensorSpec("y", (1,), np.float32, True)]}], ids=repr
)
def test_configurations_are_refused_that_pytriton_refuses(fields: dict[str, Any]) -> None:
    config = _config(**fields)
    with pytest.raises(PyTritonError):
        ModelConfigGenerator(config).get_config()
    with pytest.raises(DeclarationError):
        check_config(config)


def test_a_configuration_without_tensors_is_refused() -> None:
    with pytest.raises(DeclarationError, match="inputs: expected at least one; outputs: expected at least one"):
        check_config(_config(inputs=[], outputs=[]))
