"""The model Scale."""

import subprocess
import sys

import numpy as np

from headwater.signature import Signature, TensorSpec
from headwater.zoo.scale import Scale


def test_it_doubles_every_number_and_keeps_shape_and_datatype() -> None:
    x = np.array([[1.0, -2.0, 0.5], [0.0, 1e30, -3.0]], np.float32)
    y = Scale()(x=x)["y"]
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, np.array([[2.0, -4.0, 1.0], [0.0, 2e30, -6.0]], np.float32))


def test_it_takes_rows_of_any_length() -> None:
    model = Scale()
    for length in (1, 2, 1000):
        assert model(x=np.ones((3, length), np.float32))["y"].shape == (3, length)


def test_it_leaves_its_input_alone() -> None:
    x = np.ones((1, 4), np.float32)
    Scale()(x=x)
    np.testing.assert_array_equal(x, 1)


def test_its_signature() -> None:
    signature = Signature.of(Scale(), name="scale", max_batch_size=8)
    assert signature.inputs == (TensorSpec("x", "FP32", (-1,)),)
    assert signature.outputs == (TensorSpec("y", "FP32", (-1,)),)
    assert signature.description == "Doubles every number."
    assert signature.example_row() == {"x": [1.0, 2.0, 3.0]}


def test_it_needs_no_torch() -> None:
    code = "import sys, headwater.zoo.scale; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
