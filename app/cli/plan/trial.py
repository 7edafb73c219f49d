"""Sizes that are predicted and then run, and the profile files that recommend them."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from app.cli.plan.measuring import Measured
from app.cli.plan.point import Point
from app.cli.plan.prediction import RATE_TOLERANCE, Comparison, Prediction
from app.cli.plan.profiles import PROFILES, Profile
from app.cli.plan.subject import Subject
from app.config.schema import Config
from app.process.machine import size_text

__all__ = [
    "Recommendation",
    "Trial",
    "combined",
    "figures",
    "profile_comments",
    "profile_yaml",
    "served_at",
    "spread_text",
]


@dataclass
class Trial:
    """A size that was predicted first and then run."""

    point: Point
    predicted: Prediction
    rounds: list[Measured] = field(default_factory=list)
    """What each round gave, as far as they went well."""
    error: str = ""
    """Why it could not be run, or not to the end."""

    @property
    def measured(self) -> Measured | None:
        """All rounds as one; None: it was not run, or one of them failed."""
        return combined(self.rounds) if self.rounds and not self.error else None

    @property
    def comparisons(self) -> list[Comparison]:
        """What was predicted beside what was measured."""
        measured = self.measured
        if measured is None:
            return []
        found = [Comparison("host memory", self.predicted.need.host, measured.host)]
        if measured.device:
            found.append(Comparison("device memory", self.predicted.need.device, measured.device))
        return [*found, Comparison("rate", self.predicted.rate, measured.rate)]


@dataclass
class Recommendation:
    """A profile, its file, and what came of running that."""

    profile: Profile
    trial: Trial | None = None
    """None: the profile is left out."""
    file: Path | None = None


def combined(rounds: Sequence[Measured]) -> Measured:
    """Several rounds at one size as one: the most of the memory, the medians of the rest, and all rates.

    Args:
        rounds: at least one.
    """
    if len(rounds) == 1:
        return rounds[0]
    largest = max(rounds, key=lambda one: one.host)
    return replace(
        largest,
        device=max(one.device for one in rounds),
        rate=statistics.median(one.rate for one in rounds),
        p50_ms=statistics.median(one.p50_ms for one in rounds),
        p99_ms=statistics.median(one.p99_ms for one in rounds),
        mean_rows=statistics.median(one.mean_rows for one in rounds),
        load_share=max(one.load_share for one in rounds),
        rates=tuple(one.rate for one in rounds),
    )


def figures(one: Measured, unit: str) -> str:
    """What was measured, in a line."""
    device = f" and {size_text(one.device)} of the GPU's" if one.device else ""
    return f"{size_text(one.host)}{device}, {one.rate:.4g} {unit}, p50 {one.p50_ms:.1f} ms, p99 {one.p99_ms:.1f} ms"


def spread_text(one: Measured) -> str:
    """From which rate to which the rounds go, and how far that is; empty: there was one only."""
    return f"{min(one.rates):.4g} to {max(one.rates):.4g} ({one.spread:.0%})" if one.rates else ""


def profile_comments(one: Recommendation, subject: Subject, url: str) -> list[str]:
    """The lines.

    Args:
        one: its profile is not left out.
        subject: what was planned for.
        url: where its server will be.
    """
    trial = one.trial
    assert trial is not None
    predicted, measured = trial.predicted, trial.measured
    device = f", {size_text(predicted.need.device)} of the GPU's" if predicted.need.device else ""
    lines = [
        f"{one.profile.name}: {PROFILES[one.profile.name]}. Made by `headwater plan` from {subject.what}.",
        *([one.profile.note] if one.profile.note else []),
        f"Predicted: {size_text(predicted.need.host)} of memory{device}, {predicted.rate:.4g} {subject.unit}, "
        f"p50 {predicted.p50_ms:.1f} ms, p99 {predicted.p99_ms:.1f} ms.",
    ]
    if trial.rounds and trial.error:
        lines.append(f"Measured:  no figure, since round {len(trial.rounds) + 1} failed: {trial.error}.")
    elif measured is None:
        lines.append(f"Measured:  not run{f', {trial.error}' if trial.error else ''}.")
    else:
        lines.append(f"Measured:  {figures(measured, subject.unit)}.")
    if measured is not None and measured.rates:
        lines.append(f"Medians of {len(measured.rates)} rounds: {spread_text(measured)} {subject.unit}.")
        if measured.spread > RATE_TOLERANCE:
            lines.append("The rounds differ that much: the machine was busy with something else. Plan again.")
    again = ["headwater", "bench", *subject.bench_arguments(url, trial.point)]
    lines += ["To measure it again, serve this file and run", f"  {shlex.join(again)}"]
    return [line.replace("\n", " ") for line in lines]


ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses of all interfaces, and one of them that can be asked."""


def served_at(config: Config) -> str:
    """The URL at which a server of this configuration can be asked on its own machine."""
    server = config.server
    host = ANY.get(server.host, server.host)
    scheme = "http" if server.tls is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


def profile_yaml(config: Config, name: str, section: dict[str, Any], comments: Sequence[str]) -> str:
    """The file's text.

    Args:
        config: the one that was planned for; its other deployments are left out.
        name: the deployment.
        section: its section at the profile's size.
        comments: lines of text that stand on top.
    """
    content: dict[str, Any] = {}
    for part in ("server", "security"):
        given = getattr(config, part).model_dump(mode="json", exclude_unset=True)
        if given:
            content[part] = given
    content["deployments"] = {name: section}
    head = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    body: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    return head + body
