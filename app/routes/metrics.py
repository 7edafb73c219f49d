"""``GET /metrics``: what all processes of the server have counted, in Prometheus' text format or in OpenMetrics'."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from fastapi import APIRouter, Request, Response

from app.metrics.sampler import Sampler
from app.models import Models
from app.telemetry.exposition import TritonAnswer, TritonTarget, ask_tritons
from app.telemetry.ledger import read_totals
from app.telemetry.recorder import recorder

__all__ = ["metrics_routes"]


def metrics_routes(models: Models, folder: Path, sampler: Sampler) -> APIRouter:
    """The route.

    Args:
        models: whose replicas' Tritons are asked, too.
        folder: where the processes count.
        sampler: of this worker's gauges.
    """
    router = APIRouter(tags=["operations"])

    @router.get("/metrics", response_class=Response, summary="Metrics of the whole server, for Prometheus")
    async def metrics(request: Request) -> Response:
        targets = [
            TritonTarget(model.route.name, replica.id, replica.http_socket)
            for model in models.with_steps()
            for replica in (*model.route.replicas, *model.route.retiring)
        ]
        answers = await ask_tritons(targets)
        for answer in answers:
            if answer.text is None:
                recorder().count("headwater_scrape_errors", answer.target.deployment)
        sampler.sample()
        body, media_type = await asyncio.to_thread(_scrape, folder, answers, request.headers.get("accept", ""))
        return Response(body, media_type=media_type)

    return router


def _scrape(folder: Path, answers: Sequence[TritonAnswer], accept: str) -> tuple[bytes, str]:
    from app.telemetry.exposition import ReplicaText, exposition

    texts = [
        ReplicaText(answer.target.deployment, answer.target.replica, answer.text)
        for answer in answers
        if answer.text is not None
    ]
    return exposition(read_totals(folder), texts, accept)
