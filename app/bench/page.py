"""What a bench found, as a page with plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.bench.results import Results
from app.bench.table import of_heads, run_limits, shown, shown_load, tables
from app.reports.page import Code, Figure, Paragraph, Part, Section, Table, Warn, render_page
from app.reports.plots import Curve, cdf, line_chart

__all__ = ["page_html"]


def page_html(results: Results) -> str:
    """The whole page."""
    told = results.told()
    run, server, generator = told["run"], told["server"], told["generator"]
    warnings: list[Part] = [
        Warn(f"{shown_load(point['load'])}{of_heads(point)}: {text}")
        for point in told["points"]
        for text in point["warnings"]
    ]
    if told["ended_early"]:
        warnings.insert(0, Warn(f"Ended early: {told['ended_early']}. What follows is what was measured until then."))
    flagged = frozenset(place for place, point in enumerate(told["points"]) if not point["valid"])
    caption = f"Medians of {run['repeats']} repeats, least to greatest in brackets." if run["repeats"] > 1 else ""
    figures = [Table(head, rows, caption, flagged) for head, rows in tables(told)]
    sections = [
        Section("Figures", [*warnings, *figures, *map(Paragraph, run_limits(told))]),
        Section("Plots", _figures(results, told)),
    ]
    errors = [
        [
            f"{shown_load(point['load'])}{of_heads(point)}",
            one["kind"],
            str(one["status"] or ""),
            one["reason"],
            one["count"],
        ]
        for point in told["points"]
        for one in point["errors"]
    ]
    if errors:
        sections.append(Section("Errors", [Table(("load", "kind", "status", "reason", "count"), errors)]))
    about = [
        ["server", f"{server['url']} {server['name'] or ''} {server['version'] or ''}".strip()],
        ["model", run["model"]],
        ["mode", run["mode"]],
        ["requests", f"{run['bodies']} that differ, {shown(run['body_bytes'])} bytes each, seed {run['seed']}"],
        ["time", f"{run['seconds']:g} s in each of {run['repeats']} repeats, after {run['warmup_s']:g} s of warm-up"],
        ["arrivals (open loop)", f"{run['arrivals']}, at most {run['max_connections']:,} connections"],
        ["generator", f"headwater {generator['headwater']}, Python {generator['python']}, {generator['processes']} "
         f"process{'es' if generator['processes'] > 1 else ''}, {generator['cores']} cores, {generator['platform']}"],
        ["started", told["started"]],
    ]  # fmt: skip
    sections.append(Section("How it was measured", [Table(("", ""), about), Code(" ".join(generator["command"]))]))
    lead = f"{run['model']} at {server['url']}, {told['started']}"
    return render_page(f"headwater bench: {run['model']}", lead, sections)


def _figures(results: Results, told: dict[str, Any]) -> list[Part]:
    figures: list[Part] = []
    closed = [place for place, point in enumerate(results.points) if point.load.connections is not None]
    over = "connections" if closed else "requests/s wanted"
    groups: dict[str, list[dict[str, Any]]] = {}
    for point in told["points"]:
        groups.setdefault(of_heads(point).removeprefix(", "), []).append(point)
    throughput = [
        curve
        for figure, word in (("requests_per_s", ""), ("goodput_per_s", "goodput"))
        for name, points in groups.items()
        for curve in _curves(points, figure, f"{name} {word}".strip())
    ]
    caption = "Good answers per second; bars from the least to the greatest of the repeats."
    figures.append(Figure(line_chart("Throughput", over, "requests/s", throughput, log_x=bool(closed)), caption))
    latency = [
        curve
        for name, points in groups.items()
        for percentile in (("p99",) if len(groups) > 1 else ("p50", "p90", "p99"))
        for curve in _curves(points, f"latency_ms_{percentile}", f"{name} {percentile}".strip())
    ]
    caption = "From sent to answered." if closed else "From the time at which a request should have been sent."
    figures.append(Figure(line_chart("Latency", over, "ms", latency, log_x=bool(closed)), caption))
    drawn = [("Latency", "latencies_s", "All repeats together.")]
    if results.points[0].target.is_stream:
        drawn += [
            ("Time to first token", "first_token_s", "Until the first event with text."),
            ("Inter-token latency", "gaps_s", "Gaps between events with text, of all streams together."),
            ("Time per output token", "per_token_s", "(last - first) / (tokens - 1) of each stream."),
        ]
    for title, name, caption in drawn:
        samples = [
            (str(point), [value * 1000 for run in runs for value in getattr(run, name)])
            for point, runs in zip(results.points, results.runs, strict=True)
        ]
        figures.append(Figure(cdf(f"{title}: distribution", "ms", samples, log_x=_is_wide(samples)), caption))
    return figures


def _curves(points: Sequence[dict[str, Any]], figure: str, label: str) -> list[Curve]:
    measured = [point for point in points if point["summary"][figure] is not None]
    if not measured:
        return []
    x = [point["load"]["connections"] or point["load"]["rate_per_s"] for point in measured]
    spreads = [point["summary"][figure] for point in measured]
    return [Curve(
        label or figure.replace("_per_s", "/s"), x, [one["median"] for one in spreads],
        [one["min"] for one in spreads], [one["max"] for one in spreads],
    )]  # fmt: skip


def _is_wide(samples: Sequence[tuple[str, Sequence[float]]]) -> bool:
    """Whether only a logarithmic axis shows all of them."""
    values = sorted(value for _, some in samples for value in some)
    return bool(values) and values[0] > 0 and values[-1] > 20 * values[len(values) // 2]
