"""Which profiles are recommended, how they are scaled down, and why they are left out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest

from headwater_server.cli.plan.memory_model import MemoryModel, ReplicaTerms
from headwater_server.cli.plan.point import Point
from headwater_server.cli.plan.profiles import Budget, Profile, recommend

MODEL = MemoryModel(server=100, files=200, host=ReplicaTerms(fixed=1000, instance=50, row=10))

MOST = Point(32, 2, 8)
RATES = MappingProxyType({Point(1): 100.0, Point(8): 300.0, Point(32): 400.0})


def profiles(
    budget: Budget,
    *,
    model: MemoryModel = MODEL,
    cores: int = 4,
    most: Point = MOST,
    rates: Mapping[Point, float] = RATES,
) -> dict[str, Profile]:
    return {one.name: one for one in recommend(model, rates, budget, largest=most, cores=cores)}


def test_with_room_for_everything() -> None:
    found = profiles(Budget(10**6))
    assert found["memory-lean"].point == Point(8, 1, 4)
    assert found["throughput"].point == Point(32)
    assert found["balanced"].point == Point(4, 2, 2)
    assert not any(one.note for one in found.values())


def test_several_are_at_least_two_and_at_most_eight() -> None:
    assert profiles(Budget(10**6), cores=1)["memory-lean"].point == Point(8, 1, 2)
    assert profiles(Budget(10**6), cores=96)["memory-lean"].point == Point(8, 1, 8)


def test_a_model_without_instances() -> None:
    assert profiles(Budget(10**6), most=Point(32, 1, 8))["balanced"].point == Point(4, 1, 2)


def test_what_does_not_fit_is_scaled_down_and_says_so() -> None:
    found = profiles(Budget(100 + 200 + 2 * 1045))
    assert found["memory-lean"].point == Point(4, 1, 2)
    assert "scaled down from 8 × 1 × 4, which needs" in found["memory-lean"].note
    assert found["throughput"].point == Point(32)
    assert found["balanced"].point == Point(4, 1, 2)
    assert all(not found[name].note for name in ("throughput",))


def test_what_never_fits_is_left_out_with_the_smallest_need() -> None:
    found = profiles(Budget(1000))
    assert all(one.point is None for one in found.values())
    assert found["throughput"].note.startswith("left out: even 1 × 1 × 1 needs")


def test_a_replica_that_starts_needs_room_too() -> None:
    model = MemoryModel(server=0, files=0, host=ReplicaTerms(fixed=1000), starting=ReplicaTerms(fixed=2000))
    assert profiles(Budget(2999), model=model)["balanced"].point == Point(4, 2, 1)
    assert profiles(Budget(3000), model=model)["balanced"].point == Point(4, 2, 2)


def test_the_gpu_bounds_it_as_well() -> None:
    model = MemoryModel(server=0, files=0, host=ReplicaTerms(fixed=1), device=ReplicaTerms(fixed=4000, row=10))
    found = profiles(Budget(10**6, 8100), model=model)
    assert found["memory-lean"].point == Point(4, 1, 2)
    assert "the device's memory" in found["memory-lean"].note


def test_nothing_is_larger_than_what_was_allowed() -> None:
    found = profiles(Budget(10**6), most=Point(32, 1, 1))
    assert [one.point for one in found.values()] == [Point(8), Point(32), Point(4)]
    found = profiles(Budget(10**6), most=Point(3, 2, 3), rates={Point(3): 1.0})
    assert [one.point for one in found.values()] == [Point(3, 1, 3), Point(3), Point(3, 2, 2)]


@pytest.mark.parametrize(
    ("rates", "fastest"),
    [
        ({Point(1): 100.0, Point(8): 300.0, Point(32): 250.0}, Point(8)),
        ({Point(8): 251.0, Point(32): 250.0}, Point(8)),
        ({Point(8): 250.0, Point(32): 251.0}, Point(8)),  # about as fast, and needs less
        ({Point(8): 250.0, Point(32): 260.0}, Point(32)),
        ({Point(32): 260.0, Point(8, 1, 2): 300.0}, Point(8, 1, 2)),
    ],
)
def test_throughput_is_the_size_that_gave_most(rates: dict[Point, float], fastest: Point) -> None:
    assert profiles(Budget(10**6), rates=rates)["throughput"].point == fastest
