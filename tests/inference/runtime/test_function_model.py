"""Functions as models: called by input name, checked, and refused by name."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from headwater.errors import LoadError
from headwater.model import Model
from headwater.runtime.loader import load_model
from headwater.signature import Signature

X = {"name": "x", "datatype": "FP32", "shape": [2]}
Y = {"name": "y", "datatype": "FP32", "shape": [2]}
ONE = {"inputs": [X], "outputs": [Y]}


def double(x: Any) -> Any:
    """Twice x.

    More.
    """
    return x * 2


def both(x: Any, scale: Any = None) -> Any:
    return {"y": x * (1 if scale is None else scale), "z": x + 1}


async def later(x: Any) -> Any:
    await asyncio.sleep(0)
    return x * 2


def pieces(x: Any) -> Iterator[Any]:
    for count in range(3):
        yield x + count


closed: list[str] = []


async def slow_pieces(x: Any) -> AsyncIterator[Any]:
    try:
        for count in range(3):
            yield x + count
    finally:
        closed.append("closed")


def hidden(function: Any) -> Any:
    @functools.wraps(function)
    def call(**inputs: Any) -> Any:
        return function(**inputs)

    return call


later_still = hidden(later)
partly = functools.partial(double)


def open_as(name: str, **options: Any) -> Model:
    return load_model(f"{__name__}:{name}", {**ONE, **options})


def failure(name: str, **options: Any) -> str:
    with pytest.raises(LoadError) as caught:
        load_model(f"{__name__}:{name}", options)
    return str(caught.value)


def test_one_array_is_the_one_output() -> None:
    model = open_as("double")
    signature = Signature.of(model, name="double", max_batch_size=4)
    assert [(one.name, one.datatype, one.shape) for one in signature.inputs] == [("x", "FP32", (2,))]
    assert signature.description == "Twice x."
    assert not signature.streams
    assert model(x=np.ones((3, 2)))["y"].tolist() == [[2, 2]] * 3


def test_a_dict_is_taken_by_name_and_an_optional_input_may_be_missing() -> None:
    scale = {"name": "scale", "datatype": "FP32", "shape": [1], "optional": True}
    model = open_as("both", inputs=[X, scale], outputs=[Y, {**Y, "name": "z"}])
    assert sorted(model(x=np.ones((1, 2)), scale=None)) == ["y", "z"]


def test_async_functions_and_generators_are_what_they_are() -> None:
    model = open_as("later")
    assert asyncio.run(model(x=np.ones((1, 2))))["y"].tolist() == [[2, 2]]
    model = open_as("later_still")
    assert asyncio.run(model(x=np.ones((1, 2))))["y"].tolist() == [[2, 2]]
    model = open_as("pieces")
    assert Signature.of(model, name="pieces", max_batch_size=1).streams
    assert [one["y"][0, 0] for one in model(x=np.ones((1, 2)))] == [1, 2, 3]
    model = open_as("slow_pieces")
    assert Signature.of(model, name="pieces", max_batch_size=1).streams

    async def first() -> Any:
        results = model(x=np.ones((1, 2)))
        found = await anext(results)
        await results.aclose()
        return found["y"][0, 0]

    closed.clear()
    assert asyncio.run(first()) == 1
    assert closed == ["closed"]


def test_arrays_are_torchs_if_asked_for() -> None:
    assert open_as("double").arrays == "numpy"
    assert open_as("double", arrays="torch").arrays == "torch"
    assert "options.arrays: expected numpy or torch, got 'jax'" in failure("double", **ONE, arrays="jax")


def test_without_a_batch_axis_a_request_is_a_call() -> None:
    signature = Signature.of(open_as("double", batch="none"), name="double", max_batch_size=8)
    assert (signature.max_batch_size, signature.bare_rows) == (1, True)
    assert "options.batch: expected none, got 'rows'" in failure("double", **ONE, batch="rows")


def test_what_does_not_fit_is_named() -> None:
    assert "options.inputs is required, but missing" in failure("double")
    assert "options.outputs is required, but missing" in failure("double", inputs=[X])
    message = failure("double", inputs=[X, {**X, "name": "a"}], outputs=[Y])
    assert "the function is called with x, a, and takes (x: 'Any') -> 'Any'" in message
    assert "missing a required argument: 'x'" in failure("double", inputs=[{**X, "name": "a"}], outputs=[Y])
    assert "unknown option 'factor'; its options are inputs, outputs, arrays" in failure("double", **ONE, factor=2)


def test_other_objects_are_no_models() -> None:
    assert "expected a class derived from headwater.Model, got functools.partial" in failure("partly", **ONE)
