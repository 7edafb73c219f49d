"""Read-only routes by which editors find the models of local servers: Ollama's and llama.cpp's.

Source: Ollama's API reference (docs.ollama.com/api), and the README of llama.cpp's server. Fields about model files
(size, digest, quantization) are left out or empty, since the gateway doesn't know the files.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

import headwater_server
from headwater_server.codecs.faults import at, read_json
from headwater_server.errors import BadRequest, NotFound
from headwater_server.gateway.http.bodies import BodyReader, decoded
from headwater_server.gateway.models import Models, ServedModel
from headwater_server.gateway.routes.model_cards import (
    default_version,
    generates_text,
    known_text,
    ready_models,
    ready_since,
)
from headwater_server.lm.language_model import LmDispatcher

__all__ = ["OLLAMA_VERSION", "editor_routes"]

OLLAMA_VERSION: Final = "0.12.6"
"""The version of Ollama whose API these routes follow. Editors refuse a server with an older version."""
_ARCHITECTURE: Final = "headwater"
"""Prefix of the keys in Ollama's ``model_info``; in Ollama the model's architecture, which the gateway doesn't know."""
_LATEST: Final = ":latest"


class _ShowRequest(msgspec.Struct):
    model: str | None = None
    name: str | None = None
    """The former name of ``model``."""


def _show_request(body: bytes) -> _ShowRequest:
    request: _ShowRequest = read_json(body, _ShowRequest, hint='expected {"model": NAME}')
    return request


_SHOW_SCHEMA: Final = {"type": "object", "required": ["model"], "properties": {"model": {"type": "string"}}}
_SHOW_BODY: Final = {"requestBody": {"content": {"application/json": {"schema": _SHOW_SCHEMA}}}}


def editor_routes(models: Models, reader: BodyReader) -> APIRouter:
    """Ollama's ``/api/version``, ``/api/tags`` and ``/api/show``, and llama.cpp's ``/props``.

    Args:
        models: all models of this worker.
        reader: reads bodies.
    """
    router = APIRouter(tags=["models"])

    @router.get("/api/version", summary="The version of Ollama's API that the server follows")
    async def version() -> JSONResponse:
        return JSONResponse({"version": OLLAMA_VERSION})

    @router.get("/api/tags", summary="The language and embedding models that are ready, as Ollama has them")
    async def tags() -> JSONResponse:
        listed = [
            {"name": model.name, "model": model.name, "modified_at": ready_since(model), "details": _details(model)}
            for model in ready_models(models)
            if _capability(model)
        ]
        return JSONResponse({"models": listed})

    @router.post("/api/show", summary="A model that is ready, as Ollama has it", openapi_extra=_SHOW_BODY)
    async def show(request: Request) -> JSONResponse:
        body, _ = await reader.read(request.scope, request.receive)
        asked = await decoded(_show_request, body, request.scope)
        name = asked.model or asked.name
        if not name:
            raise at("model", None, "expected a model's name, got none")
        try:
            model = models.get(name)
        except NotFound:
            if not name.endswith(_LATEST):
                raise
            model = models.get(name.removesuffix(_LATEST))
        model.dispatcher.check_ready()
        return JSONResponse(_shown(models, model))

    @router.get("/props", summary="A language model that is ready, as llama.cpp's server has it")
    async def props(model: str | None = None) -> JSONResponse:
        served = default_version(models, models.get(_only(models) if model is None else model))
        signature = served.dispatcher.check_ready()
        if not generates_text(served) or signature.limits is None:
            raise BadRequest(f"model: `{served.name}` is not a language model", field="model")
        about: dict[str, Any] = {
            "default_generation_settings": {"n_ctx": signature.limits.context_length},
            "total_slots": signature.limits.max_sequences,
            "model_alias": served.name,
            "build_info": f"headwater {headwater_server.__version__}",
        }
        if isinstance(served.dispatcher, LmDispatcher):
            templates = (await served.dispatcher.text()).tokenizer.chat_templates
            about |= {"chat_template": templates.get("default", ""), "modalities": {"vision": False, "audio": False}}
        return JSONResponse(about)

    return router


def _only(models: Models) -> str:
    """The name of the only language model.

    Raises:
        BadRequest: there are several, or there is none.
    """
    names = [model.name for model in models if generates_text(model)]
    if len(names) != 1:
        listing = ", ".join(f"`{name}`" for name in names) or "none"
        message = f"model: expected ?model=NAME with the name of a language model, got none; this server has {listing}"
        raise BadRequest(message, field="model")
    return names[0]


def _capability(model: ServedModel) -> str:
    """Ollama's name for what the model does; empty if it is neither a language nor an embedding model."""
    if generates_text(model):
        return "completion"
    return "embedding" if model.route.gives_embeddings else ""


def _details(model: ServedModel) -> dict[str, Any]:
    parent = model.route.name if model.name != model.route.name else ""
    empty = dict.fromkeys(("format", "family", "parameter_size", "quantization_level"), "")
    return {"parent_model": parent, **empty, "families": []}


def _shown(models: Models, model: ServedModel) -> dict[str, Any]:
    signature = model.route.signature
    limits = None if signature is None else signature.limits
    about: dict[str, Any] = {"general.architecture": _ARCHITECTURE, "general.basename": model.name}
    if limits is not None:
        about[f"{_ARCHITECTURE}.context_length"] = limits.context_length
    capabilities = [kind for kind in (_capability(model),) if kind]
    text = known_text(models, model)
    if text is not None and text.tool_format is not None:
        capabilities.append("tools")
    if text is not None and text.reasoning_format is not None:
        capabilities.append("thinking")
    return {
        "modified_at": ready_since(model),
        "template": "" if text is None else text.tokenizer.chat_templates.get("default", ""),
        "details": _details(model),
        "model_info": about,
        "capabilities": capabilities,
    }
