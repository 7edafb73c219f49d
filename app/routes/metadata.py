"""What is served: the server's and the models' metadata, configurations, statistics, and the repository index."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

import app
from app.bodies import BodyReader
from app.errors import BadRequest
from app.lm.dispatcher import LmDispatcher
from app.models import VERSION, Models, ServedModel
from app.routing import State
from inference.datatypes import DATATYPES
from inference.signature import Signature, TensorSpec

__all__ = ["index_entry", "metadata_routes"]

EXTENSIONS = [
    "binary_tensor_data",
    "generate",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
]


class _IndexRequest(msgspec.Struct, forbid_unknown_fields=True):
    ready: bool = False
    """Only models that are ready."""


def metadata_routes(models: Models, reader: BodyReader) -> APIRouter:
    """The Open Inference Protocol's metadata routes and Triton's extensions of them."""
    router = APIRouter(tags=["models"])

    @router.get("/v2", summary="The server's name, version and protocol extensions")
    @router.get("/v2/", include_in_schema=False)
    async def server() -> JSONResponse:
        return JSONResponse({"name": "headwater", "version": app.__version__, "extensions": EXTENSIONS})

    @router.get("/v2/models/stats", summary="Statistics of all models")
    async def all_statistics() -> JSONResponse:
        return JSONResponse({"model_stats": [_statistics(model) for model in models.with_steps()]})

    @router.get("/v2/models/{model}", summary="The model's inputs and outputs")
    @router.get("/v2/models/{model}/versions/{version}", include_in_schema=False)
    async def metadata(model: str, version: str | None = None) -> JSONResponse:
        return JSONResponse(_metadata(models.get(model, version).dispatcher.check_ready()))

    @router.get("/v2/models/{model}/config", summary="The model's configuration, in Triton's form")
    @router.get("/v2/models/{model}/versions/{version}/config", include_in_schema=False)
    async def config(model: str, version: str | None = None) -> JSONResponse:
        return JSONResponse(_config(models.get(model, version)))

    @router.get("/v2/models/{model}/stats", summary="The model's statistics, of the worker that answers")
    @router.get("/v2/models/{model}/versions/{version}/stats", include_in_schema=False)
    async def statistics(model: str, version: str | None = None) -> JSONResponse:
        return JSONResponse({"model_stats": [_statistics(models.get(model, version))]})

    @router.get("/v2/repository/index", summary="All models and their states")
    async def index() -> JSONResponse:
        return JSONResponse([index_entry(model) for model in models.with_steps()])

    @router.post("/v2/repository/index", include_in_schema=False)  # Triton's form of the same
    async def index_by_post(request: Request) -> JSONResponse:
        body, _ = await reader.read(request.scope, request.receive)
        try:
            asked = msgspec.json.decode(body, type=_IndexRequest) if body.strip() else _IndexRequest()
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f'body: expected {{"ready": true or false}} or nothing: {error}', field="body") from error
        return JSONResponse(
            [index_entry(one) for one in models.with_steps() if not asked.ready or one.route.state is State.READY]
        )

    return router


def index_entry(model: ServedModel) -> dict[str, Any]:
    """What the repository index says of a model."""
    route = model.route
    since = datetime.fromtimestamp(route.since_s, timezone.utc).isoformat(timespec="milliseconds")
    entry: dict[str, Any] = {
        "name": route.name,
        "version": VERSION,
        "state": route.state.value,
        "reason": route.reason,
        "since": since.replace("+00:00", "Z"),
    }
    if not route.is_graph:
        wanted = 0 if route.is_set_aside else route.wanted
        entry["replicas"] = {"ready": len(route.replicas), "wanted": wanted, "min": route.least, "max": route.most}
        entry["devices"] = sorted({replica.device for replica in route.replicas})
        if route.shortage:
            entry["shortage"] = route.shortage
    return entry


def _metadata(signature: Signature) -> dict[str, Any]:
    def tensor(spec: TensorSpec) -> dict[str, Any]:
        told: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": [-1, *spec.shape]}
        if spec.labels:
            told["labels"] = list(spec.labels)
        return told

    metadata: dict[str, Any] = {
        "name": signature.name,
        "versions": [VERSION],
        "platform": "python",
        "inputs": [tensor(spec) for spec in signature.inputs],
        "outputs": [tensor(spec) for spec in signature.outputs],
    }
    if signature.heads:
        metadata["heads"] = [
            {
                "name": head.name,
                "outputs": list(head.outputs),
                "on_error": head.on_error,
                "timeout_s": head.timeout_s,
            }
            for head in signature.heads
        ]
    return metadata


def _config(model: ServedModel) -> dict[str, Any]:
    signature = model.dispatcher.check_ready()
    route = model.route

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        return {"name": spec.name, "data_type": DATATYPES[spec.datatype].config, "dims": list(spec.shape)}

    return {
        "name": signature.name,
        "platform": "",
        "backend": "python",
        "max_batch_size": signature.max_batch_size,
        "input": [
            {**tensor(spec), "format": "FORMAT_NONE", "allow_ragged_batch": False, "optional": spec.optional}
            for spec in signature.inputs
        ],
        "output": [tensor(spec) for spec in signature.outputs],
        "dynamic_batching": {
            "preferred_batch_size": [signature.max_batch_size],
            "max_queue_delay_microseconds": int(route.max_queue_delay_ms * 1000),
        },
        "instance_group": [{"name": replica.id, "count": route.total_instances} for replica in route.replicas],
        "parameters": {
            parameter.name: {"string_value": f"{parameter.type}, default {parameter.default!r}, per {parameter.per}"}
            for parameter in signature.parameters
        },
    }


def _statistics(model: ServedModel) -> dict[str, Any]:
    if isinstance(model.dispatcher, LmDispatcher):
        return _language_model_statistics(model.dispatcher)
    counts = model.dispatcher.statistics
    told: dict[str, Any] = {
        "name": model.route.name,
        "version": VERSION,
        "inference_count": counts.rows,
        "execution_count": counts.calls,
        "inference_stats": {
            "success": {"count": counts.requests, "ns": counts.queue_ns + counts.compute_ns},
            "fail": {"count": counts.failures, "ns": 0},
            "queue": {"count": counts.requests, "ns": counts.queue_ns},
            "compute_input": {"count": counts.requests, "ns": 0},
            "compute_infer": {"count": counts.requests, "ns": counts.compute_ns},
            "compute_output": {"count": counts.requests, "ns": 0},
        },
        "batch_stats": [],
    }
    if counts.steps:
        told["steps"] = {
            step.step: {"execution_count": step.calls, "retries": step.retries, "compute_ns": step.compute_us * 1000}
            for step in counts.steps.values()
        }
    return told


def _language_model_statistics(dispatcher: LmDispatcher) -> dict[str, Any]:
    counts = dispatcher.statistics
    load = dispatcher.load
    told: dict[str, Any] = {
        "requests": counts.requests,
        "failures": counts.failures,
        "shed": counts.shed,
        "cancelled": counts.cancelled,
        "prompt_tokens": counts.prompt_tokens,
        "generated_tokens": counts.generated_tokens,
        "first_token": {"count": counts.first_tokens, "ns": counts.first_token_ns},
        "contract_violations": counts.contract_violations,
        "sequences": {"active": load.active, "waiting": load.waiting},
        "cache_used": load.cache_used,
    }
    signature = dispatcher.signature
    if signature is not None and signature.language_model is not None:
        limits = signature.language_model.limits
        told["limits"] = {  # of one replica
            "max_sequences": limits.max_sequences,
            "max_waiting": limits.max_waiting,
            "context_length": limits.context_length,
            "cache_tokens": limits.cache_tokens,
        }
    return {
        "name": dispatcher.route.name,
        "version": VERSION,
        "inference_count": counts.sequences,
        "execution_count": counts.frames,
        "inference_stats": {
            "success": {"count": counts.requests, "ns": counts.total_ns},
            "fail": {"count": counts.failures, "ns": 0},
            # An engine doesn't tell when it began with a sequence: waiting is part of computing here.
            "queue": {"count": counts.requests, "ns": 0},
            "compute_input": {"count": counts.requests, "ns": 0},
            "compute_infer": {"count": counts.requests, "ns": counts.total_ns},
            "compute_output": {"count": counts.requests, "ns": 0},
        },
        "batch_stats": [],
        "language_model": told,
    }
