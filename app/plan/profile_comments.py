"""What stands on top of a profile's file: its figures, and how to get them again."""

from __future__ import annotations

import shlex

from app.plan.accuracy import RATE_TOLERANCE
from app.plan.measuring import Measured
from app.plan.profiles import PROFILES
from app.plan.subject import Subject
from app.plan.trial import Recommendation
from app.process.machine import size_text

__all__ = ["figures", "profile_comments", "spread_text"]


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
