"""The results of a bench as JSON: one schema for the file, the table and the page."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import app
from app.cli.bench.closed_loop import STOPPED
from app.cli.bench.outcomes import Outcomes, distribution
from app.cli.bench.plan import Plan, Point

__all__ = ["SCHEMA", "Results"]

SCHEMA: Final = "headwater-bench/1"
BUSY_SHARE: Final = 0.9
"""From this fraction of a core on, the generator may be the bottleneck."""
BEHIND_S: Final = 0.005
"""A request that the generator sends this much too late is late by the generator's fault."""
LATE_S: Final = 0.001
LATE_SHARE: Final = 0.01
KEPT_UP: Final = 0.95
_SUMMED: Final[tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...]] = (
    ("requests_per_s", lambda run: run["requests_per_s"]),
    ("goodput_per_s", lambda run: run["goodput_per_s"]),
    ("tokens_per_s", lambda run: run["tokens_per_s"]),
    ("error_share", lambda run: run["error_share"]),
    *(
        (f"{figure}_{percentile}", lambda run, figure=figure, percentile=percentile: run[figure][percentile])
        for figure in ("latency_ms", "ttft_ms", "itl_ms", "tpot_ms")
        for percentile in ("mean", "p50", "p90", "p99", "p99.9")
    ),
)


@dataclass
class Results:
    """The results so far."""

    plan: Plan
    model: str
    server: tuple[str, str]
    """The server's name and version."""
    points: Sequence[Point]
    started: str
    """ISO 8601, UTC."""
    runs: list[list[Outcomes]] = field(default_factory=list)
    """By point, in the order of the repeats."""
    ended: str = ""
    """Why the bench ended early; empty: it did not."""

    def __post_init__(self) -> None:
        self.runs = [[] for _ in self.points]

    def told(self) -> dict[str, Any]:
        """All results in `SCHEMA`; see docs/bench.md."""
        plan = self.plan
        points = [self._point(point, runs) for point, runs in zip(self.points, self.runs, strict=True)]
        name, version = self.server
        return {
            "schema": SCHEMA,
            "started": self.started,
            "ended_early": self.ended or None,
            "valid": not self.ended and all(point["valid"] for point in points),
            "generator": {
                "headwater": app.__version__,
                "python": platform.python_version(),
                "platform": platform.platform(),
                "cores": len(os.sched_getaffinity(0)),
                "processes": plan.processes,
                "command": ["headwater", *sys.argv[1:]],
            },
            "server": {"url": plan.url, "name": name or None, "version": version or None},
            "run": {
                "model": self.model,
                "mode": plan.mode,
                "seconds": plan.seconds,
                "warmup_s": plan.warmup_s,
                "repeats": plan.repeats,
                "timeout_s": plan.timeout_s,
                "arrivals": plan.arrivals,
                "max_connections": plan.max_connections,
                "seed": plan.wishes.seed,
                "input": str(plan.input) if plan.input is not None else None,
                "bodies": len(self.points[0].target.bodies),
                "body_bytes": statistics.mean(len(one.content) for one in self.points[0].target.bodies),
                "binary": self.points[0].target.bodies[0].json_length is not None,
                "limits_ms": plan.slo,
            },
            "points": points,
        }

    def _point(self, point: Point, runs: Sequence[Outcomes]) -> dict[str, Any]:
        plan = self.plan
        told = [self._run(run) for run in runs]
        errors: dict[Any, int] = {}
        for run in runs:
            for fault, count in run.errors.items():
                errors[fault] = errors.get(fault, 0) + count
        kind = "closed" if point.load.connections is not None else "open"
        warnings = [*self._warnings(point, runs)]
        return {
            "load": {"kind": kind, "connections": point.load.connections, "rate_per_s": point.load.rate_per_s},
            "heads": list(point.heads) if point.heads is not None else None,
            "valid": len(runs) == plan.repeats and all(run["valid"] for run in told),
            "warnings": warnings,
            "errors": _errors(errors),
            "summary": {name: _spread([figure(run) for run in told]) for name, figure in _SUMMED},
            "limits_met": self._limits_met(told),
            "repeats": told,
        }

    def _run(self, run: Outcomes) -> dict[str, Any]:
        late = [value for value in run.lateness_s if value > LATE_S]
        return {
            "valid": not run.errors and not run.ended and run.answers > 0,
            "ended_early": run.ended or None,
            "requests": run.requests,
            "answers": run.answers,
            "failures": run.failures,
            "error_share": run.error_share,
            "errors": _errors(run.errors),
            "elapsed_s": run.elapsed_s,
            "requests_per_s": run.requests_per_s,
            "goodput_per_s": run.met_per_s if self.plan.slo else None,
            "tokens": run.tokens,
            "tokens_per_s": run.tokens_per_s if self._streams else None,
            "latency_ms": distribution(run.latencies_s, 1000),
            "ttft_ms": distribution(run.first_token_s, 1000),
            "itl_ms": distribution(run.gaps_s, 1000),
            "tpot_ms": distribution(run.per_token_s, 1000),
            "sent_late": {"count": len(late), "waited_for_connection": run.waited,
                          "lateness_ms": distribution(run.lateness_s, 1000)},
            "generator_behind_ms": distribution(run.behind_s, 1000),
            "generator_cpu_share": run.cpu_share,
        }  # fmt: skip

    @property
    def _streams(self) -> bool:
        return self.points[0].target.is_stream

    def _limits_met(self, told: Sequence[dict[str, Any]]) -> bool | None:
        """Whether the median percentiles meet the limits for runs; None: there are no such limits, or no figures."""
        met = []
        for percentile, limit in self.plan.run_limits.items():
            spread = _spread([run["latency_ms"][percentile] for run in told])
            if spread is None:
                return None
            met.append(spread["median"] <= limit)
        return all(met) if met else None

    def _warnings(self, point: Point, runs: Sequence[Outcomes]) -> list[str]:
        told = []
        requests, failures = sum(run.requests for run in runs), sum(run.failures for run in runs)
        if failures:
            worst = max(((run.errors[fault], fault) for run in runs for fault in run.errors), key=lambda one: one[0])[1]
            told.append(
                f"{failures:,} of {requests:,} requests failed ({failures / requests:.2%}), most with {worst}; the "
                "other figures cover the rest only"
            )
        elif runs and not requests:
            told.append("no request was answered")
        for run in runs:
            if run.ended and run.ended != STOPPED:
                told.append(f"ended early: {run.ended}")
        if len(runs) < self.plan.repeats or any(run.ended for run in runs):
            told.append(f"only {sum(not run.ended for run in runs)} of {self.plan.repeats} repeats were completed")
        busiest = max((run.cpu_share for run in runs), default=0.0)
        if busiest > BUSY_SHARE:
            told.append(f"the generator used {busiest:.0%} of a core and may be the bottleneck; see --processes")
        sent = sum(len(run.behind_s) for run in runs)
        behind = sum(value > BEHIND_S for run in runs for value in run.behind_s)
        if sent and behind / sent > LATE_SHARE:
            told.append(f"the generator itself was late with {behind / sent:.1%} of the requests, by more than 5 ms")
        waited = sum(run.waited for run in runs)
        if waited:
            told.append(
                f"{waited:,} requests had to wait for one of {self.plan.max_connections:,} connections "
                "(--max-connections); their latency still counts from when they were due"
            )
        wanted = point.load.rate_per_s
        if wanted is not None and runs and not failures:
            got = statistics.median(run.requests_per_s for run in runs)
            if got < KEPT_UP * wanted:
                told.append(
                    f"the server answered {got:,.1f} of {wanted:g} requests/s: latency grows with the run's length"
                )
        return told


def _errors(errors: Any) -> list[dict[str, Any]]:
    return [
        {"kind": fault.kind, "status": fault.status, "reason": fault.reason, "count": count}
        for fault, count in sorted(errors.items(), key=lambda one: -one[1])
    ]


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median, minimum and maximum over the repeats that have the figure; None: no repeat has."""
    known = [value for value in values if value is not None]
    return {"median": statistics.median(known), "min": min(known), "max": max(known)} if known else None
