"""A whole plan: sizes are measured, models fitted, profiles chosen, and each of those run as it is recommended."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.config import Config
from app.errors import CommandError
from app.memory_budget import size_text
from app.plan.accuracy import Comparison, held_out_error, unseen_points
from app.plan.measuring import Measured, measure_point, measure_server_under_load
from app.plan.point import Point, section_of, takes_instances
from app.plan.prediction import Prediction, Predictor, fit
from app.plan.profile_yaml import profile_yaml
from app.plan.profiles import PROFILES, Budget, Profile, recommend
from app.plan.subject import Subject
from app.plan.sweep import Row, Sweep, run_sweep
from app.plan.weights import Weights

__all__ = ["Plan", "Planner", "Recommendation", "Trial"]

Progress = Callable[[str], None]


@dataclass
class Trial:
    """A size that was predicted first and then run."""

    point: Point
    predicted: Prediction
    measured: Measured | None = None
    error: str = ""
    """Why it could not be run."""

    @property
    def comparisons(self) -> list[Comparison]:
        """What was predicted beside what was measured."""
        if self.measured is None:
            return []
        found = [Comparison("host memory", self.predicted.need.host, self.measured.host)]
        if self.measured.device:
            found.append(Comparison("device memory", self.predicted.need.device, self.measured.device))
        return [*found, Comparison("rate", self.predicted.rate, self.measured.rate)]


@dataclass
class Recommendation:
    """A profile, its file, and what came of running that."""

    profile: Profile
    trial: Trial | None = None
    """None: the profile is left out."""
    file: Path | None = None


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

    def run(self, points: Sequence[Point], *, checks: bool, verifies: bool) -> None:
        """Do all of it; Ctrl-C ends it with what there is.

        Args:
            points: that are measured, the smallest first.
            checks: whether to run sizes that were not measured, to compare.
            verifies: whether to run the profiles.
        """
        plan, subject = self._plan, self._plan.subject
        run_sweep(plan.sweep, points, self._measure, plan.capacity, self._tell)
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
            if verifies:
                self._verify()
        except KeyboardInterrupt:
            plan.ended = "stopped by hand"

    def _measure(self, point: Point) -> Measured:
        return measure_point(self._plan.subject, point)

    def _tell(self, row: Row) -> None:
        told = row.error if row.measured is None else _told(row.measured, self._plan.subject.unit)
        self._progress(f"{row.point}: {told}")

    def _recommend(self) -> None:
        plan = self._plan
        assert plan.predictor is not None
        measured = plan.sweep.measured
        profiles = recommend(
            plan.predictor.largest,
            plan.predictor.speed.rows_per_s,
            plan.budget,
            rows=[one.point.rows for one in measured],
            instances=[one.point.instances for one in measured] if takes_instances(plan.subject.deployment) else [1],
            cores=plan.subject.cores,
        )
        for profile in profiles:
            found = Recommendation(profile)
            plan.recommendations.append(found)
            if profile.point is not None:
                found.trial = Trial(profile.point, plan.predictor.at(profile.point))
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

    def _verify(self) -> None:
        """Run each profile's file."""
        subject = self._plan.subject
        for one in self._plan.recommendations:
            if one.trial is not None and one.file is not None:
                measure = functools.partial(measure_server_under_load, subject, one.trial.point, str(one.file), {})
                self._try(one.trial, one.profile.name, measure)
                self._write(one)

    def _try(self, trial: Trial, title: str, measure: Callable[[], Measured]) -> None:
        try:
            trial.measured = measure()
        except CommandError as error:
            trial.error = str(error)
        except KeyboardInterrupt:
            trial.error = "stopped by hand"
            raise
        told = trial.error
        if trial.measured is not None:
            told = _told(trial.measured, self._plan.subject.unit)
        self._progress(f"{title}: {told}")

    def _write(self, one: Recommendation) -> None:
        assert one.trial is not None
        assert one.file is not None
        subject = self._plan.subject
        section = section_of(subject.deployment, one.trial.point, subject.cores)
        lines = _comments(one, subject)
        try:
            one.file.parent.mkdir(parents=True, exist_ok=True)
            one.file.write_text(profile_yaml(self._config, subject.name, section, lines), encoding="utf-8")
        except OSError as error:
            raise CommandError(f"--out: {one.file} can't be written: {error.strerror}") from error


def _told(one: Measured, unit: str) -> str:
    device = f" and {size_text(one.device)} of the GPU's" if one.device else ""
    return f"{size_text(one.host)}{device}, {one.rate:.4g} {unit}, p50 {one.p50_ms:.1f} ms, p99 {one.p99_ms:.1f} ms"


def _comments(one: Recommendation, subject: Subject) -> list[str]:
    """What stands on top of a profile's file."""
    trial = one.trial
    assert trial is not None
    predicted = trial.predicted
    device = f", {size_text(predicted.need.device)} of the GPU's" if predicted.need.device else ""
    lines = [
        f"{one.profile.name}: {PROFILES[one.profile.name]}. Made by `headwater plan` from {subject.what}.",
        *([one.profile.note] if one.profile.note else []),
        f"Predicted: {size_text(predicted.need.host)} of memory{device}, {predicted.rate:.4g} {subject.unit}, "
        f"p50 {predicted.p50_ms:.1f} ms, p99 {predicted.p99_ms:.1f} ms.",
    ]
    if trial.measured is not None:
        lines.append(f"Measured:  {_told(trial.measured, subject.unit)}.")
        lines.append(f"Load: {trial.measured.connections} connections, a row each, for {subject.seconds:g} s.")
    else:
        lines.append(f"Measured:  not run{f', {trial.error}' if trial.error else ''}.")
    return [line.replace("\n", " ") for line in lines]
