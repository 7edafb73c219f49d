"""Percentiles are values that occurred, and are left out where there are too few values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.cli.bench.outcomes import distribution_ms, percentile

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=300)


@given(VALUES)
def test_so_many_do_not_exceed_it(values: list[float]) -> None:
    # Fractions that a binary number holds exactly: elsewhere numpy can be one rank off.
    for percent in (12.5, 25.0, 50.0, 75.0, 87.5, 100.0):
        got = percentile(values, percent)
        assert got in values
        assert sum(value <= got for value in values) * 100 >= len(values) * percent
        assert sum(value < got for value in values) * 100 < len(values) * percent


@given(VALUES)
def test_a_distribution_holds_what_was_measured(values: list[float]) -> None:
    told = distribution_ms(values)
    assert told["count"] == len(values)
    assert told["mean"] == pytest.approx(float(np.mean(values)) * 1000)
    assert (told["min"], told["max"]) == (min(values) * 1000, max(values) * 1000)
    assert told["p50"] is not None


@pytest.mark.parametrize(("count", "known"), [(9, "p50"), (99, "p90"), (999, "p99"), (1000, "p99.9")])
def test_a_percentile_of_too_few_values_is_none(count: int, known: str) -> None:
    told = distribution_ms(list(range(1, count + 1)))
    names = ["p50", "p90", "p99", "p99.9"]
    place = names.index(known)
    assert all(told[name] is not None for name in names[: place + 1])
    assert all(told[name] is None for name in names[place + 1 :])


def test_nothing_has_no_figures() -> None:
    told = distribution_ms([])
    assert told.pop("count") == 0
    assert set(told.values()) == {None}
