"""A plan as JSON; docs/plan.md explains the fields."""

from __future__ import annotations

import math
from typing import Any

import app
from app.cli.plan.measuring import Measured
from app.cli.plan.memory_model import MemoryModel, ReplicaTerms
from app.cli.plan.planning import Plan
from app.cli.plan.point import Point
from app.cli.plan.prediction import MEMORY_TOLERANCE, RATE_TOLERANCE, Prediction
from app.cli.plan.text import size_rows
from app.cli.plan.trial import Trial

__all__ = ["plan_json"]


def plan_json(plan: Plan) -> dict[str, Any]:
    """All of it. Sizes are in bytes, times in milliseconds."""
    return {
        "headwater": app.__version__,
        "complete": not plan.ended,
        "ended": plan.ended,
        "config": plan.subject.what,
        "deployment": plan.subject.name,
        "unit": plan.subject.unit,
        "cores": plan.subject.cores,
        "seconds": plan.subject.seconds,
        "memory": {"machine": plan.capacity, "host_budget": plan.budget.host, "device_budget": plan.budget.device},
        "weights": {"bytes": plan.weights.bytes, "how": plan.weights.how},
        "points": [
            {
                **_point(row.point),
                "error": row.error or None,
                "first_error": row.first_error or None,
                **(_measured(row.measured) if row.measured else {}),
            }
            for row in plan.sweep.rows
        ],
        "model": None if plan.predictor is None else _model(plan.predictor.memory),
        "held_out_error": plan.held_out,
        "sizes": [] if plan.predictor is None else [
            {**_point(row.point), **_predicted(row.predicted), "fits": not row.excess, "why_not": row.excess or None}
            for row in size_rows(plan)
        ],
        "checks": [_trial(trial) for trial in plan.trials],
        "profiles": [
            {
                "name": one.profile.name,
                "note": one.profile.note or None,
                "file": None if one.file is None else str(one.file),
                **({} if one.trial is None else {
                    **_trial(one.trial),
                    "bench": plan.subject.bench_arguments("URL", one.trial.point),
                }),
            }
            for one in plan.recommendations
        ],
        "tolerance": {"memory": MEMORY_TOLERANCE, "rate": RATE_TOLERANCE},
    }  # fmt: skip


def _point(point: Point) -> dict[str, Any]:
    return {"rows": point.rows, "instances": point.instances, "replicas": point.replicas}


def _measured(one: Measured) -> dict[str, Any]:
    return {
        "host_bytes": one.host,
        "device_bytes": one.device,
        "device": one.device_name,
        "server_bytes": one.memory.server,
        "shared_files_bytes": one.memory.files,
        "replica_bytes": round(one.memory.replica),
        "replica_starting_bytes": round(one.memory.starting),
        "cache_bytes": one.memory.cache,
        "rate": one.rate,
        "rates": list(one.rates) or [one.rate],
        "spread": one.spread,
        "p50_ms": one.p50_ms,
        "p99_ms": one.p99_ms,
        "connections": one.connections,
        "mean_rows": None if math.isnan(one.mean_rows) else one.mean_rows,
        "generator_cpu_share": one.load_share,
    }


def _predicted(one: Prediction) -> dict[str, Any]:
    return {
        "host_bytes": one.need.host, "device_bytes": one.need.device, "most_host_bytes": one.most.host,
        "most_device_bytes": one.most.device, "rate": one.rate, "p50_ms": one.p50_ms, "p99_ms": one.p99_ms,
    }  # fmt: skip


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        **_point(trial.point),
        "predicted": _predicted(trial.predicted),
        "measured": None if trial.measured is None else _measured(trial.measured),
        "error": trial.error or None,
        "comparisons": [one.told() for one in trial.comparisons],
    }


def _terms(terms: ReplicaTerms) -> dict[str, float]:
    return {"fixed": terms.fixed, "instance": terms.instance, "row": terms.row}


def _model(model: MemoryModel) -> dict[str, Any]:
    return {
        "server": model.server, "shared_files": model.files, "host": _terms(model.host), "device": _terms(model.device),
        "starting": _terms(model.starting),
    }  # fmt: skip
