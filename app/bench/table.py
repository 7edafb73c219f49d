"""What a bench found, as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from app.reports.columns import columns

__all__ = ["of_heads", "run_limits", "shown", "shown_load", "table_text", "tables"]

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
    """Heads and rows, of the results as JSON: one table, and of streams another one.

    A mark in a row's first cell: its figures can't be relied on.
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
    """The tables, and below them what has to be known of their figures."""
    lines: list[str] = []
    for head, rows in tables(told):
        lines += [columns([head, *rows]), ""]
    run = told["run"]
    if run["repeats"] > 1:
        lines.append(f"Medians of {run['repeats']} repeats of {run['seconds']:g} s, least to greatest in brackets.")
    lines += run_limits(told)
    for point in told["points"]:
        lines += [f"! {shown_load(point['load'])}{of_heads(point)}: {text}" for text in point["warnings"]]
    if told["ended_early"]:
        lines.append(f"! ended early: {told['ended_early']}; what is above is what was measured until then")
    return "\n".join(lines).rstrip()


def run_limits(told: Mapping[str, Any]) -> list[str]:
    """Whether each load met the limits of its percentiles, if there are such."""
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
    """A median, and its range if that is wanted and there is one."""
    if spread is None:
        return NONE
    median = shown(spread["median"])
    if not with_range or spread["min"] == spread["max"]:
        return median
    return f"{median} ({shown(spread['min'])} to {shown(spread['max'])})"


def shown(value: float) -> str:
    """A figure with about three digits that count."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def of_heads(point: Mapping[str, Any]) -> str:
    """Which heads a load asked for, in words; empty: it didn't say."""
    heads: Sequence[str] | None = point["heads"]
    return "" if heads is None else f", heads {','.join(heads)}"
