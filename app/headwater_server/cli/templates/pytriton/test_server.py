"""The bound function by itself, without a server."""

from __future__ import annotations

import numpy as np
from pytriton.proxy.types import Request

from server import normalize


def test_each_row_has_length_one() -> None:
    rows = np.array([[3, 4], [0, 2]], np.float32)
    (answer,) = normalize([Request({"values": rows}, {})])
    np.testing.assert_allclose(answer["normalized"], np.array([[0.6, 0.8], [0, 1]]), rtol=1e-6)


def test_a_row_of_zeros_stays_one() -> None:
    (answer,) = normalize([Request({"values": np.zeros((1, 3), np.float32)}, {})])
    assert not answer["normalized"].any()
