"""Three profiles, ways to run a deployment: chosen by rule and scaled down until they fit, or left out with the reason.
Writes them as configurations."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from headwater_server.cli.plan.memory_model import MemoryModel, Need
from headwater_server.cli.plan.point import Point, section_of
from headwater_server.cli.plan.subject import Subject
from headwater_server.cli.plan.trial import Trial
from headwater_server.config.schema import Config
from headwater_server.process.machine import size_text

__all__ = ["PROFILES", "WORTH", "Budget", "Profile", "profile_comments", "profile_yaml", "recommend", "served_at"]

PROFILES: Final = {
    "memory-lean": "small batches, in several replicas where these are allowed",
    "throughput": "the size with the highest measured rate",
    "balanced": "small batches, in two replicas where these are allowed, with a few instances each",
}
"""The profiles' descriptions, by name."""
SMALL_ROWS: Final = (8, 4)
"""Batch sizes that ``memory-lean`` may have, the preferred size first."""
BALANCED_ROWS: Final = (4, 2, 1)
"""Batch sizes that ``balanced`` may have, the preferred size first."""
MOST_REPLICAS: Final = 8
"""Maximum number of replicas of ``memory-lean``."""
WORTH: Final = 1.03
"""Ratio of two rates from which the higher rate counts as faster. Below it, the size that takes less memory is
preferred."""
LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""For addresses that mean all interfaces, the address that reaches the server from the same machine."""


@dataclass(frozen=True)
class Budget:
    """Bytes of memory that may be taken, without the headroom that is kept free."""

    host: int
    """Bytes of the machine's memory."""
    device: int | None = None
    """Bytes of GPU memory; None if no GPU is used."""

    def excess(self, need: Need) -> str:
        """Why a need doesn't fit; empty if it fits."""
        for place, needed, limit in (
            ("the machine's memory", need.host, self.host), ("the device's memory", need.device, self.device),
        ):  # fmt: skip
            if limit is not None and needed > limit:
                return f"needs {size_text(needed)} of {place}, {size_text(limit)} may be taken"
        return ""


@dataclass
class Profile:
    """A recommended way to run the deployment."""

    name: str
    point: Point | None
    """The size; None if the profile is left out."""
    note: str
    """How the profile was scaled down, or why it has another profile's size or is left out; otherwise empty."""
    trial: Trial | None = None
    """The prediction, and the figures or error from running the file; None without a file."""
    file: Path | None = None
    """The configuration's file; None if the profile is left out, and with ``--from-sizes``."""


def recommend(
    model: MemoryModel, rates: Mapping[Point, float], budget: Budget, *, largest: Point, cores: int
) -> list[Profile]:
    """Choose the three profiles.

    Args:
        model: the model that predicts the memory.
        rates: rows or tokens per second at the measured sizes.
        budget: the memory into which each profile must fit.
        largest: the maximum numbers of rows, instances and replicas.
        cores: number of cores of the machine.
    """
    several = min(max(2, min(cores, MOST_REPLICAS)), largest.replicas)
    lean = [Point(min(size, largest.rows), 1, count) for count in range(several, 0, -1) for size in SMALL_ROWS]
    balanced = [
        Point(min(size, largest.rows), each, count)
        for count in (2, 1)
        if count <= largest.replicas
        for each in (largest.instances, 1)
        for size in BALANCED_ROWS
    ]
    profiles = []
    for name, points in zip(PROFILES, (lean, _by_rate(rates, model), balanced), strict=True):
        reasons = [budget.excess(model.most(point)) for point in points]
        point = next((point for point, reason in zip(points, reasons, strict=True) if not reason), None)
        note = f"scaled down from {points[0]}, which {reasons[0]}" if reasons[0] else ""
        if point is None:
            note = f"left out: even {points[-1]} {reasons[-1]}"
        profiles.append(Profile(name, point, note))
    return profiles


def _by_rate(rates: Mapping[Point, float], model: MemoryModel) -> list[Point]:
    """Sizes, the fastest first. Sizes about as fast as the fastest come first, ordered by memory."""
    min_rate = max(rates.values()) / WORTH

    def place(point: Point) -> tuple[float, ...]:
        need = model.most(point)
        return (0, need.device, need.host) if rates[point] >= min_rate else (1, -rates[point])

    return sorted(rates, key=place)


def profile_comments(profile: Profile, subject: Subject) -> list[str]:
    """The comment lines in a profile's file: the profile's figures, and the commands to measure it again."""
    trial = profile.trial
    assert trial is not None
    assert trial.predicted is not None
    predicted, measured = trial.predicted, trial.measured
    device = f", {size_text(predicted.need.device)} of GPU memory" if predicted.need.device else ""
    lines = [
        f"{profile.name}: {PROFILES[profile.name]}. Made by `headwater plan` from {subject.what}.",
        *filter(None, [profile.note]),
        f"Predicted: {size_text(predicted.need.host)} of memory{device}, {predicted.rate:.4g} {subject.unit}, "
        f"p50 {predicted.p50_ms:.1f} ms, p99 {predicted.p99_ms:.1f} ms.",
    ]
    if trial.rounds and trial.error:
        lines.append(f"Measured:  no figure, since round {len(trial.rounds) + 1} failed: {trial.error}.")
    elif measured is None:
        lines.append(f"Measured:  {', '.join(filter(None, ('not run', trial.error)))}.")
    else:
        lines.append(f"Measured:  {measured.text(subject.unit)}.")
        if measured.rates:
            lines.append(f"Medians of {len(measured.rates)} rounds: {measured.spread_text} {subject.unit}.")
        if measured.is_unsteady:
            lines.append("The rounds differ that much: the machine was busy with something else. Plan again.")
    again = ["headwater", "bench", *subject.bench_arguments(served_at(subject.config), trial.point)]
    lines += ["To measure it again, serve this file and run", f"  {shlex.join(again)}"]
    return [line.replace("\n", " ") for line in lines]


def served_at(config: Config) -> str:
    """The URL at which a server of this configuration is reached from the same machine."""
    server = config.server
    host = LOOPBACK.get(server.host, server.host)
    scheme = "http" if server.tls is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


def profile_yaml(subject: Subject, point: Point, comments: Sequence[str]) -> str:
    """A configuration with only this deployment, at this size, below comment lines."""
    content: dict[str, Any] = {}
    for part in ("server", "security"):
        section = getattr(subject.config, part).model_dump(mode="json", exclude_unset=True)
        if section:
            content[part] = section
    content["deployments"] = {subject.name: section_of(subject.deployment, point, subject.cores)}
    head = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    return head + str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))
