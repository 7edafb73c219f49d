"""A plan as text for a terminal, and which sizes fit."""

from __future__ import annotations

from typing import NamedTuple

from app.cli.plan.measuring import Measured
from app.cli.plan.planning import Plan
from app.cli.plan.point import Point, grid
from app.cli.plan.prediction import MEMORY_TOLERANCE, RATE_TOLERANCE, Comparison, Prediction
from app.cli.plan.trial import Trial, spread_text
from app.cli.report.columns import columns
from app.process.machine import size_text

__all__ = ["SizeRow", "is_off", "is_unsteady", "model_lines", "plan_text", "size_rows", "smallest_need"]


class SizeRow(NamedTuple):
    """One size."""

    point: Point
    predicted: Prediction
    excess: str
    """Why it doesn't fit; empty: it does."""
    was_measured: bool


def size_rows(plan: Plan) -> list[SizeRow]:
    """Sizes up to the largest that was measured, the small ones first."""
    assert plan.predictor is not None
    measured = {one.point for one in plan.sweep.measured}
    replicas = max(point.replicas for point in measured)
    points = grid([point.rows for point in measured], [point.instances for point in measured], range(1, replicas + 1))
    found = []
    for point in points:
        predicted = plan.predictor.at(point)
        found.append(SizeRow(point, predicted, plan.budget.excess(predicted.most), point in measured))
    return found


def smallest_need(plan: Plan) -> str:
    """Why not even the smallest size fits; empty: it does."""
    assert plan.predictor is not None
    return plan.budget.excess(plan.predictor.largest.most(Point(1)))


def plan_text(plan: Plan) -> str:
    """All that was found."""
    lines = _sweep_lines(plan)
    if plan.predictor is None:
        return "\n".join(lines)
    lines += ["", *model_lines(plan), "", *_size_lines(plan), ""]
    if excess := smallest_need(plan):
        lines += [f"Nothing fits: one replica with batches of one row {excess}.", ""]
    lines += _profile_lines(plan)
    trials = [("check", trial) for trial in plan.trials]
    trials += [(one.profile.name, one.trial) for one in plan.recommendations if one.trial is not None]
    lines += _trial_lines(trials)
    return "\n".join(lines).rstrip()


def is_off(one: Comparison) -> bool:
    """Whether a prediction is further from what was measured than it should be."""
    return abs(one.error) > (RATE_TOLERANCE if one.what == "rate" else MEMORY_TOLERANCE)


def is_unsteady(one: Measured) -> bool:
    """Whether its rounds are further apart than what is stated may be off."""
    return one.spread > RATE_TOLERANCE


def _sweep_lines(plan: Plan) -> list[str]:
    unit = plan.subject.unit.upper()
    rows = [("BATCH", "INSTANCES", "REPLICAS", "MEMORY", "GPU", unit, "P50 MS", "P99 MS", "ROWS/CALL", "NOTE")]
    for row in plan.sweep.rows:
        size = (str(row.point.rows), str(row.point.instances), str(row.point.replicas))
        one = row.measured
        if one is None:
            rows.append((*size, "-", "-", "-", "-", "-", "-", row.note))
            continue
        mean = "-" if one.mean_rows != one.mean_rows else f"{one.mean_rows:.1f}"
        rows.append((
            *size, size_text(one.host), size_text(one.device) if one.device else "-", f"{one.rate:.4g}",
            f"{one.p50_ms:.1f}", f"{one.p99_ms:.1f}", mean, row.note,
        ))  # fmt: skip
    return ["Measured:", columns(rows)]


def model_lines(plan: Plan) -> list[str]:
    """The model of memory, with its errors."""
    assert plan.predictor is not None
    model = plan.predictor.memory
    parts = [
        ("supervisor and gateway", model.server, "once"),
        ("libraries and other files", model.files, "once"),
        ("replica, weights among it", model.host.fixed, "each replica"),
        ("another instance", model.host.instance, "each beyond the first, of each replica"),
        ("row of a batch", model.host.row, "times instances, of each replica"),
    ]
    if plan.predictor.memory.caches_on_device:
        parts += [
            ("GPU: replica", model.device.fixed, "each replica"),
            ("GPU: another instance", model.device.instance, "each beyond the first, of each replica"),
            ("GPU: row of a batch", model.device.row, "times instances, of each replica"),
        ]
    rows = [("MEMORY OF", "SIZE", "COUNTS")]
    rows += [(name, f"{size / 2**20:.1f} MiB", counts) for name, size, counts in parts]
    if plan.subject.cache is not None:
        token = plan.subject.cache.token_bytes
        full = size_text(plan.subject.largest_cache(1))
        rows.append(("key/value cache, computed", f"{token / 1024:.1f} KiB", f"each token; {full} a full sequence"))
    lines = ["Fitted:", columns(rows)]
    weights = plan.weights
    told = weights.how if weights.bytes is None else f"{size_text(weights.bytes)} ({weights.how})"
    lines.append(f"Weights of one replica: {told}")
    worst = max(abs(model.at(one.point).host / one.host - 1) for one in plan.sweep.measured)
    lines.append(f"Largest error of the fit: {worst:.1%}")
    if plan.held_out is not None:
        lines.append(f"Largest error for a size that was left out of the fit: {plan.held_out:.1%}")
    return lines


def _size_lines(plan: Plan) -> list[str]:
    head = ("BATCH", "INSTANCES", "REPLICAS", "MEMORY", "GPU", plan.subject.unit.upper(), "FITS", "")
    rows = [head]
    for row in size_rows(plan):
        most = row.predicted.most
        rows.append((
            str(row.point.rows), str(row.point.instances), str(row.point.replicas), size_text(most.host),
            size_text(most.device) if most.device else "-", f"{row.predicted.rate:.4g}", "no" if row.excess else "yes",
            "measured" if row.was_measured else "predicted only",
        ))  # fmt: skip
    budget = plan.budget
    device = "" if budget.device is None else f", and {size_text(budget.device)} of the GPU's"
    full = ", with full caches" if plan.subject.cache is not None else ""
    return [f"Predicted, with {size_text(budget.host)} of memory to take{device}{full}:", columns(rows)]


def _profile_lines(plan: Plan) -> list[str]:
    rows = [("PROFILE", "BATCH", "INSTANCES", "REPLICAS", "FILE", "NOTE")]
    for one in plan.recommendations:
        point = one.profile.point
        size = ("-", "-", "-") if point is None else (str(point.rows), str(point.instances), str(point.replicas))
        rows.append((one.profile.name, *size, "-" if one.file is None else str(one.file), one.profile.note))
    return ["Recommended:", columns(rows), ""]


def _trial_lines(trials: list[tuple[str, Trial]]) -> list[str]:
    rows = [("RUN", "SIZE", "FIGURE", "PREDICTED", "MEASURED", "ERROR", "ROUNDS", "")]
    for name, trial in trials:
        size = str(trial.point)
        for one in trial.comparisons:
            shown = (f"{one.predicted:.4g}", f"{one.measured:.4g}")
            rounds, notes = "", ["too far off"] if is_off(one) else []
            if one.what != "rate":
                shown = (size_text(round(one.predicted)), size_text(round(one.measured)))
            elif (measured := trial.measured) is not None:
                rounds = spread_text(measured)
                notes += ["rounds differ: not a quiet machine"] if is_unsteady(measured) else []
            rows.append((name, size, one.what, *shown, f"{one.error:+.1%}", rounds, ", ".join(notes)))
        if trial.error:
            rows.append((name, size, "-", "-", "-", "-", "", trial.error))
    return ["Predicted, then run (batch × instances × replicas):", columns(rows)] if len(rows) > 1 else []
