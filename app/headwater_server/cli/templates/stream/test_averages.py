"""The model by itself, without a server."""

from __future__ import annotations

import numpy as np

from averages import Averages


def test_there_is_a_result_for_each_number() -> None:
    results = list(Averages()(np.array([[1, 3, 8]], np.float32)))
    assert [result["mean"].tolist() for result in results] == [[[1]], [[2]], [[4]]]
