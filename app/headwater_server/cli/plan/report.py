"""A plan as text for a terminal, as an HTML page with curves, and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import headwater_server
from headwater_server.cli.plan.measuring import RATE_TOLERANCE, Measured
from headwater_server.cli.plan.planning import Plan
from headwater_server.cli.plan.point import Point
from headwater_server.cli.plan.prediction import Prediction
from headwater_server.cli.plan.trial import MEMORY_TOLERANCE, Trial
from headwater_server.cli.report.columns import columns
from headwater_server.cli.report.page import Figure, PageSection, Paragraph, Part, Table, Warn, render_page
from headwater_server.cli.report.plots import Curve, line_chart
from headwater_server.process.machine import size_text

__all__ = ["plan_json", "plan_page", "plan_text"]

MIB: Final = 2**20
SIZE: Final = ("batch", "instances", "replicas")


def plan_text(plan: Plan) -> str:
    """The plan's tables as text."""
    sections = [_measured(plan)]
    if plan.predictor is not None:
        sections += [_model(plan), _sizes(plan), _recommended(plan)]
    return "\n\n".join(f"{section.title}:\n{_parts_text(section)}" for section in sections)


def _parts_text(section: PageSection) -> str:
    texts = []
    for part in section.parts:
        if isinstance(part, Table):
            title = f"\n{part.caption}:\n" if part.caption else ""
            head = [cell.upper() for cell in part.head]
            texts.append(title + columns([head, *([str(cell) for cell in row] for row in part.rows)]))
        elif isinstance(part, Paragraph):
            texts.append(part.text)
    return "\n".join(texts)


def plan_page(plan: Plan) -> str:
    """The plan's tables and curves as an HTML page."""
    subject, budget = plan.subject, plan.budget
    lead = f"{subject.name} of {subject.what}, on {subject.cores} cores; {size_text(budget.host)} of memory to take."
    sections = [PageSection("Not complete", [Warn(plan.ended)])] if plan.ended else []
    if plan.predictor is not None:
        sections += [_recommended(plan), _curves(plan), _model(plan), _sizes(plan)]
    return render_page(f"Plan for {subject.name}", lead, [*sections, _measured(plan)])


def _measured(plan: Plan) -> PageSection:
    rows = []
    for trial in plan.sweep:
        measurement = trial.measured
        if measurement is None:
            rows.append([*trial.point, *"-" * 6, trial.note])
        else:
            rows.append([
                *trial.point, size_text(measurement.host_bytes),
                size_text(measurement.device_bytes) if measurement.device_bytes else "-",
                f"{measurement.rate:.4g}", f"{measurement.p50_ms:.1f}", f"{measurement.p99_ms:.1f}",
                "-" if measurement.mean_rows is None else f"{measurement.mean_rows:.1f}", trial.note,
            ])  # fmt: skip
    head = [*SIZE, "memory", "GPU", plan.subject.unit, "p50 ms", "p99 ms", "rows/call", "note"]
    return PageSection("Measured", [Table(head, rows)])


def _model(plan: Plan) -> PageSection:
    assert plan.predictor is not None
    model = plan.predictor.memory
    terms = [
        ("supervisor and gateway", model.server, "once"),
        ("libraries and other files", model.files, "once"),
        ("replica, weights included", model.host.fixed, "each replica"),
        ("another instance", model.host.instance, "each beyond the first, of each replica"),
        ("row of a batch", model.host.row, "times instances, of each replica"),
    ]
    if model.caches_on_device:
        terms += [
            ("GPU: replica", model.device.fixed, "each replica"),
            ("GPU: another instance", model.device.instance, "each beyond the first, of each replica"),
            ("GPU: row of a batch", model.device.row, "times instances, of each replica"),
        ]
    rows = [(name, f"{size / MIB:.1f} MiB", counts) for name, size, counts in terms]
    if plan.subject.cache is not None:
        token = f"{plan.subject.cache.token_bytes / 1024:.1f} KiB"
        full = size_text(plan.subject.cache.size(1))
        rows.append(("key/value cache, computed", token, f"each token; {full} for a full sequence"))
    weights = plan.weights
    how = weights.how if weights.bytes is None else f"{size_text(weights.bytes)} ({weights.how})"
    worst = max(abs(model.at(measurement.point).host / measurement.host_bytes - 1) for measurement in plan.measured)
    texts = [f"Weights of one replica: {how}", f"Largest error of the fit: {worst:.1%}"]
    if plan.held_out is not None:
        texts.append(f"Largest error for a size that was left out of the fit: {plan.held_out:.1%}")
    return PageSection("Model of memory", [Table(["memory of", "size", "counts"], rows), *map(Paragraph, texts)])


def _sizes(plan: Plan) -> PageSection:
    budget, sizes = plan.budget, plan.size_rows()
    rows = [
        [
            *size.point, size_text(size.predicted.most.host),
            size_text(size.predicted.most.device) if size.predicted.most.device else "-", f"{size.predicted.rate:.4g}",
            "no" if size.excess else "yes", "measured" if size.was_measured else "predicted only",
        ]
        for size in sizes
    ]  # fmt: skip
    head = [*SIZE, "memory", "GPU", plan.subject.unit, "fits", "figures"]
    device = "" if budget.device is None else f", and {size_text(budget.device)} of GPU memory"
    full = ", with full caches" if plan.subject.cache is not None else ""
    title = f"Predicted, with {size_text(budget.host)} of memory to take{device}{full}"
    excess = plan.smallest_excess()
    nothing = [Warn(f"Nothing fits: one replica with batches of one row {excess}.")] if excess else []
    flagged = frozenset(place for place, size in enumerate(sizes) if size.excess)
    return PageSection(title, [Table(head, rows, flagged=flagged), *nothing])


def _recommended(plan: Plan) -> PageSection:
    rows = [
        [profile.name, *(profile.point or "---"), str(profile.file or "-"), profile.note] for profile in plan.profiles
    ]
    parts: list[Part] = [Table(["profile", *SIZE, "file", "note"], rows)]
    trials = [("check", trial) for trial in plan.checks]
    trials += [(profile.name, profile.trial) for profile in plan.profiles if profile.trial is not None]
    rows, flagged = [], set()
    for name, trial in trials:
        measured = trial.measured
        for comparison in trial.comparisons:
            shown = [size_text(round(value)) for value in (comparison.predicted, comparison.measured)]
            rounds, notes = "", ["too far off"] if comparison.is_off else []
            if comparison.what == "rate" and measured is not None:
                shown = [f"{comparison.predicted:.4g}", f"{comparison.measured:.4g}"]
                rounds = measured.spread_text
                notes += ["rounds differ: not a quiet machine"] if measured.is_unsteady else []
            if notes:
                flagged.add(len(rows))
            rows.append(
                [name, str(trial.point), comparison.what, *shown, f"{comparison.error:+.1%}", rounds, ", ".join(notes)]
            )
        if measured is None and trial.predicted is not None:
            need = size_text(trial.predicted.need.host)
            rows.append([name, str(trial.point), "host memory", need, "-", "-", "", trial.error or "not run"])
    if rows:
        head = ["run", "size", "figure", "predicted", "measured", "error", "rounds", "note"]
        caption = "Predicted, then run (batch × instances × replicas)"
        parts.append(Table(head, rows, caption, frozenset(flagged)))
    return PageSection("Recommended", parts)


def _curves(plan: Plan) -> PageSection:
    predictor = plan.predictor
    assert predictor is not None
    parts: list[Part] = [
        Paragraph("Points were measured; dashed lines are the models, beyond the points predictions."),
        _figure(
            plan,
            "Memory",
            "MiB",
            lambda measurement: measurement.host_bytes / MIB,
            lambda at: predictor.memory.at(at).host / MIB,
        ),
        _figure(
            plan, "Throughput", plan.subject.unit, lambda measurement: measurement.rate, predictor.speed.rows_per_s
        ),
        _figure(
            plan, "Median latency", "ms", lambda measurement: measurement.p50_ms, lambda at: predictor.at(at).p50_ms
        ),
    ]
    return PageSection("Curves", parts)


def _figure(
    plan: Plan, title: str, unit: str, measured: Callable[[Measured], float], predicted: Callable[[Point], float]
) -> Figure:
    values = {measurement.point: measured(measurement) for measurement in plan.measured}
    max_rows = max(point.rows for point in values)
    beyond = sorted({*(point.rows for point in values), 2 * max_rows})
    curves = []
    for pair in sorted({point[1:] for point in values}):
        name = "{} × {}".format(*pair)
        samples = sorted((point.rows, value) for point, value in values.items() if point[1:] == pair)
        curves.append(Curve(name, [rows for rows, _ in samples], [value for _, value in samples]))
        line = [predicted(Point(rows, *pair)) for rows in beyond]
        curves.append(Curve(f"{name}, predicted", beyond, line, dashed=True))
    rows_name = "concurrent sequences" if plan.subject.takes_text else "rows in a call"
    return Figure(line_chart(title, rows_name, unit, curves, log_x=True), f"{title}, by instances × replicas")


def plan_json(plan: Plan) -> dict[str, Any]:
    """All figures of the plan as a JSON object; docs/plan.md explains the fields. Sizes are in bytes, times in
    milliseconds."""
    subject, model = plan.subject, None if plan.predictor is None else plan.predictor.memory
    return {
        "headwater": headwater_server.__version__,
        "complete": not plan.ended,
        "ended": plan.ended,
        "config": subject.what,
        "deployment": subject.name,
        "unit": subject.unit,
        "cores": subject.cores,
        "seconds": subject.seconds,
        "memory": {"machine": plan.capacity, "host_budget": plan.budget.host, "device_budget": plan.budget.device},
        "weights": {"bytes": plan.weights.bytes, "how": plan.weights.how},
        "points": [
            {
                **trial.point._asdict(),
                "error": trial.error or None,
                "first_error": trial.first_error or None,
                **(_figures(trial.measured) or {}),
            }
            for trial in plan.sweep
        ],
        "model": model and {
            "server": model.server,
            "shared_files": model.files,
            "host": vars(model.host),
            "device": vars(model.device),
            "starting": vars(model.starting),
        },
        "held_out_error": plan.held_out,
        "sizes": [
            {
                **size.point._asdict(),
                **_prediction(size.predicted),
                "fits": not size.excess,
                "why_not": size.excess or None,
            }
            for size in plan.size_rows()
        ],
        "checks": [_trial(trial) for trial in plan.checks],
        "profiles": [
            {
                "name": profile.name,
                "note": profile.note or None,
                "file": None if profile.file is None else str(profile.file),
                **({} if profile.trial is None else {
                    **_trial(profile.trial),
                    "bench": subject.bench_arguments("URL", profile.trial.point),
                }),
            }
            for profile in plan.profiles
        ],
        "tolerance": {"memory": MEMORY_TOLERANCE, "rate": RATE_TOLERANCE},
    }  # fmt: skip


def _figures(measurement: Measured | None) -> dict[str, Any] | None:
    if measurement is None:
        return None
    fields = {name: value for name, value in vars(measurement).items() if name != "point"}
    return {**fields, "rates": list(measurement.rates or (measurement.rate,)), "spread": measurement.spread}


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {
        "host_bytes": prediction.need.host,
        "device_bytes": prediction.need.device,
        "most_host_bytes": prediction.most.host,
        "most_device_bytes": prediction.most.device,
        "rate": prediction.rate,
        "p50_ms": prediction.p50_ms,
        "p99_ms": prediction.p99_ms,
    }


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        **trial.point._asdict(),
        "predicted": trial.predicted and _prediction(trial.predicted),
        "measured": _figures(trial.measured),
        "error": trial.error or None,
        "comparisons": [{**comparison._asdict(), "error": comparison.error} for comparison in trial.comparisons],
    }
