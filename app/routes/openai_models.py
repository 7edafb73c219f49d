"""``/v1/models``: OpenAI's list of models."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from app.control.routing import State
from app.models import Models, ServedModel

__all__ = ["openai_model_routes"]


def openai_model_routes(models: Models) -> APIRouter:
    """The models that are ready, in OpenAI's form."""
    router = APIRouter(tags=["openai"])
    created = int(time.time())

    def entry(model: ServedModel) -> dict[str, Any]:
        return {"id": model.route.name, "object": "model", "created": created, "owned_by": "headwater"}

    @router.get("/v1/models", summary="The models that are ready")
    async def list_models() -> JSONResponse:
        ready = [entry(model) for model in models if model.route.state is State.READY]
        return JSONResponse({"object": "list", "data": ready})

    @router.get("/v1/models/{model}", summary="One model")
    async def one_model(model: str) -> JSONResponse:
        return JSONResponse(entry(models.get(model)))

    return router
