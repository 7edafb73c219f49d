"""Least squares with coefficients that are not negative: memory is never given back by being larger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["fit_non_negative"]


def fit_non_negative(features: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients with the least sum of squared relative errors; columns that the ones before them imply get 0.

    Args:
        features: a row for each value; a handful of columns, the first of which is wanted most.
        values: positive.
    """
    from scipy.optimize import nnls  # here, so that plans on paper don't wait for it

    raw: npt.NDArray[Any] = np.asarray(features, float)
    chosen: list[int] = []
    for column in range(raw.shape[1]):
        if np.linalg.matrix_rank(raw[:, [*chosen, column]]) > len(chosen):
            chosen.append(column)
    matrix = raw[:, chosen] / np.asarray(values, float)[:, None]
    scales = np.linalg.norm(matrix, axis=0)
    found, _ = nnls(matrix / scales, np.ones(len(values)))
    coefficients = np.zeros(raw.shape[1])
    coefficients[chosen] = found / scales
    return [float(one) for one in coefficients]
