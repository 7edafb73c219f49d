"""A plan as one HTML page with curves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from app.cli.plan.planning import Plan
from app.cli.plan.point import Point
from app.cli.plan.text import is_off, is_unsteady, size_rows
from app.cli.plan.trial import spread_text
from app.cli.report.page import Figure, Paragraph, Part, Section, Table, Warn, render_page
from app.cli.report.plots import Curve, line_chart
from app.process.machine import size_text

__all__ = ["plan_page"]

MIB: Final = 2**20


def plan_page(plan: Plan) -> str:
    """The page's HTML."""
    lead = (
        f"{plan.subject.name} of {plan.subject.what}, on {plan.subject.cores} cores; "
        f"{size_text(plan.budget.host)} of memory to take."
    )
    sections = []
    if plan.ended:
        sections.append(Section("Not complete", [Warn(plan.ended)]))
    if plan.predictor is not None:
        sections += [_recommended(plan), _curves(plan), _model(plan), _sizes(plan)]
    sections.append(_measured(plan))
    return render_page(f"Plan for {plan.subject.name}", lead, sections)


def _recommended(plan: Plan) -> Section:
    rows: list[list[str | int | float]] = []
    flagged = []
    for one in plan.recommendations:
        if one.trial is None:
            rows.append([one.profile.name, "-", "-", "-", "-", "-", "-", one.profile.note])
            continue
        for comparison in one.trial.comparisons:
            is_rate = comparison.what == "rate"
            measured = one.trial.measured
            if is_off(comparison) or (is_rate and measured is not None and is_unsteady(measured)):
                flagged.append(len(rows))
            rounds = spread_text(measured) if is_rate and measured is not None else ""
            shown = [f"{value:.4g}" if is_rate else size_text(round(value))
                     for value in (comparison.predicted, comparison.measured)]  # fmt: skip
            rows.append([one.profile.name, str(one.trial.point), comparison.what, *shown, f"{comparison.error:+.1%}",
                         rounds, one.profile.note])  # fmt: skip
        if not one.trial.comparisons:
            predicted = one.trial.predicted
            told = size_text(predicted.need.host)
            note = one.trial.error or one.profile.note
            rows.append([one.profile.name, str(one.trial.point), "host memory", told, "-", "-", "-", note])
    head = ["profile", "batch × instances × replicas", "figure", "predicted", "measured", "error", "rounds", "note"]
    return Section("Recommended", [Table(head, rows, flagged=frozenset(flagged))])


def _curves(plan: Plan) -> Section:
    predictor = plan.predictor
    assert predictor is not None
    figures: list[Part] = [
        Paragraph("Points were measured; dashed lines are the models, beyond the points predictions."),
        _figure(
            plan, "Memory", "MiB", lambda point: predictor.memory.at(point).host / MIB,
            {one.point: one.host / MIB for one in plan.sweep.measured},
        ),
        _figure(
            plan, "Throughput", plan.subject.unit, predictor.speed.rows_per_s,
            {one.point: one.rate for one in plan.sweep.measured},
        ),
        _figure(
            plan, "Median latency", "ms", lambda point: predictor.at(point).p50_ms,
            {one.point: one.p50_ms for one in plan.sweep.measured},
        ),
    ]  # fmt: skip
    return Section("Curves", figures)


def _figure(
    plan: Plan, title: str, unit: str, predicted: Callable[[Point], float], measured: dict[Point, float]
) -> Figure:
    sizes = sorted({point.rows for point in measured})
    beyond = [*sizes, 2 * sizes[-1]]
    curves = []
    for instances, replicas in sorted({(point.instances, point.replicas) for point in measured}):
        name = f"{instances} × {replicas}"
        found = {point.rows: value for point, value in measured.items()
                 if (point.instances, point.replicas) == (instances, replicas)}  # fmt: skip
        curves.append(Curve(name, sorted(found), [found[rows] for rows in sorted(found)]))
        line = [predicted(Point(rows, instances, replicas)) for rows in beyond]
        curves.append(Curve(f"{name}, predicted", beyond, line, dashed=True))
    rows_name = "sequences at once" if plan.subject.is_language_model else "rows in a call"
    return Figure(line_chart(title, rows_name, unit, curves, log_x=True), f"{title}, by instances × replicas")


def _model(plan: Plan) -> Section:
    assert plan.predictor is not None
    model = plan.predictor.memory
    rows: list[list[str | int | float]] = [
        ["supervisor and gateway, once", round(model.server / MIB, 1)],
        ["libraries and other files, once", round(model.files / MIB, 1)],
        ["each replica, weights among it", round(model.host.fixed / MIB, 1)],
        ["each instance beyond the first", round(model.host.instance / MIB, 1)],
        ["each row of a batch, of each instance", round(model.host.row / MIB, 3)],
    ]
    if plan.weights.bytes is not None:
        rows.append(["of which weights, of each replica", round(plan.weights.bytes / MIB, 1)])
    if plan.subject.cache is not None:
        rows.append(["key/value cache of one sequence, full", round(plan.subject.largest_cache(1) / MIB, 1)])
    parts: list[Part] = [Table(["memory of", "MiB"], rows)]
    if plan.held_out is not None:
        parts.append(Paragraph(f"Largest error for a size that was left out of the fit: {plan.held_out:.1%}."))
    return Section("Model of memory", parts)


def _sizes(plan: Plan) -> Section:
    rows: list[list[str | int | float]] = []
    flagged = []
    for row in size_rows(plan):
        if row.excess:
            flagged.append(len(rows))
        rows.append([
            row.point.rows, row.point.instances, row.point.replicas, size_text(row.predicted.most.host),
            float(f"{row.predicted.rate:.4g}"), row.excess or "fits", "measured" if row.was_measured else "predicted",
        ])  # fmt: skip
    head = ["batch", "instances", "replicas", "memory", plan.subject.unit, "fits", "how it is known"]
    return Section("What fits", [Table(head, rows, flagged=frozenset(flagged))])


def _measured(plan: Plan) -> Section:
    rows: list[list[str | int | float]] = []
    for row in plan.sweep.rows:
        one = row.measured
        size = [row.point.rows, row.point.instances, row.point.replicas]
        if one is None:
            rows.append([*size, "-", "-", "-", "-", row.note])
        else:
            figures = [f"{one.rate:.4g}", f"{one.p50_ms:.1f}", f"{one.p99_ms:.1f}"]
            rows.append([*size, size_text(one.host), *figures, row.note])
    head = ["batch", "instances", "replicas", "memory", plan.subject.unit, "p50 ms", "p99 ms", "note"]
    return Section("Measured", [Table(head, rows)])
