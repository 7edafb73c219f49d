"""The results of a bench as JSON. The file, the table and the page use the same schema."""

from __future__ import annotations

import platform
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import headwater_server
from headwater_server.cli.bench.closed_loop import STOPPED
from headwater_server.cli.bench.outcomes import Outcomes, distribution_ms
from headwater_server.cli.bench.plan import LoadPlan, LoadPoint
from headwater_server.cli.bench.sample_reader import Fault
from headwater_server.cli.bench.slo import OF_REQUESTS, OF_RUNS
from headwater_server.process.machine import cpu_count

__all__ = ["SCHEMA", "Results"]

SCHEMA: Final = "headwater-bench/1"
BUSY_SHARE: Final = 0.9
"""Fraction of a core from which the generator may be the bottleneck."""
BEHIND_S: Final = 0.005
"""Delay from which a request counts as sent late by the generator itself."""
LATE_S: Final = 0.001
"""Delay from which the report counts a request as sent late, for any reason."""
LATE_SHARE: Final = 0.01
"""Fraction of requests later than `BEHIND_S` from which a warning is given."""
KEPT_UP: Final = 0.95
"""Fraction of the wanted rate below which a warning is given."""
_RATES: Final = ("requests_per_s", "goodput_per_s", "tokens_per_s", "error_share")
_PARSED: Final = {"schema": "json", "tools": "calls"}
"""The `TokenReader.ending` that satisfies each constraint."""


@dataclass
class Results:
    """The results of a bench so far."""

    plan: LoadPlan
    model: str
    server: tuple[str, str]
    """The server's name and version; empty if it doesn't report them."""
    points: Sequence[LoadPoint]
    started: str
    """Start time of the bench in ISO 8601, UTC."""
    runs: list[dict[int, Outcomes]]
    """The outcomes for each point, by repeat. Runs without requests are left out."""
    ended: str = ""
    """Why the bench ended early; empty if it did not."""

    def report(self) -> dict[str, Any]:
        """All results in the format `SCHEMA`; see docs/bench.md."""
        plan, bodies = self.plan, self.points[0].target.bodies
        points = [self._point(point, runs) for point, runs in zip(self.points, self.runs, strict=True)]
        name, version = self.server
        return {
            "schema": SCHEMA,
            "started": self.started,
            "ended_early": self.ended or None,
            "valid": not self.ended and all(point["valid"] for point in points),
            "generator": {
                "headwater": headwater_server.__version__,
                "python": platform.python_version(),
                "platform": platform.platform(),
                "cores": cpu_count(),
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
                "bodies": len(bodies),
                "body_bytes": statistics.mean(len(body.content) for body in bodies),
                "binary": bodies[0].json_length is not None,
                "limits_ms": plan.slo,
            },
            "points": points,
        }

    def _point(self, point: LoadPoint, by_repeat: Mapping[int, Outcomes]) -> dict[str, Any]:
        runs = list(by_repeat.values())
        repeats = [self._run(point, run) for run in runs]
        errors = sum((run.errors for run in runs), Counter[Fault]())
        connections, rate = (value or None for value in point.load)
        return {
            "load": {"kind": "closed" if connections else "open", "connections": connections, "rate_per_s": rate},
            "heads": list(point.heads) if point.heads is not None else None,
            "constraint": point.constraint,
            "valid": len(runs) == self.plan.repeats and all(run["valid"] for run in repeats),
            "warnings": self._warnings(point, runs, errors),
            "errors": _errors(errors),
            "summary": {name: _spread([run[name] for run in repeats]) for name in _RATES}
            | {
                f"{name}_{percentile}": _spread([run[name][percentile] for run in repeats])
                for name in OF_REQUESTS
                for percentile in ("mean", *OF_RUNS.values())
            },
            "tokens_per_s_ratio": self._ratio(point, by_repeat),
            "limits_met": self._limits_met(repeats),
            "repeats": repeats,
        }

    def _ratio(self, point: LoadPoint, runs: Mapping[int, Outcomes]) -> dict[str, float] | None:
        """Tokens/s divided by the tokens/s of the same load without the constraint, in the same repeat: median, minimum
        and maximum over the repeats. None if this load has no constraint, or was not measured without it."""
        if point.constraint in (None, "none"):
            return None
        for other_point, other_runs in zip(self.points, self.runs, strict=True):
            if (other_point.load, other_point.heads, other_point.constraint) == (point.load, point.heads, "none"):
                pairs = [(run, other_runs[repeat]) for repeat, run in runs.items() if repeat in other_runs]
                return _spread([run.tokens_per_s / free.tokens_per_s for run, free in pairs if free.tokens_per_s])
        return None

    def _run(self, point: LoadPoint, run: Outcomes) -> dict[str, Any]:
        ended = run.endings
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
            "tokens_per_s": run.tokens_per_s if self.plan.mode != "infer" else None,
            "finished": run.answers - ended["cut"] if point.constraint is not None else None,
            "parsed": ended[_PARSED[point.constraint]] if point.constraint in _PARSED else None,
            "latency_ms": distribution_ms(run.latencies_s),
            "ttft_ms": distribution_ms(run.first_token_s),
            "itl_ms": distribution_ms(run.gaps_s),
            "tpot_ms": distribution_ms(run.per_token_s),
            "sent_late": {
                "count": sum(value > LATE_S for value in run.lateness_s),
                "waited_for_connection": run.waited,
                "lateness_ms": distribution_ms(run.lateness_s),
            },
            "generator_behind_ms": distribution_ms(run.behind_s),
            "generator_cpu_share": run.cpu_share,
        }

    def _limits_met(self, repeats: Sequence[dict[str, Any]]) -> bool | None:
        """Whether the median percentiles meet the limits for runs; None if there are no such limits or no figures."""
        met = []
        for name in self.plan.slo.keys() & OF_RUNS:
            spread = _spread([run["latency_ms"][OF_RUNS[name]] for run in repeats])
            if spread is None:
                return None
            met.append(spread["median"] <= self.plan.slo[name])
        return all(met) if met else None

    def _warnings(self, point: LoadPoint, runs: Sequence[Outcomes], errors: Counter[Fault]) -> list[str]:
        warnings = []
        requests, failures = sum(run.requests for run in runs), sum(errors.values())
        if failures:
            worst = errors.most_common(1)[0][0]
            warnings.append(
                f"{failures:,} of {requests:,} requests failed ({failures / requests:.2%}), most with {worst}; the "
                "other figures cover the rest only"
            )
        elif runs and not requests:
            warnings.append("no request was answered")
        warnings += [f"ended early: {run.ended}" for run in runs if run.ended not in ("", STOPPED)]
        completed = sum(not run.ended for run in runs)
        if completed < self.plan.repeats:
            warnings.append(f"only {completed} of {self.plan.repeats} repeats were completed")
        busiest = max((run.cpu_share for run in runs), default=0.0)
        if busiest > BUSY_SHARE:
            warnings.append(f"the generator used {busiest:.0%} of a core and may be the bottleneck; see --processes")
        sent = sum(len(run.behind_s) for run in runs)
        behind = sum(value > BEHIND_S for run in runs for value in run.behind_s)
        if sent and (share := behind / sent) > LATE_SHARE:
            warnings.append(f"the generator itself was late with {share:.1%} of the requests, by more than 5 ms")
        waited = sum(run.waited for run in runs)
        if waited:
            warnings.append(
                f"{waited:,} requests had to wait for one of {self.plan.max_connections:,} connections "
                "(--max-connections); their latency still counts from when they were due"
            )
        wanted = point.load.rate_per_s
        if wanted and runs and not failures:
            got = statistics.median(run.requests_per_s for run in runs)
            if got < KEPT_UP * wanted:
                warnings.append(
                    f"the server answered {got:,.1f} of {wanted:g} requests/s: latency grows with the run's length"
                )
        return warnings


def _errors(errors: Counter[Fault]) -> list[dict[str, Any]]:
    return [{**fault._asdict(), "count": count} for fault, count in errors.most_common()]


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median, minimum and maximum over the repeats that have the figure; None if no repeat has it."""
    figures = [value for value in values if value is not None]
    return {"median": statistics.median(figures), "min": min(figures), "max": max(figures)} if figures else None
