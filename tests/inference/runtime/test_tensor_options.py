"""Tensors that options declare: every fault is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater import Model, Tensor
from headwater.errors import LoadError, is_permanent
from headwater.runtime.tensor_options import (
    check_names,
    corrected_shapes,
    declared_tensors,
    named_dimensions,
    new_names,
    served_name,
    set_example,
)
from headwater.signature import Signature

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
        ([{**X, "shape": 2}], "options.inputs[0].shape: expected a list of sizes and names, got 2"),
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


class Picture(Model):
    inputs = (
        Tensor("image", "FP32", [3, -1, -1], dimensions=["", "height", "width"]),
        Tensor("text", "BYTES", [1], optional=True),
    )
    outputs = (Tensor("y", "FP32", [1]),)

    def __call__(self, image: Any, text: Any) -> Any:
        raise NotImplementedError


def with_example(**options: Any) -> Signature:
    model = Picture()
    set_example("model a:b", model, options)
    return Signature.of(model, name="m", max_batch_size=1)


def test_dimensions_may_have_names() -> None:
    (found,) = declared_tensors("model a:b", {"inputs": [{**X, "shape": [3, "height", -1]}]}, "inputs")
    assert found == Tensor("x", "FP32", [3, -1, -1], dimensions=["", "height", ""])
    assert named_dimensions([None, 2, "n", "n + 1"]) == ["", "", "n", ""]
    assert named_dimensions([None, 2]) == []
    assert corrected_shapes("model a:b", {"y": ["time", 1]}, ["x", "y"]) == {"y": ([-1, 1], ["time", ""])}


def test_sizes_are_those_of_the_dimensions_with_these_names() -> None:
    signature = with_example(sizes={"height": 4, "width": 2})
    assert np.shape(signature.example_row()["image"]) == (3, 4, 2)
    assert [spec.name for spec in signature.invented] == ["image"]
    assert np.shape(with_example(sizes={"height": 4}).example_row()["image"]) == (3, 4, 1)
    assert np.shape(with_example().example_row()["image"]) == (3, 1, 1)


def test_an_example_is_a_row_or_a_file(tmp_path: Path) -> None:
    row = np.arange(12, dtype="f4").reshape(3, 2, 2)
    np.save(tmp_path / "row.npy", row)
    np.savez(tmp_path / "rows.npz", image=row)
    for example in (
        {"image": row.tolist()}, {"image": str(tmp_path / "row.npy")}, str(tmp_path / "rows.npz"),
    ):  # fmt: skip
        signature = with_example(example=example)
        assert signature.example_row() == {"image": row.tolist()}
        assert signature.invented == []
    assert with_example(example={"text": ["a.npy is a text"]}).example_row()["text"] == ["a.npy is a text"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"example": [1]}, "options.example: expected a mapping by input name, got [1]"),
        (
            {"example": {"imag": 1}},
            "options.example: there is no input 'imag'; the inputs are image, text; did you mean",
        ),
        ({"example": {"image": [1.0]}}, "options.example, input 'image': expected FP32 [3, -1, -1], got shape [1]"),
        ({"example": {"image": "a"}}, "options.example, input 'image': expected FP32 [3, -1, -1]: "),
        ({"example": {"image": "/none.npy"}}, "there is no file /none.npy"),
        ({"example": {"image": "BAD.npy"}}, "BAD.npy can't be read as numpy's arrays: "),
        ({"example": "BAD.npz"}, "BAD.npz can't be read as numpy's arrays: "),
        ({"sizes": 3}, "options.sizes: expected sizes by the names of dimensions, got 3; the dimensions that vary and"),
        (
            {"sizes": {"heigth": 3}},
            "the inputs have no dimension 'heigth'; the dimensions that vary and have names are ",
        ),
        ({"sizes": {"height": 0}}, "options.sizes.height: expected a whole number of 1 or more, got 0"),
        ({"sizes": {"height": True}}, "options.sizes.height: expected a whole number of 1 or more, got True"),
        ({"sizes": {"height": 10**6, "width": 10**6}}, "would have the shape [3, 1000000, 1000000], over 268435456"),
    ],
)
def test_an_example_that_is_wrong_is_named(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("BAD.npy", "BAD.npz"):
        (tmp_path / name).write_bytes(b"PK no numpy")
    with pytest.raises(LoadError) as caught:
        with_example(**options)
    assert words in str(caught.value)
    assert caught.value.problem.fix


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "row.npy", np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(LoadError, match="can't be read as numpy's arrays"):
        with_example(example={"image": str(tmp_path / "row.npy")})


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (3, "options.shapes: expected shapes by names of inputs and outputs, got 3"),
        ({"z": [1]}, "options.shapes: the file has no 'z'; it has x, y"),
        ({"y": 3}, "options.shapes.y: expected a list of sizes and names, got 3"),
        ({"y": [1.5]}, "options.shapes.y: expected a list of sizes and names, got [1.5]"),
    ],
)
def test_shapes_that_are_wrong_are_named(shapes: Any, words: str) -> None:
    with pytest.raises(LoadError) as caught:
        corrected_shapes("model a:b", shapes, ["x", "y"])
    assert words in str(caught.value)
