"""``GET /metrics`` in Prometheus' text format or OpenMetrics', and ``GET /v2/status``, the status page's data as JSON.

Both give the counts of the supervisor and all workers since the server's start; without metrics, ``/v2/status`` has
only its worker's counts. ``/metrics`` adds the series of the replicas' Triton and vLLM. A client of ``/v2/status``
computes rates from two answers.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

import headwater_server
from headwater_server.gateway.models import Models, ServedModel
from headwater_server.gateway.routes.metadata import index_entry
from headwater_server.gateway.sampler import Sampler
from headwater_server.telemetry.catalogue import ACCEPTED, CATALOGUE, IN_FLIGHT, OUTCOMES, REQUESTS
from headwater_server.telemetry.ledger import Counts, counts_by_deployment, read_records, read_totals, together
from headwater_server.telemetry.model_counts import read_model_totals
from headwater_server.telemetry.recorder import recorder

__all__ = ["metrics_routes", "status_routes"]

TIMES: Final = "headwater_request_seconds"
ROWS: Final = "headwater_batch_rows"
DIFFERENCE: Final = "headwater_shadow_difference"
_TEXT_COUNTS: Final = (
    "prompt_tokens", "cached_prompt_tokens", "generated_tokens", "active_sequences",
    "waiting_sequences", "cache_used_tokens", "cache_limit_tokens",
)  # fmt: skip


def metrics_routes(models: Models, folder: Path, sampler: Sampler) -> APIRouter:
    """The route ``/metrics``.

    Args:
        models: the models of this worker; their replicas' metrics are added.
        folder: the folder with the counts of all processes.
        sampler: sets this worker's gauges.
    """
    router = APIRouter(tags=["operations"])

    @router.get("/metrics", response_class=Response, summary="Metrics of the whole server, for Prometheus")
    async def metrics(request: Request) -> Response:
        # Imported in a thread, since the first import takes a tenth of a second.
        await asyncio.to_thread(importlib.import_module, "headwater_server.telemetry.exposition")
        from headwater_server.telemetry.exposition import ReplicaTarget, ask_replicas, exposition

        targets = [
            ReplicaTarget(
                model.route.name,
                replica.id,
                path.with_name(model.route.kind.metrics_socket or path.name),
                model.route.kind.metric_prefixes,
            )
            for model in models.with_steps()
            for replica in (*model.route.replicas, *model.route.retiring)
            if (path := replica.http_path) is not None  # Triton's socket for metrics is beside its socket for HTTP
        ]
        answers = await ask_replicas(targets)
        for answer in answers:
            if answer.text is None:
                recorder().count("headwater_scrape_errors", answer.deployment)
        sampler.sample()
        accept = request.headers.get("accept", "")
        body, media_type = await asyncio.to_thread(
            lambda: exposition(read_totals(folder), answers, accept, read_model_totals(folder))
        )
        return Response(body, media_type=media_type)

    return router


def status_routes(models: Models, folder: Path | None, sampler: Sampler) -> APIRouter:
    """The route ``/v2/status``.

    Args:
        models: the models of this worker.
        folder: the folder with the counts of all processes; None: the answer has only this process's counts, and says
            so in its ``scope``.
        sampler: sets this worker's gauges.
    """
    router = APIRouter(tags=["operations"])

    @router.get("/v2/status", summary="States, replicas and counts of the whole server, for the status page")
    async def status(request: Request) -> JSONResponse:
        request.state.is_routine = True
        sampler.sample()
        counts = counts_by_deployment(await read_records(folder))
        content = {
            "version": headwater_server.__version__,
            "now_s": time.time(),
            "draining": models.is_draining,
            "scope": "worker" if folder is None else "server",
            "bounds": {
                "seconds": [float(f"{bound * CATALOGUE[TIMES].scale:.10g}") for bound in CATALOGUE[TIMES].bounds],
                "rows": list(CATALOGUE[ROWS].bounds),
                "difference": [
                    float(f"{bound * CATALOGUE[DIFFERENCE].scale:g}") for bound in CATALOGUE[DIFFERENCE].bounds
                ],
            },
            "deployments": [
                _deployment(
                    model, models, together(counts[version.route.name] for version in models.versions_of(model))
                )
                for model in models.with_steps()
            ],
        }
        return JSONResponse(content, headers={"cache-control": "no-store"})

    return router


def _deployment(model: ServedModel, models: Models, counts: Counts) -> dict[str, Any]:
    route = model.route
    status = {
        **index_entry(model, models),
        "name": route.name,
        "kind": _kind(model),
        "part_of": route.part_of,
        "since_s": route.since_s,
        "replica_list": [
            {
                "id": replica.id,
                "state": state,
                "device": replica.device,
                "node": replica.node or None,
                "threads": counts.of_replica("headwater_replica_threads", replica.id),
                "resident_bytes": counts.of_replica("headwater_replica_resident_memory_bytes", replica.id),
                "batch_limit": counts.of_replica("headwater_replica_batch_limit", replica.id),
                "gpu_bytes": counts.of_replica("headwater_replica_gpu_memory_bytes", replica.id),
            }
            for state, replicas in (("READY", route.replicas), ("RETIRING", route.retiring))
            for replica in replicas
        ],
        "accepted": counts.total(ACCEPTED),
        "in_flight": counts.total(IN_FLIGHT),
        "outcomes": {outcome: counts.total(REQUESTS, outcome) for outcome in OUTCOMES},
        "seconds": counts.histogram(TIMES),
        "rows": counts.histogram(ROWS),
        "waiting": counts.total("headwater_queue_rows") + counts.total("headwater_waiting_sequences"),
        "retries": counts.total("headwater_retries"),
    }
    if route.traffic is not None:  # the counts are the sums over its versions
        traffic = route.traffic
        status |= {"traffic": traffic.shares, "default": traffic.default, "shadow": traffic.shadow or None}
        status |= {"before": traffic.before or None, "rolled_back": traffic.rolled_back or None}
        status["watched"] = traffic.is_watched
    if models.is_shadow(model):
        status["compared"] = _compared(counts)
    if route.takes_text:
        status["language_model"] = {
            "first_token": counts.histogram("headwater_time_to_first_token_seconds"),
            "inter_token": counts.histogram("headwater_inter_token_seconds"),
            **{name: counts.total(f"headwater_{name}") for name in _TEXT_COUNTS},
        }
    return status


def _compared(counts: Counts) -> dict[str, Any]:
    """Results of the comparison of a shadow's answers."""
    seconds = {by: counts.sum("headwater_shadow_seconds", by) for by in ("answer", "shadow")}
    scale = CATALOGUE["headwater_shadow_seconds"].scale
    return {
        "requests": counts.total("headwater_shadow_requests", "compared"),
        "failed": counts.total("headwater_shadow_requests", "failed"),
        "dropped": counts.total("headwater_shadow_dropped"),
        "rows": counts.total("headwater_shadow_rows"),
        "disagreements": counts.total("headwater_shadow_disagreements"),
        "difference": counts.histogram(DIFFERENCE),
        "mean_s": {by: total * scale / number if number else None for by, (number, total) in seconds.items()},
    }


def _kind(model: ServedModel) -> str:
    route = model.route
    if route.takes_text:
        return "embedding model" if route.gives_embeddings else "language model"
    if route.version:
        return "version"
    if route.part_of is not None:
        return "step"
    is_pipeline = route.kind.is_pipeline or (route.signature is not None and bool(route.signature.heads))
    return "pipeline" if is_pipeline else "model"
