"""The scaling policy: when a deployment gets another replica, and when one of its replicas ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater_server.config.sections import ReplicaBounds, Scaling
from headwater_server.supervisor.autoscaler import Demand, ScalingPolicy

TICK_S = 0.5
SCALING = Scaling(queue_wait_ms=100, up_after_s=2, down_after_s=10)
BOUNDS = ReplicaBounds(min=1, max=4)
IDLE = Demand()
LATE = Demand(waiting=5, wait_s=0.5, busy=1.0, peak=6)


class Drive:
    """Asks a policy at every tick; a replica that is wanted is there at once."""

    def __init__(self, count: int = 1, scaling: Scaling = SCALING, bounds: ReplicaBounds = BOUNDS) -> None:
        self.policy = ScalingPolicy(scaling)
        self.count = count
        self.bounds = bounds
        self.now_s = 100.0
        self.changes: list[tuple[float, int]] = []

    def run(self, seconds: float, demand: Demand | Callable[[int], Demand], *, ready: int | None = None) -> int:
        """So long with that to do, which may depend on how many replicas there are."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += TICK_S
            what = demand if isinstance(demand, Demand) else demand(self.count)
            there = self.count if ready is None else ready
            wanted = self.policy.wanted(self.now_s, what, self.count, ready=there, bounds=self.bounds)
            assert abs(wanted - self.count) <= 1 or not self.bounds.min <= self.count <= self.bounds.max
            if wanted != self.count:
                self.changes.append((self.now_s, wanted))
                self.count = wanted
        return self.count


def test_rows_that_wait_too_long_for_long_enough_bring_another_replica() -> None:
    drive = Drive()
    assert drive.run(1.5, LATE) == 1
    assert drive.run(1.5, LATE) == 2


def test_a_short_wait_changes_nothing() -> None:
    drive = Drive()
    for _ in range(20):
        drive.run(1.5, LATE)
        drive.run(0.5, IDLE)
    assert drive.count == 1


def test_rows_that_wait_shorter_than_the_target_bring_none_unless_the_replicas_compute_all_the_time() -> None:
    short = Demand(waiting=1, wait_s=0.05, busy=0.8, peak=3)
    assert Drive().run(60, short) == 1
    assert Drive().run(60, Demand(waiting=1, wait_s=0.05, busy=0.95, peak=3)) == 2


def test_none_is_added_while_one_is_starting() -> None:
    drive = Drive(count=2)
    assert drive.run(60, LATE, ready=1) == 2


def test_it_goes_down_one_at_a_time_each_after_so_long() -> None:
    drive = Drive(count=4)
    drive.run(60, IDLE)
    assert [count for _, count in drive.changes] == [3, 2, 1]
    times = [when for when, _ in drive.changes]
    assert all(later - earlier >= SCALING.down_after_s for earlier, later in itertools.pairwise(times))


def test_a_client_that_asks_one_thing_after_the_other_needs_one_replica_however_long_it_computes() -> None:
    assert Drive(count=3).run(60, Demand(busy=0.99, peak=1)) == 1


def test_what_would_not_fit_on_one_less_keeps_it() -> None:
    # Two replicas that compute 60 % of their time: one would have to compute for 1.2.
    assert Drive(count=2).run(120, Demand(busy=1.2, peak=5)) == 2
    # And waits that would be too long on one.
    assert Drive(count=2).run(120, Demand(waiting=0, wait_s=0.09, busy=0.4, peak=5)) == 2


def test_other_bounds_hold_at_once() -> None:
    drive = Drive(count=1)
    drive.bounds = ReplicaBounds(min=3, max=4)
    drive.run(TICK_S, IDLE)
    assert drive.count == 3
    drive.bounds = ReplicaBounds(min=1, max=2)
    drive.run(TICK_S, LATE)
    assert drive.count == 2


def test_a_step_down_that_had_to_be_taken_back_is_not_tried_again_until_there_is_less_to_do() -> None:
    # As if waits grew much faster than replicas get fewer: nothing waits at two, all wait at one.
    def demand(count: int) -> Demand:
        return Demand(busy=0.45, peak=9) if count > 1 else Demand(waiting=9, wait_s=1, busy=0.45, peak=9)

    drive = Drive(count=2)
    drive.run(600, demand)
    assert [count for _, count in drive.changes] == [1, 2]
    assert drive.run(60, Demand(busy=0.2, peak=9)) == 1


def served(load: float, count: int) -> Demand:
    """What replicas have that compute so many replicas' worth of work, in random order (M/M/1, roughly)."""
    share = load / count
    if share >= 0.99:
        return Demand(waiting=100, wait_s=5.0, busy=float(count), peak=100)
    wait_s = 0.02 * share / (1 - share)
    return Demand(waiting=round(share / (1 - share)), wait_s=wait_s, busy=load, peak=4 * load + 1)


scalings = st.builds(
    lambda wait, up, down: Scaling.model_validate(
        {
            "queue_wait_ms": wait,
            "up_after_s": up,
            "down_after_s": down,
        }
    ),
    st.floats(10, 1000), st.floats(0.5, 10), st.floats(1, 30),
)  # fmt: skip
bounds = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(lambda pair: ReplicaBounds(min=min(pair), max=max(pair)))


def settled(load: float, scaling: Scaling, within: ReplicaBounds, count: int) -> tuple[Drive, int]:
    """What comes of a constant load; and how many changes there were in the second half of the time."""
    drive = Drive(count, scaling, within)
    each_s = 4 * (scaling.up_after_s + scaling.down_after_s) + 10
    drive.run(12 * each_s, lambda now: served(load, now))
    half = len(drive.changes)
    drive.run(12 * each_s, lambda now: served(load, now))
    return drive, len(drive.changes) - half


@settings(max_examples=30)
@given(st.floats(0, 10), scalings, bounds, st.integers(1, 8))
@example(1.75, Scaling(queue_wait_ms=10, up_after_s=2, down_after_s=1), ReplicaBounds(min=1, max=6), 1)
def test_a_constant_load_comes_to_rest_within_the_bounds(
    load: float, scaling: Scaling, within: ReplicaBounds, count: int
) -> None:
    drive, late_changes = settled(load, scaling, within, count)
    assert late_changes == 0
    assert within.min <= drive.count <= within.max
    if load >= drive.count:  # too much for so many
        assert drive.count == within.max
    if load == 0:
        assert drive.count == within.min


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 20)), min_size=1, max_size=30), scalings, bounds)
def test_it_never_leaves_the_bounds_nor_goes_faster_than_it_may(
    loads: list[tuple[float, float]], scaling: Scaling, within: ReplicaBounds
) -> None:
    drive = Drive(within.min, scaling, within)
    for load, seconds in loads:
        drive.run(seconds, lambda now, load=load: served(load, now))  # type: ignore[misc]
        assert within.min <= drive.count <= within.max
    before = within.min
    last_s = 100.0
    for when_s, count in drive.changes:
        least_s = scaling.up_after_s if count > before else scaling.down_after_s
        assert when_s - last_s >= least_s - 1e-6
        before, last_s = count, when_s


@settings(max_examples=30)
@given(st.floats(0, 8), st.floats(0, 4), scalings)
def test_more_to_do_never_ends_with_fewer_replicas(load: float, more: float, scaling: Scaling) -> None:
    within = ReplicaBounds(min=1, max=8)
    less_to_do, _ = settled(load, scaling, within, 1)
    more_to_do, _ = settled(load + more, scaling, within, 1)
    assert more_to_do.count >= less_to_do.count
