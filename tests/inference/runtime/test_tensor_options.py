"""Tensors that options declare: every fault is named."""

from __future__ import annotations

from typing import Any

import pytest

from headwater import Tensor
from headwater.errors import LoadError, is_permanent
from headwater.runtime.tensor_options import check_names, declared_tensors, new_names, served_name

X = {"name": "x", "datatype": "FP32", "shape": [2]}


def failure(inputs: Any) -> str:
    options = {} if inputs is None else {"inputs": inputs}
    with pytest.raises(LoadError) as caught:
        declared_tensors("model a:b", options, "inputs")
    assert is_permanent(caught.value) or isinstance(caught.value.__cause__, TypeError)
    return str(caught.value)


def test_they_are_tensors_as_a_class_declares_them() -> None:
    options = {"inputs": [{**X, "optional": True}, {**X, "name": "y", "shape": [-1, 2], "labels": ["a", "b"]}]}
    found = declared_tensors("model a:b", options, "inputs")
    assert found == (Tensor("x", "FP32", [2], optional=True), Tensor("y", "FP32", [-1, 2], labels=["a", "b"]))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (None, "options.inputs is required, but missing"),
        ([], "options.inputs: expected a list of tensors, got []"),
        ({"x": X}, "options.inputs: expected a list of tensors, got {"),
        (["x"], "options.inputs[0]: expected a mapping with name, datatype and shape, got 'x'"),
        ([X, {**X, "dtype": "FP32"}], "options.inputs[1]: unknown field 'dtype'"),
        ([{"name": "x", "shape": [1]}], "options.inputs[0]: `datatype` is required, but missing"),
        ([{**X, "shape": 2}], "options.inputs[0].shape: expected a list, got 2"),
        ([{**X, "optional": 1}], "options.inputs[0].optional: expected true or false, got 1"),
        ([{**X, "datatype": "float"}], "options.inputs[0]: tensor 'x', datatype: expected one of BOOL"),
        ([{**X, "datatype": []}], "options.inputs[0]: "),
        ([{**X, "shape": [0]}], "tensor 'x', shape: expected positive dimensions"),
    ],
)
def test_what_is_wrong_is_named(inputs: Any, words: str) -> None:
    assert words in failure(inputs)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(LoadError, match=r"unknown option 'input'; its options are inputs; did you mean `inputs`\?"):
        check_names("model a:b", {"input": 1}, ["inputs"])


def test_names_are_given_by_the_mapping() -> None:
    assert new_names("model a:b", {"x": "y"}, ["x"]) == {"x": "y"}
    with pytest.raises(LoadError, match="the file has no 'z'; it has x"):
        new_names("model a:b", {"z": "y"}, ["x"])
    assert served_name("a/b:0") == "a_b_0"
    assert served_name("0") == "_0"
