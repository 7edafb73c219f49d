"""The models that are ready, in OpenAI's form, or in Anthropic's for its clients."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from headwater_server.control.routing import State
from headwater_server.gateway.http.replies import MODELS_PATH, answers_as_anthropic
from headwater_server.gateway.models import Models, ServedModel
from headwater_server.lm.language_model import LmDispatcher

if TYPE_CHECKING:
    from headwater_server.lm.text.language import LanguageText

__all__ = ["default_version", "generates_text", "known_text", "model_card_routes", "ready_models", "ready_since"]

_ROUTES: Final = {"responses": "/v1/responses", "messages": "/v1/messages"}
"""Capabilities that are routes for every model of text."""


def model_card_routes(models: Models) -> APIRouter:
    """``/v1/models`` and ``/v1/models/{model}``: the models and adapters that are ready, in OpenAI's form with vLLM's
    further fields, or in Anthropic's form for a request with the header ``anthropic-version``."""
    router = APIRouter(tags=["openai"])

    def card(request: Request, model: ServedModel) -> dict[str, Any]:
        if answers_as_anthropic(request.scope):
            return {"type": "model", "id": model.name, "display_name": model.name, "created_at": ready_since(model)}
        route = model.route
        created = int(route.since_s)  # when the model became ready, the same on all workers
        is_adapter = model.name != route.name
        about: dict[str, Any] = {
            "id": model.name, "object": "model", "created": created, "owned_by": "headwater", "root": route.name,
            "parent": route.name if is_adapter else None,
        }  # fmt: skip
        limits = None if (signature := route.signature) is None else signature.limits
        if limits is not None:  # under the names that clients of vLLM, OpenRouter and Groq look for
            about |= dict.fromkeys(("max_model_len", "context_length", "context_window"), limits.context_length)
        if generates_text(model):
            paths = {getattr(each, "path", "") for each in request.app.routes}
            about["capabilities"] = {name: path in paths for name, path in _ROUTES.items()}
            if (text := known_text(models, model)) is not None:
                reasons = text.reasoning_format is not None
                about["capabilities"] |= {"tools": text.tool_format is not None, "reasoning": reasons, "images": False}
        return about

    @router.get(MODELS_PATH, summary="The models that are ready, in OpenAI's form or Anthropic's")
    async def list_models(request: Request) -> JSONResponse:
        cards = [card(request, model) for model in ready_models(models)]
        if not answers_as_anthropic(request.scope):
            return JSONResponse({"object": "list", "data": cards})
        ends = (
            {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
            if cards
            else dict.fromkeys(("first_id", "last_id"))
        )
        return JSONResponse({"data": cards, "has_more": False, **ends})

    @router.get(f"{MODELS_PATH}/{{model}}", summary="One model that is ready")
    async def one_model(request: Request, model: str) -> JSONResponse:
        served = models.get(model)
        served.dispatcher.check_ready()
        return JSONResponse(card(request, served))

    return router


def ready_models(models: Models) -> list[ServedModel]:
    """The models that are ready, each followed by its adapters."""
    named = (served for model in models for served in (model, *map(models.get, model.route.adapters)))
    return [model for model in named if model.route.state is State.READY]


def ready_since(model: ServedModel) -> str:
    """When the model became ready, in RFC 3339."""
    since = datetime.fromtimestamp(int(model.route.since_s), timezone.utc)
    return since.isoformat().replace("+00:00", "Z")


def generates_text(model: ServedModel) -> bool:
    """Whether the model is a language model that answers with text."""
    return model.route.takes_text and not model.route.gives_embeddings


def default_version(models: Models, model: ServedModel) -> ServedModel:
    """The version of a model with versions that answers by default; any other model itself."""
    return model if model.route.traffic is None else models.get(model.name, model.version)


def known_text(models: Models, model: ServedModel) -> LanguageText | None:
    """A language model's tokenizer and chat template. None: they aren't loaded, or vLLM computes the model."""
    dispatcher = default_version(models, model).dispatcher
    return dispatcher.loaded_text if isinstance(dispatcher, LmDispatcher) else None
