"""Makes a whole plan: measures sizes, fits the models, chooses profiles, and runs each profile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headwater_server.cli.bench.closed_loop import STOPPED
from headwater_server.cli.option_values import write_file
from headwater_server.cli.plan.measuring import Measured, Weights, measure_point, measure_server_under_load
from headwater_server.cli.plan.point import Point, grid
from headwater_server.cli.plan.prediction import Prediction, Predictor, fit, held_out_error, unseen_points
from headwater_server.cli.plan.profiles import WORTH, Budget, Profile, profile_comments, profile_yaml, recommend
from headwater_server.cli.plan.size_sweep import measure_outliers_again, measured_of, run_sweep
from headwater_server.cli.plan.subject import Subject
from headwater_server.cli.plan.trial import Trial
from headwater_server.errors import CommandError

__all__ = ["Plan", "SizeRow"]


class SizeRow(NamedTuple):
    """A size with its prediction, and whether it fits."""

    point: Point
    predicted: Prediction
    excess: str
    """Why the size doesn't fit; empty if it fits."""
    was_measured: bool


@dataclass
class Plan:
    """A plan, with its results so far.

    Args:
        subject: the deployment to plan for.
        budget: the memory that may be taken.
        capacity: bytes of the machine's memory; None: unknown.
        weights: the weights of one replica.
        files: the common beginning of the paths of the profiles' files.
        progress: called with a line of text after each step.
    """

    subject: Subject
    budget: Budget
    capacity: int | None
    weights: Weights
    files: Path
    progress: Callable[[str], None]
    sweep: list[Trial] = field(default_factory=list)
    """The sizes that the models are fitted to."""
    predictor: Predictor | None = None
    """The fitted models; None if no size was measured yet."""
    held_out: float | None = None
    """The largest error of the predicted memory of a size that was left out of the fit; see `held_out_error`."""
    checks: list[Trial] = field(default_factory=list)
    """The sizes, other than the profiles' sizes, that were predicted first and then run."""
    profiles: list[Profile] = field(default_factory=list)
    ended: str = ""
    """Why the plan was ended before it was complete; otherwise empty."""

    def run(self, points: Sequence[Point], *, checks: bool, rounds: int) -> None:
        """Make the plan. Ctrl-C, or a smallest size that can't be measured, ends it with the results so far; see
        `ended`.

        Args:
            points: the sizes to measure, the smallest first.
            checks: whether to run sizes that were not measured, to compare them with their predictions.
            rounds: how often to run each profile; may be 0.

        Raises:
            CommandError: a profile's file can't be written.
        """
        with self._ending():
            run_sweep(self.sweep, points, self._measure, self.capacity, self._report)
            measure_outliers_again(self.sweep, self._measure, self._report)
        measured = self.measured
        if not measured:
            return
        self.predictor = fit(measured, self.subject)
        self.held_out = held_out_error(measured, self.subject.filled_cache)
        self._recommend(self.predictor)
        if self.ended:
            return
        with self._ending():
            if checks:
                self._check(self.predictor)
            for number in range(1, rounds + 1):
                self._verify(f"round {number} of {rounds}")
            self._settle()

    @property
    def measured(self) -> list[Measured]:
        """The figures of the sweep."""
        return measured_of(self.sweep)

    def size_rows(self) -> list[SizeRow]:
        """Predictions for the measured numbers of rows and instances, with 1 to the largest measured number of
        replicas, the smallest size first; empty if no size was measured."""
        if self.predictor is None:
            return []
        measured = {measurement.point for measurement in self.measured}
        rows, instances, replicas = zip(*measured, strict=True)
        sizes = []
        for point in grid(rows, instances, range(1, max(replicas) + 1)):
            predicted = self.predictor.at(point)
            sizes.append(SizeRow(point, predicted, self.budget.excess(predicted.most), point in measured))
        return sizes

    def smallest_excess(self) -> str:
        """Why not even the smallest size fits; empty if it fits, or if nothing was measured."""
        return "" if self.predictor is None else self.budget.excess(self.predictor.largest.most(Point(1)))

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.ended = STOPPED
        except CommandError as error:
            self.ended = str(error)

    def _measure(self, point: Point) -> Measured:
        return measure_point(self.subject, point)

    def _report(self, trial: Trial) -> None:
        figures = "" if trial.measured is None else trial.measured.text(self.subject.unit)
        self.progress(f"{trial.point}: {'; '.join(filter(None, (figures, trial.note)))}")

    def _recommend(self, predictor: Predictor) -> None:
        rates = {measurement.point: measurement.rate for measurement in self.measured}
        largest = Point(*map(max, zip(*rates, strict=True)))
        self.profiles = recommend(predictor.largest, rates, self.budget, largest=largest, cores=self.subject.cores)
        trials: dict[Point, Trial] = {}
        for profile in self.profiles:
            if profile.point is not None:
                profile.trial = trials.setdefault(profile.point, Trial(profile.point, predictor.at(profile.point)))
                profile.file = self.files.with_name(f"{self.files.name}-{profile.name}.yaml")
                self._write(profile)

    def _check(self, predictor: Predictor) -> None:
        """Predict the figures of sizes that were not measured, and then run these sizes."""
        limit = Budget(self.capacity) if self.capacity is not None else self.budget
        measured = [measurement.point for measurement in self.measured]
        for point in unseen_points(measured, lambda size: not limit.excess(predictor.largest.most(size))):
            self.checks.append(Trial(point, predictor.at(point)))
            self._run(self.checks[-1], f"check {point}", functools.partial(self._measure, point))

    def _verify(self, which: str) -> None:
        """Run the file of each profile once; profiles of the same size share a run."""
        by_point: dict[Point, list[Profile]] = {}
        for profile in self.profiles:
            if profile.point is not None:
                by_point.setdefault(profile.point, []).append(profile)
        for point, same in by_point.items():
            trial = same[0].trial
            assert trial is not None
            if trial.error:
                continue
            names = " and ".join(profile.name for profile in same)
            measure = functools.partial(measure_server_under_load, self.subject, point, str(same[0].file), {})
            self._run(trial, f"{names}, {which}", measure)
            for profile in same:
                self._write(profile)

    def _run(self, trial: Trial, title: str, measure: Callable[[], Measured]) -> None:
        trial.run(measure)
        self.progress(f"{title}: {trial.error or trial.rounds[-1].text(self.subject.unit)}")

    def _settle(self) -> None:
        """If another profile was faster than ``throughput`` when both were run, give its size to ``throughput``."""
        profiles = {profile.name: profile for profile in self.profiles}
        rates = {
            name: profile.trial.measured.rate
            for name, profile in profiles.items()
            if profile.trial and profile.trial.measured
        }
        if "throughput" not in rates:
            return
        name = max(rates, key=lambda name: rates[name])
        if rates[name] <= WORTH * rates["throughput"]:
            return
        throughput, faster = profiles["throughput"], profiles[name]
        assert throughput.trial is not None
        throughput.note = (
            f"as {name}: {throughput.point} was expected to be faster, but gave {rates['throughput']:.4g} "
            f"{self.subject.unit}, and {faster.point} {rates[name]:.4g}"
        )
        self.checks.append(throughput.trial)
        throughput.point, throughput.trial = faster.point, faster.trial
        self._write(throughput)

    def _write(self, profile: Profile) -> None:
        assert profile.point is not None
        comments = profile_comments(profile, self.subject)
        write_file("--out", profile.file, profile_yaml(self.subject, profile.point, comments))
