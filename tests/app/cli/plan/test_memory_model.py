"""The model of memory: what it fits, and what it says of sizes that were not measured."""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.environment import install_command
from headwater_server.cli.plan.measuring import Measured
from headwater_server.cli.plan.memory_model import (
    MemoryModel,
    Need,
    ReplicaTerms,
    check_fitting,
    fit_memory,
    fit_non_negative,
)
from headwater_server.cli.plan.point import Point, grid
from headwater_server.errors import CommandError

MIB = 2**20
POINTS = grid([1, 8, 32], [1, 2], [1, 2])


def measured(point: Point, *, cache: int = 0) -> Measured:
    """As a machine would measure it that is exactly as the model says."""
    own = 400 + (point.instances - 1) * 30 + point.rows * point.instances * 2 + cache
    host = 80 + 150 + point.replicas * own
    return taken(point, own * MIB, 500 * MIB, host=host * MIB, cache=cache * MIB)


def taken(
    point: Point, replica: int, starting: int, *, host: int = 0, device: str = "cpu", used: int = 0, cache: int = 0
) -> Measured:
    return Measured(point, host, 80 * MIB, 150 * MIB, replica, starting, 1.0, 1.0, 1.0, 1, used, device, cache)


def test_sizes_that_were_not_measured_are_predicted() -> None:
    model = fit_memory([measured(point) for point in POINTS])
    unseen = Point(64, 2, 3)
    assert model.at(unseen).host == pytest.approx((80 + 150 + 3 * (400 + 30 + 256)) * MIB, rel=1e-6)
    assert model.at(unseen).device == 0


def test_while_the_last_replica_starts_more_may_be_taken() -> None:
    model = fit_memory([measured(point) for point in POINTS])
    small, large = Point(1, 1, 2), Point(64, 1, 2)
    assert model.most(small).host - model.at(small).host == pytest.approx((500 - 402) * MIB, rel=1e-6)
    assert model.most(large) == model.at(large)


def test_a_cache_is_computed_and_not_fitted() -> None:
    points = [Point(rows) for rows in (1, 8, 32)]
    model = fit_memory([measured(one, cache=5 * one.rows) for one in points], lambda rows: 5 * rows * MIB)
    assert model.host.row == pytest.approx(2 * MIB, rel=1e-6)
    full = replace(model, cache=lambda rows: 50 * rows * MIB)
    assert full.at(Point(8)).host - model.at(Point(8)).host == pytest.approx(8 * 45 * MIB, abs=2)


def test_on_a_gpu_the_cache_and_the_rows_are_there() -> None:
    points = [Point(1), Point(8), Point(32)]
    found = [taken(one, 900, 900, device="cuda:0", used=4000 + 17 * one.rows, cache=7 * one.rows) for one in points]
    model = fit_memory(found, lambda rows: 7 * rows)
    assert model.at(Point(16, 1, 2)) == Need(230 * MIB + 2 * 900, 2 * (4000 + 17 * 16))


def test_one_size_is_enough_for_a_model_without_growth() -> None:
    model = fit_memory([measured(Point(8))])
    assert model.at(Point(8)).host == pytest.approx((230 + 416) * MIB, rel=1e-6)


@given(st.lists(st.integers(1, 10**9), min_size=4, max_size=12))
def test_no_term_is_ever_negative(values: list[int]) -> None:
    points = list(itertools.islice(itertools.cycle(POINTS), len(values)))
    model = fit_memory([taken(point, value, value) for point, value in zip(points, values, strict=True)])
    assert min(model.host.fixed, model.host.instance, model.host.row) >= 0


def test_a_column_that_tells_nothing_new_gets_nothing() -> None:
    found = fit_non_negative([(1.0, 0.0, 1.0), (1.0, 0.0, 2.0), (1.0, 0.0, 3.0)], [3.0, 5.0, 7.0])
    assert found == pytest.approx([1.0, 0.0, 2.0])


def test_terms_add_up() -> None:
    model = MemoryModel(server=1, files=2, host=ReplicaTerms(fixed=100, instance=10, row=3))
    assert model.at(Point(4, 2, 3)).host == 1 + 2 + 3 * (100 + 10 + 4 * 2 * 3)


def test_without_scipy_a_plan_says_so_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fitting()
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    install = re.escape(install_command("plan", "scipy", "'numpy~=1.26'"))
    with pytest.raises(CommandError, match=f"headwater plan: can't import scipy, which fits .*; {install}$"):
        check_fitting()
