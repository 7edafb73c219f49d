"""The results of a bench as a text table, and as an HTML page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from app.cli.bench.results import Results
from app.cli.report.columns import columns
from app.cli.report.page import Code, Figure, Paragraph, Part, Section, Table, Warn, render_page
from app.cli.report.plots import Curve, cdf, line_chart

__all__ = ["of_heads", "page_html", "run_limits", "shown", "shown_load", "table_text", "tables"]

NONE: Final = "–"
_LATENCY: Final = (
    ("P50 ms", "latency_ms_p50", True), ("P90 ms", "latency_ms_p90", False), ("P99 ms", "latency_ms_p99", True),
    ("P99.9 ms", "latency_ms_p99.9", False),
)  # fmt: skip
_STREAM: Final = (
    ("TTFT P50 ms", "ttft_ms_p50", True), ("TTFT P99 ms", "ttft_ms_p99", False), ("ITL P50 ms", "itl_ms_p50", False),
    ("ITL P99 ms", "itl_ms_p99", False), ("TPOT P50 ms", "tpot_ms_p50", False), ("TOKENS/S", "tokens_per_s", False),
)  # fmt: skip


def tables(told: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Heads and rows of the tables: one, and another for streams.

    A ``!`` in a row's first cell marks unreliable figures.
    """
    run = told["run"]
    rates = [("REQUESTS/S", "requests_per_s", True)]
    if run["limits_ms"]:
        rates.append(("GOODPUT/S", "goodput_per_s", True))
    found = [_table(told, [*rates, *_LATENCY], with_errors=True)]
    if run["mode"] != "infer":
        found.append(_table(told, _STREAM, with_errors=False))
    return found


def _table(
    told: Mapping[str, Any], figures: Sequence[tuple[str, str, bool]], *, with_errors: bool
) -> tuple[list[str], list[list[str]]]:
    points = told["points"]
    has_heads = any(point["heads"] is not None for point in points)
    head = ["LOAD", *(["HEADS"] if has_heads else []), *(name for name, _, _ in figures)]
    head += ["ERRORS"] if with_errors else []
    rows = []
    for point in points:
        row = [f"{'' if point['valid'] else '! '}{shown_load(point['load'])}"]
        if has_heads:
            row.append(",".join(point["heads"]) if point["heads"] is not None else "all")
        row += [shown_spread(point["summary"][name], with_range) for _, name, with_range in figures]
        if with_errors:
            failures = sum(one["count"] for one in point["errors"])
            requests = sum(one["requests"] for one in point["repeats"])
            row.append(f"{failures:,} ({failures / requests:.2%})" if failures else "0")
        rows.append(row)
    return head, rows


def table_text(told: Mapping[str, Any]) -> str:
    """The tables, followed by warnings about their figures."""
    lines: list[str] = []
    for head, rows in tables(told):
        lines += [columns([head, *rows]), ""]
    run = told["run"]
    if run["repeats"] > 1:
        lines.append(f"Medians of {run['repeats']} repeats of {run['seconds']:g} s, with the range in brackets.")
    lines += run_limits(told)
    for point in told["points"]:
        lines += [f"! {shown_load(point['load'])}{of_heads(point)}: {text}" for text in point["warnings"]]
    if told["ended_early"]:
        lines.append(f"! ended early: {told['ended_early']}; the figures above were measured until then")
    return "\n".join(lines).rstrip()


def run_limits(told: Mapping[str, Any]) -> list[str]:
    """Whether each load met the limits of its percentiles, if there are any."""
    words = {True: "met", False: "missed", None: "unknown"}
    limits = {name: value for name, value in told["run"]["limits_ms"].items() if name.startswith("p")}
    if not limits:
        return []
    named = ", ".join(f"{name} {value:g}" for name, value in limits.items())
    return [f"{named}: " + "; ".join(
        f"{shown_load(point['load'])}{of_heads(point)} {words[point['limits_met']]}" for point in told["points"]
    )]  # fmt: skip


def shown_load(load: Mapping[str, Any]) -> str:
    """A load in words."""
    if load["kind"] == "closed":
        return f"{load['connections']} connection{'' if load['connections'] == 1 else 's'}"
    return f"{load['rate_per_s']:g}/s"


def shown_spread(spread: Mapping[str, float] | None, with_range: bool) -> str:
    """A median, with its range if requested."""
    if spread is None:
        return NONE
    median = shown(spread["median"])
    if not with_range or spread["min"] == spread["max"]:
        return median
    return f"{median} ({shown(spread['min'])} to {shown(spread['max'])})"


def shown(value: float) -> str:
    """A figure with about three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def of_heads(point: Mapping[str, Any]) -> str:
    """The heads that a load asked for, in words; empty: it named none."""
    heads: Sequence[str] | None = point["heads"]
    return "" if heads is None else f", heads {','.join(heads)}"


def page_html(results: Results) -> str:
    """The whole HTML page."""
    told = results.told()
    run, server, generator = told["run"], told["server"], told["generator"]
    warnings: list[Part] = [
        Warn(f"{shown_load(point['load'])}{of_heads(point)}: {text}")
        for point in told["points"]
        for text in point["warnings"]
    ]
    if told["ended_early"]:
        warnings.insert(0, Warn(f"Ended early: {told['ended_early']}. The figures were measured until then."))
    flagged = frozenset(place for place, point in enumerate(told["points"]) if not point["valid"])
    caption = f"Medians of {run['repeats']} repeats, with the range in brackets." if run["repeats"] > 1 else ""
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
        ["requests", f"{run['bodies']} different ones, {shown(run['body_bytes'])} bytes each, seed {run['seed']}"],
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
    caption = "Good answers per second; bars show the range of the repeats."
    figures.append(Figure(line_chart("Throughput", over, "requests/s", throughput, log_x=bool(closed)), caption))
    latency = [
        curve
        for name, points in groups.items()
        for percentile in (("p99",) if len(groups) > 1 else ("p50", "p90", "p99"))
        for curve in _curves(points, f"latency_ms_{percentile}", f"{name} {percentile}".strip())
    ]
    caption = "From sending to the answer." if closed else "From the time at which a request was due."
    figures.append(Figure(line_chart("Latency", over, "ms", latency, log_x=bool(closed)), caption))
    drawn = [("Latency", "latencies_s", "All repeats together.")]
    if results.points[0].target.is_stream:
        drawn += [
            ("Time to first token", "first_token_s", "Until the first event with text."),
            ("Inter-token latency", "gaps_s", "Gaps between events with text, over all streams."),
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
    """Whether the values need a logarithmic axis."""
    values = sorted(value for _, some in samples for value in some)
    return bool(values) and values[0] > 0 and values[-1] > 20 * values[len(values) // 2]
