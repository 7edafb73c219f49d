"""Least squares with coefficients that are not negative: memory is never given back by being larger."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["fit_non_negative"]


def fit_non_negative(features: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients with the least sum of squared relative errors; columns that tell nothing new get 0.

    With so few columns every set of them that may be positive is tried, which is exact: the best admissible
    unconstrained solution is the constrained one.

    Args:
        features: a row for each value; a handful of columns, the first of which is wanted most.
        values: positive.
    """
    matrix: npt.NDArray[Any] = np.asarray(features, float) / np.asarray(values, float)[:, None]
    ones = np.ones(len(values))
    columns = matrix.shape[1]
    best, least = [0.0] * columns, float(len(values))
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            part = matrix[:, chosen]
            if np.linalg.matrix_rank(part) < size:
                continue
            found = np.linalg.lstsq(part, ones, rcond=None)[0]
            error = float(((part @ found - ones) ** 2).sum())
            # More terms only for a fit that is better by more than rounding.
            if (found >= 0).all() and error < least * (1 - 1e-9) - 1e-15:
                best, least = [0.0] * columns, error
                for column, value in zip(chosen, found, strict=True):
                    best[column] = float(value)
    return best
