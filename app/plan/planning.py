"""A whole plan: sizes are measured, models fitted, profiles chosen, and each of those run as it is recommended."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.config import Config
from app.errors import CommandError
from app.plan.accuracy import held_out_error, unseen_points
from app.plan.measuring import Measured, measure_point, measure_server_under_load
from app.plan.point import Point, section_of
from app.plan.prediction import Predictor, fit
from app.plan.profile_comments import figures, profile_comments
from app.plan.profile_yaml import profile_yaml, served_at
from app.plan.profiles import WORTH, Budget, recommend
from app.plan.subject import Subject
from app.plan.sweep import Row, Sweep, measure_outliers_again, run_sweep
from app.plan.trial import Recommendation, Trial
from app.plan.weights import Weights
from app.reports.options import write_file

__all__ = ["Plan", "Planner"]

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
