"""The results of a bench as text tables, and as an HTML page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from headwater_server.cli.bench.plan import LoadPoint
from headwater_server.cli.bench.results import Results
from headwater_server.cli.report.columns import columns
from headwater_server.cli.report.page import Code, Figure, PageSection, Paragraph, Part, Table, Warn, render_page
from headwater_server.cli.report.plots import Curve, cdf, line_chart

__all__ = ["page_html", "table_text"]

_LATENCY: Final = (
    ("P50 ms", "latency_ms_p50", True), ("P90 ms", "latency_ms_p90", False), ("P99 ms", "latency_ms_p99", True),
    ("P99.9 ms", "latency_ms_p99.9", False),
)  # fmt: skip
_STREAM: Final = (
    ("TTFT P50 ms", "ttft_ms_p50", True), ("TTFT P99 ms", "ttft_ms_p99", False), ("ITL P50 ms", "itl_ms_p50", False),
    ("ITL P99 ms", "itl_ms_p99", False), ("TPOT P50 ms", "tpot_ms_p50", False), ("TOKENS/S", "tokens_per_s", False),
)  # fmt: skip


def table_text(points: Sequence[LoadPoint], report: Mapping[str, Any]) -> str:
    """The tables, followed by warnings about their figures."""
    lines: list[str] = []
    for head, rows in _tables(points, report):
        lines += [columns([head, *rows]), ""]
    run = report["run"]
    if run["repeats"] > 1:
        lines.append(f"Medians of {run['repeats']} repeats of {run['seconds']:g} s, with the range in brackets.")
    lines += _run_limits(points, report)
    lines += [f"! {warning}" for warning in _warnings(points, report)]
    if report["ended_early"]:
        lines.append(f"! ended early: {report['ended_early']}; the figures above were measured until then")
    return "\n".join(lines).rstrip()


def _tables(points: Sequence[LoadPoint], report: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """The head and the rows of each table: a table for all modes, a second for streams, and a third for constrained
    answers.

    A ``!`` in a row's first cell marks unreliable figures.
    """
    has_heads = any(point.heads is not None for point in points)
    is_constrained = any(point.constraint is not None for point in points)
    rates = [("REQUESTS/S", "requests_per_s", True)]
    if report["run"]["limits_ms"]:
        rates.append(("GOODPUT/S", "goodput_per_s", True))
    tables = []
    for figures in ([*rates, *_LATENCY], _STREAM)[: 1 if report["run"]["mode"] == "infer" else 2]:
        with_errors = figures is not _STREAM
        head = [
            "LOAD",
            *["HEADS"] * has_heads,
            *["CONSTRAINT"] * is_constrained,
            *(name for name, _, _ in figures),
            *["ERRORS"] * with_errors,
        ]
        rows = []
        for point, point_report in zip(points, report["points"], strict=True):
            row = [str(point.load) if point_report["valid"] else f"! {point.load}"]
            if has_heads:
                row.append("all" if point.heads is None else ",".join(point.heads))
            if is_constrained:
                row.append(point.constraint or "none")
            row += [_spread_text(point_report["summary"][name], with_range) for _, name, with_range in figures]
            if with_errors:
                failures = sum(error["count"] for error in point_report["errors"])
                requests = sum(repeat["requests"] for repeat in point_report["repeats"])
                row.append(f"{failures:,} ({failures / requests:.2%})" if failures else "0")
            rows.append(row)
        tables.append((head, rows))
    if is_constrained:
        tables.append((
            ["LOAD", "CONSTRAINT", "FINISHED", "PARSED", "TOKENS/S RATIO"],
            [
                _constrained_row(point, point_report)
                for point, point_report in zip(points, report["points"], strict=True)
            ],
        ))  # fmt: skip
    return tables


def _constrained_row(point: LoadPoint, point_report: Mapping[str, Any]) -> list[str]:
    """A row: how many of a point's answers finished by themselves, and how many of these satisfy the constraint."""
    answers, finished, parsed = (
        sum(run[name] or 0 for run in point_report["repeats"]) for name in ("answers", "finished", "parsed")
    )
    return [
        str(point.load) if point_report["valid"] else f"! {point.load}",
        point.constraint or "none",
        _share_text(finished, answers),
        "–" if point.constraint == "none" else _share_text(parsed, finished),
        _spread_text(point_report["tokens_per_s_ratio"], True),
    ]


def _share_text(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.1%})" if whole else "–"


def _run_limits(points: Sequence[LoadPoint], report: Mapping[str, Any]) -> list[str]:
    """A list with a line that says for each load whether the limits on latency percentiles of the run (`p50_ms` and so
    on) were met; an empty list if there are no such limits."""
    words = {True: "met", False: "missed", None: "unknown"}
    limits = [f"{name} {value:g}" for name, value in report["run"]["limits_ms"].items() if name.startswith("p")]
    met = [
        f"{point} {words[point_report['limits_met']]}"
        for point, point_report in zip(points, report["points"], strict=True)
    ]
    return [f"{', '.join(limits)}: {'; '.join(met)}"] if limits else []


def _warnings(points: Sequence[LoadPoint], report: Mapping[str, Any]) -> list[str]:
    return [
        f"{point}: {warning}"
        for point, point_report in zip(points, report["points"], strict=True)
        for warning in point_report["warnings"]
    ]


def _spread_text(spread: Mapping[str, float] | None, with_range: bool) -> str:
    """A median as text, with its range if requested."""
    if spread is None:
        return "–"
    median = _figure_text(spread["median"])
    if not with_range or spread["min"] == spread["max"]:
        return median
    return f"{median} ({_figure_text(spread['min'])} to {_figure_text(spread['max'])})"


def _figure_text(value: float) -> str:
    """A figure with about three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def page_html(results: Results, report: Mapping[str, Any]) -> str:
    """The whole HTML page."""
    points = results.points
    run, server, generator = report["run"], report["server"], report["generator"]
    warnings: list[Part] = [Warn(warning) for warning in _warnings(points, report)]
    if report["ended_early"]:
        warnings.insert(0, Warn(f"Ended early: {report['ended_early']}. The figures were measured until then."))
    flagged = frozenset(place for place, point_report in enumerate(report["points"]) if not point_report["valid"])
    caption = f"Medians of {run['repeats']} repeats, with the range in brackets." if run["repeats"] > 1 else ""
    figures = [Table(head, rows, caption, flagged) for head, rows in _tables(points, report)]
    sections = [
        PageSection("Figures", [*warnings, *figures, *map(Paragraph, _run_limits(points, report))]),
        PageSection("Plots", _plots(results, report)),
    ]
    errors = [
        [str(point), error["kind"], str(error["status"] or ""), error["reason"], error["count"]]
        for point, point_report in zip(points, report["points"], strict=True)
        for error in point_report["errors"]
    ]
    if errors:
        sections.append(PageSection("Errors", [Table(("load", "kind", "status", "reason", "count"), errors)]))
    about = [
        ["server", f"{server['url']} {server['name'] or ''} {server['version'] or ''}".strip()],
        ["model", run["model"]],
        ["mode", run["mode"]],
        ["requests",
         f"{run['bodies']} different bodies, {_figure_text(run['body_bytes'])} bytes each, seed {run['seed']}"],
        ["time", f"{run['seconds']:g} s in each of {run['repeats']} repeats, after {run['warmup_s']:g} s of warm-up"],
        ["arrivals (open loop)", f"{run['arrivals']}, at most {run['max_connections']:,} connections"],
        ["generator", f"headwater {generator['headwater']}, Python {generator['python']}, {generator['processes']} "
         f"process{'es' if generator['processes'] > 1 else ''}, {generator['cores']} cores, {generator['platform']}"],
        ["started", report["started"]],
    ]  # fmt: skip
    sections.append(PageSection("How it was measured", [Table(("", ""), about), Code(" ".join(generator["command"]))]))
    lead = f"{run['model']} at {server['url']}, {report['started']}"
    return render_page(f"headwater bench: {run['model']}", lead, sections)


def _plots(results: Results, report: Mapping[str, Any]) -> list[Part]:
    is_closed = results.points[0].load.connections > 0
    over = "connections" if is_closed else "requests/s wanted"
    groups: dict[str, list[dict[str, Any]]] = {}
    for point, point_report in zip(results.points, report["points"], strict=True):
        label = str(point).removeprefix(str(point.load)).removeprefix(", ")
        groups.setdefault(label, []).append(point_report)
    throughput = _curves(groups, {"requests_per_s": "", "goodput_per_s": "goodput"})
    percentiles = ("p99",) if len(groups) > 1 else ("p50", "p90", "p99")
    latency = _curves(groups, {f"latency_ms_{percentile}": percentile for percentile in percentiles})
    begins = "From sending to the answer." if is_closed else "From the time at which a request was due."
    plots: list[Part] = [
        Figure(
            line_chart("Throughput", over, "requests/s", throughput, log_x=is_closed),
            "Good answers per second; bars show the range of the repeats.",
        ),
        Figure(line_chart("Latency", over, "ms", latency, log_x=is_closed), begins),
    ]
    distributions = [("Latency", "latencies_s", "All repeats together.")]
    if report["run"]["mode"] != "infer":
        distributions += [
            ("Time to first token", "first_token_s", "Until the first event with text."),
            ("Inter-token latency", "gaps_s", "Gaps between events with text, over all streams."),
            ("Time per output token", "per_token_s", "(last - first) / (tokens - 1) of each stream."),
        ]
    for title, name, caption in distributions:
        samples = [
            (str(point), [value * 1000 for run in runs.values() for value in getattr(run, name)])
            for point, runs in zip(results.points, results.runs, strict=True)
        ]
        values = np.concatenate([values for _, values in samples])
        is_wide = values.size > 0 and values.min() > 0 and values.max() > 20 * np.median(values)
        plots.append(Figure(cdf(f"{title}: distribution", "ms", samples, log_x=bool(is_wide)), caption))
    return plots


def _curves(groups: Mapping[str, Sequence[Mapping[str, Any]]], figures: Mapping[str, str]) -> list[Curve]:
    """A curve for each figure of each group. Figures that were not measured are left out. ``figures`` maps figures to
    labels."""
    curves = []
    for figure, label in figures.items():
        for group, points in groups.items():
            measured = [point for point in points if point["summary"][figure] is not None]
            if not measured:
                continue
            x = [point["load"]["connections"] or point["load"]["rate_per_s"] for point in measured]
            y, low, high = ([point["summary"][figure][name] for point in measured] for name in ("median", "min", "max"))
            curves.append(Curve(f"{group} {label}".strip() or "requests/s", x, y, low, high))
    return curves
