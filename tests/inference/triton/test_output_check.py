"""Outputs that contradict a model's configuration."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.triton.output_check import OutputCheck

Y = {"name": "y", "data_type": "TYPE_FP32", "dims": ["2", "-1"]}


@pytest.mark.parametrize(
    ("config", "datatype", "shape", "expected"),
    [
        ({"output": [Y]}, "TYPE_FP32", (2, 5), ""),
        ({"output": [Y], "max_batch_size": 4}, "TYPE_FP32", (3, 2, 0), ""),
        ({"output": [Y]}, "TYPE_FP64", (2, 5), "expected TYPE_FP32 [2, -1] as in config.pbtxt, got TYPE_FP64 [2, 5]"),
        ({"output": [Y]}, "TYPE_FP32", (3, 5), "expected TYPE_FP32 [2, -1] as in config.pbtxt, got TYPE_FP32 [3, 5]"),
        ({"output": [Y], "max_batch_size": 4}, "TYPE_FP32", (2, 5), "expected TYPE_FP32 [batch, 2, -1] as in"),
        ({"output": [{**Y, "dims": []}], "max_batch_size": 4}, "TYPE_FP32", (), "expected TYPE_FP32 [batch] as in"),
        ({"output": [{**Y, "reshape": {"shape": []}}]}, "TYPE_FP32", (), ""),
        ({"output": []}, "TYPE_FP32", (1,), ""),
        ({}, "TYPE_FP32", (1,), ""),
    ],
)
def test_faults(config: dict[str, Any], datatype: str, shape: tuple[int, ...], expected: str) -> None:
    fault = OutputCheck(config).fault("y", datatype, shape)
    assert fault.startswith(f"output 'y': {expected}" if expected else "")
    assert bool(fault) == bool(expected)


@given(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(-1, 3), max_size=4))
def test_a_shape_fits_its_dims_only(shape: list[int], dims: list[int]) -> None:
    check = OutputCheck({"output": [{**Y, "dims": dims}]})
    fits = len(shape) == len(dims) and all(dim in (-1, size) for dim, size in zip(dims, shape, strict=True))
    assert (check.fault("y", "TYPE_FP32", tuple(shape)) == "") == fits
