"""Makes a whole plan: measures sizes, fits the models, chooses profiles, and runs each as recommended.

A size that fails twice leaves its reason, and what was measured remains. An outlier is measured again: a size disturbed
by something else on the machine would distort the models, and with them the recommendations.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from app.cli.options import write_file
from app.cli.plan.measuring import Measured, Weights, measure_point, measure_server_under_load
from app.cli.plan.point import Point, section_of
from app.cli.plan.prediction import Predictor, fit, held_out_error, unseen_points
from app.cli.plan.profiles import WORTH, Budget, recommend
from app.cli.plan.subject import Subject
from app.cli.plan.trial import (
    Recommendation,
    Trial,
    combined,
    figures,
    profile_comments,
    profile_yaml,
    served_at,
    spread_text,
)
from app.config.schema import Config
from app.errors import CommandError
from app.process.machine import size_text

__all__ = ["Plan", "Planner", "Row", "Sweep", "measure_outliers_again", "run_sweep"]

SAFE_PART: Final = 0.9
"""Of the machine's memory: a size that would take more is not tried."""
SLOW_FACTOR: Final = 1.5
"""An outlier is so many times slower than a size that should not be faster."""
TAIL_FACTOR: Final = 4.0
"""An outlier's p99, relative to its p50, is so many times that of the other sizes."""
MORE_ROUNDS: Final = 2
"""With the first three, so that the median is not the outlier."""


@dataclass(frozen=True)
class Row:
    """What came of one size."""

    point: Point
    measured: Measured | None
    error: str
    """Why it was not measured, in one line; empty: it was."""
    first_error: str = ""
    """Why the first try failed, where there was a second."""

    @property
    def note(self) -> str:
        """What a reader must know of the figures, or why there are none; empty: nothing."""
        if self.measured is None:
            return self.error
        notes = ["the load's generator was busy"] if self.measured.load_share > 0.9 else []
        if self.first_error:
            notes.append(f"at the second try; at the first: {self.first_error}")
        if self.measured.rates:
            rates = spread_text(self.measured)
            notes.append(f"an outlier, so medians of {len(self.measured.rates)} measurements: {rates}")
        return "; ".join(notes)


@dataclass
class Sweep:
    """What came of all so far."""

    rows: list[Row] = field(default_factory=list)
    ended: str = ""
    """Why it ended before its end; empty: it did not."""

    @property
    def measured(self) -> list[Measured]:
        """Those sizes that were measured."""
        return [row.measured for row in self.rows if row.measured is not None]


def run_sweep(
    sweep: Sweep,
    points: Sequence[Point],
    measure: Callable[[Point], Measured],
    capacity: int | None,
    progress: Callable[[Row], None],
) -> None:
    """Measure each size; Ctrl-C ends it with what there is, and so does a smallest size that can't be measured.

    A size that fails after others did not is tried once more: what they have in common can't be wrong.

    Args:
        sweep: gets what came of each.
        points: the smallest first.
        measure: one; raises CommandError if it can't be.
        capacity: bytes that the machine has; None: unknown.
        progress: gets that, too.
    """
    for point in points:
        row = Row(point, None, _too_large(sweep, point, capacity))
        if not row.error:
            row = _measured(sweep, point, measure)
            if row.error and not sweep.ended and sweep.measured:
                row = replace(_measured(sweep, point, measure), first_error=row.error)
        sweep.rows.append(row)
        progress(row)
        if not sweep.measured and not sweep.ended:
            sweep.ended = f"the smallest size, {point}, can't be measured: {row.error}"
        if sweep.ended:
            break


def measure_outliers_again(sweep: Sweep, measure: Callable[[Point], Measured], progress: Callable[[Row], None]) -> None:
    """Measure each outlier twice more, and take the medians.

    Args:
        sweep: has all sizes; an outlier's row is replaced.
        measure: as of `run_sweep`.
        progress: gets each row that is replaced.
    """
    first = sweep.measured
    for place, row in enumerate(sweep.rows):
        if row.measured is None or not _is_outlier(row.measured, first):
            continue
        rounds = [row.measured]
        for _ in range(MORE_ROUNDS):
            if (again := _measured(sweep, row.point, measure).measured) is not None:
                rounds.append(again)
            if sweep.ended:
                return
        sweep.rows[place] = replace(row, measured=combined(rounds))
        progress(sweep.rows[place])


def _is_outlier(one: Measured, measured: Sequence[Measured]) -> bool:
    """Whether something else than its size seems to have slowed it down.

    Sizes are compared that can be whatever the model is: a call takes no longer than one with more rows, and a larger
    size gives no less than a smaller one.
    """
    others = [other for other in measured if other is not one]
    tails = [other.p99_ms / other.p50_ms for other in others]
    if tails and one.p99_ms / one.p50_ms > TAIL_FACTOR * statistics.median_low(tails):
        return True
    size = one.point
    for other in others:
        if all(less <= more for less, more in zip(other.point, size, strict=True)):
            if other.rate > SLOW_FACTOR * one.rate:
                return True
        elif other.point[1:] == size[1:] and size.rows / one.rate > SLOW_FACTOR * other.point.rows / other.rate:
            return True
    return False


def _measured(sweep: Sweep, point: Point, measure: Callable[[Point], Measured]) -> Row:
    """One try."""
    try:
        return Row(point, measure(point), "")
    except CommandError as error:
        return Row(point, None, " | ".join(str(error).splitlines()))
    except KeyboardInterrupt:
        sweep.ended = "stopped by hand"
        return Row(point, None, sweep.ended)


def _too_large(sweep: Sweep, point: Point, capacity: int | None) -> str:
    """Why a size is not tried: so many of the largest replica measured yet would bring the machine down."""
    if not sweep.measured or capacity is None:
        return ""
    largest = max(max(one.memory.starting, one.memory.replica) for one in sweep.measured)
    least = max(one.memory.server + one.memory.files for one in sweep.measured) + point.replicas * largest
    if least <= SAFE_PART * capacity:
        return ""
    return f"not tried: it takes {size_text(round(least))} at least, and the machine has {size_text(capacity)}"


Progress = Callable[[str], None]


@dataclass
class Plan:
    """All that came of it so far."""

    subject: Subject
    budget: Budget
    capacity: int | None
    """Bytes of memory that the machine has."""
    weights: Weights
    sweep: Sweep = field(default_factory=Sweep)
    predictor: Predictor | None = None
    held_out: float | None = None
    """The largest error of a size's memory as all others predict it."""
    trials: list[Trial] = field(default_factory=list)
    recommendations: list[Recommendation] = field(default_factory=list)
    ended: str = ""
    """Why it is not complete; empty: it is."""


class Planner:
    """Makes a plan.

    Args:
        plan: empty; gets all that is found, as it is found.
        config: that the deployment is from.
        out: where the profiles' files go.
        stem: what their names begin with.
        progress: gets a line for each thing that is done.
    """

    def __init__(self, plan: Plan, config: Config, out: Path, stem: str, progress: Progress) -> None:
        self._plan = plan
        self._config = config
        self._out = out
        self._stem = stem
        self._progress = progress

    def run(self, points: Sequence[Point], *, checks: bool, rounds: int) -> None:
        """Do all of it; Ctrl-C ends it with what there is.

        Args:
            points: that are measured, the smallest first.
            checks: whether to run sizes that were not measured, to compare.
            rounds: how often to run each profile; 0: not at all.
        """
        plan, subject = self._plan, self._plan.subject
        run_sweep(plan.sweep, points, self._measure, plan.capacity, self._tell)
        if not plan.sweep.ended:
            measure_outliers_again(plan.sweep, self._measure, self._tell)
        plan.ended = plan.sweep.ended
        measured = plan.sweep.measured
        if not measured:
            return
        plan.predictor = fit(measured, subject.connections, subject.filled_cache, subject.largest_cache)
        on_device = measured[0].device_name.startswith("cuda")
        plan.held_out = held_out_error(measured, subject.filled_cache, on_device=on_device)
        self._recommend()
        if plan.ended:
            return
        try:
            if checks:
                self._check([one.point for one in measured])
            self._verify(rounds)
            self._settle()
        except KeyboardInterrupt:
            plan.ended = "stopped by hand"

    def _measure(self, point: Point) -> Measured:
        return measure_point(self._plan.subject, point)

    def _tell(self, row: Row) -> None:
        told = [] if row.measured is None else [figures(row.measured, self._plan.subject.unit)]
        self._progress(f"{row.point}: {'; '.join(filter(None, (*told, row.note)))}")

    def _recommend(self) -> None:
        plan = self._plan
        assert plan.predictor is not None
        measured = plan.sweep.measured
        profiles = recommend(
            plan.predictor.largest,
            {one.point: one.rate for one in measured},
            plan.budget,
            most=Point(*map(max, zip(*(one.point for one in measured), strict=True))),
            cores=plan.subject.cores,
        )
        trials: dict[Point, Trial] = {}
        for profile in profiles:
            found = Recommendation(profile)
            plan.recommendations.append(found)
            if profile.point is not None:
                predicted = plan.predictor.at(profile.point)
                found.trial = trials.setdefault(profile.point, Trial(profile.point, predicted))
                found.file = self._out / f"{self._stem}-{profile.name}.yaml"
                self._write(found)

    def _check(self, measured: Sequence[Point]) -> None:
        """Predict sizes that did not run, then run them."""
        plan = self._plan
        assert plan.predictor is not None
        limit = Budget(plan.capacity) if plan.capacity is not None else plan.budget
        predictor = plan.predictor
        for point in unseen_points(measured, lambda one: not limit.excess(predictor.largest.most(one))):
            trial = Trial(point, predictor.at(point))
            plan.trials.append(trial)
            self._try(trial, f"check {point}", functools.partial(self._measure, point))

    def _verify(self, rounds: int) -> None:
        """Run each profile's file, all of them once, then all of them again: what else the machine does harms all."""
        subject = self._plan.subject
        by_size: dict[Point, list[Recommendation]] = {}
        for one in self._plan.recommendations:
            if one.profile.point is not None:
                by_size.setdefault(one.profile.point, []).append(one)
        for number in range(1, rounds + 1):
            for point, same in by_size.items():
                trial = same[0].trial
                assert trial is not None
                if trial.error:
                    continue
                names = " and ".join(one.profile.name for one in same)
                measure = functools.partial(measure_server_under_load, subject, point, str(same[0].file), {})
                self._try(trial, f"{names}, round {number} of {rounds}", measure)
                for one in same:
                    self._write(one)

    def _settle(self) -> None:
        """Give ``throughput`` the size of another profile that was faster when both were run."""
        plan = self._plan
        rates = {one.profile.name: one.trial.measured.rate for one in plan.recommendations
                 if one.trial is not None and one.trial.measured is not None}  # fmt: skip
        if "throughput" not in rates:
            return
        name = max(rates, key=lambda name: rates[name])
        if rates[name] <= WORTH * rates["throughput"]:
            return
        found = {one.profile.name: one for one in plan.recommendations}
        one, faster = found["throughput"], found[name]
        assert one.trial is not None
        note = (
            f"as {name}: {one.trial.point} was to be faster, but gave {rates['throughput']:.4g} {plan.subject.unit}, "
            f"and {faster.profile.point} {rates[name]:.4g}"
        )
        plan.trials.append(one.trial)
        one.profile, one.trial = replace(faster.profile, name="throughput", note=note), faster.trial
        self._write(one)

    def _try(self, trial: Trial, title: str, measure: Callable[[], Measured]) -> None:
        try:
            trial.rounds.append(measure())
            told = figures(trial.rounds[-1], self._plan.subject.unit)
        except CommandError as error:
            told = trial.error = str(error)
        except KeyboardInterrupt:
            if not trial.rounds:
                trial.error = "stopped by hand"
            raise
        self._progress(f"{title}: {told}")

    def _write(self, one: Recommendation) -> None:
        assert one.trial is not None
        subject = self._plan.subject
        section = section_of(subject.deployment, one.trial.point, subject.cores)
        lines = profile_comments(one, subject, served_at(self._config))
        write_file("--out", one.file, profile_yaml(self._config, subject.name, section, lines))
