"""The steps by themselves, without a server."""

from __future__ import annotations

import numpy as np

from measures import Middle, Spread, Trunk

VALUES = np.array([[4, 1, 3, 2], [7, 7, 7, 7]], np.float32)


def test_heads_compute_on_what_the_trunk_makes() -> None:
    ordered = Trunk()(VALUES)["ordered"]
    assert Middle()(ordered)["median"].tolist() == [[2.5], [7]]
    assert Spread()(ordered)["spread"].tolist() == [[3], [0]]
