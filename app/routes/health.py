"""Health: live is not ready is not model ready."""

from __future__ import annotations

from fastapi import APIRouter, Response

from app.control.routing import State, unavailable
from app.errors import Unavailable
from app.models import Models

__all__ = ["health_routes"]


def health_routes(models: Models) -> APIRouter:
    """``/v2/health/live``, ``/v2/health/ready`` and ``/v2/models/{model}/ready``."""
    router = APIRouter(tags=["health"])

    @router.get("/v2/health/live", response_class=Response, summary="Whether the gateway answers")
    async def live() -> Response:
        return Response()

    @router.get("/v2/health/ready", response_class=Response, summary="Whether every model is ready, but those unloaded")
    async def ready() -> Response:
        if models.is_draining:
            raise Unavailable("the server is stopping")
        waiting = [
            model.route for model in models if model.route.state is not State.READY and not model.route.is_set_aside
        ]
        if waiting:
            raise Unavailable("; ".join(unavailable(route).message for route in waiting))
        return Response()

    @router.get("/v2/models/{model}/ready", response_class=Response, summary="Whether the model is ready")
    @router.get("/v2/models/{model}/versions/{version}/ready", include_in_schema=False)
    async def model_ready(model: str, version: str | None = None) -> Response:
        models.get(model, version).dispatcher.check_ready()
        return Response()

    return router
