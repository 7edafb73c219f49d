"""Health, metadata, configurations and statistics of server and models, and OpenAI's list of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from operator import itemgetter
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

import headwater_server
from headwater.datatypes import DATATYPES
from headwater.signature import Signature, TensorSpec
from headwater_server.codecs.faults import read_json
from headwater_server.control.routing import ReplicaRoute, State, unavailable
from headwater_server.errors import NotFound, Unavailable
from headwater_server.gateway.http.bodies import BodyReader, decoded
from headwater_server.gateway.http.replies import RETRY_AFTER_S
from headwater_server.gateway.models import Models, ServedModel
from headwater_server.gateway.routes.triton_requests import repository_index, repository_statistics
from headwater_server.gateway.sampler import Sampler
from headwater_server.telemetry.catalogue import REQUESTS
from headwater_server.telemetry.ledger import Counts, counts_by_deployment, read_records
from headwater_server.telemetry.recorder import PHASE_SECONDS, recorder

__all__ = ["health_routes", "index_entry", "metadata_routes"]


_READY_MODEL: Final = "Only this model; may be repeated. Default: every model that wasn't unloaded"


def health_routes(models: Models, *, has_keys: bool = False) -> APIRouter:
    """``/v2/health/live``, ``/v2/models/{model}/ready`` and ``/v2/health/ready``. The last route is also ``/health``,
    as in vLLM, and ``/health/ready``, as in Triton's OpenAI frontend.

    Args:
        models: all models of this worker.
        has_keys: whether there are API keys. These routes need no key, but the answer to a request without a valid key
            doesn't say why a model isn't ready, and names no other models.
    """
    router = APIRouter(tags=["health"])

    def is_stranger(request: Request) -> bool:
        """Whether the server has API keys and the request has no valid key."""
        return has_keys and "key" not in request.scope.get("state", {})

    def find(request: Request, name: str, version: str | None = None) -> ServedModel:
        try:
            return models.get(name, version)
        except NotFound as error:
            if not is_stranger(request):
                raise
            subject = "model" if version is None else "model and version"
            raise NotFound(f"{subject}: unknown", field=error.field) from None

    def why_not(request: Request, model: ServedModel) -> Unavailable | None:
        """Why a model isn't ready, without details for a stranger; None: it is ready."""
        if models.is_leaving:
            return Unavailable("the server is stopping")
        try:
            model.dispatcher.check_ready()
        except Unavailable as error:
            return Unavailable(f"model `{model.name}` is not ready") if is_stranger(request) else error
        return None

    @router.get("/v2/health/live", summary="Whether the gateway answers")
    async def live() -> JSONResponse:
        return JSONResponse({"live": True})

    @router.get("/v2/health/ready", summary="Whether every model, or each named model, is ready")
    @router.get("/health", summary="The same, as vLLM has it")
    @router.get("/health/ready", summary="The same, as Triton's OpenAI frontend has it")
    @router.get("/ping", summary="The same, as SageMaker has it")
    async def ready(
        request: Request, model: Annotated[tuple[str, ...], Query(description=_READY_MODEL)] = ()
    ) -> JSONResponse:
        named = [find(request, name) for name in model]
        if models.is_leaving:
            return _readiness(Unavailable("the server is stopping"))
        if named:
            waiting = list(filter(None, (why_not(request, served) for served in named)))
        else:
            routes = (served.route for served in models if not served.route.is_set_aside)
            waiting = [unavailable(route) for route in routes if route.state is not State.READY]
            if waiting and is_stranger(request):
                waiting = [Unavailable("not every model is ready; with an API key this answer has the reasons")]
        if waiting:
            return _readiness(Unavailable("; ".join(error.message for error in waiting)))
        return _readiness(None)

    @router.get("/v2/models/{model}/ready", summary="Whether the model is ready")
    @router.get("/v2/models/{model}/versions/{version}/ready", summary="Whether the version is ready")
    async def model_ready(request: Request, model: str, version: str | None = None) -> JSONResponse:
        return _readiness(why_not(request, find(request, model, version)), name=model)

    return router


def _readiness(error: Unavailable | None, **about: str) -> JSONResponse:
    """The protocol's answer, with ``about`` as further fields. Its status is 200; with an error, it has the error's
    status and message, and ``Retry-After``."""
    if error is None:
        return JSONResponse({**about, "ready": True})
    headers = {"retry-after": str(error.retry_after_s or RETRY_AFTER_S)}
    return JSONResponse({**about, "ready": False, "error": error.message}, error.status, headers)


EXTENSIONS = [
    "binary_tensor_data", "generate", "model_configuration", "model_repository", "parameters", "schedule_policy",
    "statistics",
]  # fmt: skip


class _IndexRequest(msgspec.Struct, forbid_unknown_fields=True):
    ready: bool | None = None
    """True: list only models that are ready; else list all models."""


def _index_request(body: bytes) -> _IndexRequest:
    hint = 'expected {"ready": true or false} or an empty body'
    query: _IndexRequest = read_json(body if body.strip() else b"{}", _IndexRequest, hint=hint)
    return query


_INDEX_SCHEMA: Final = msgspec.json.schema_components((_IndexRequest,))[1][_IndexRequest.__name__]
_INDEX_BODY: Final = {"requestBody": {"content": {"application/json": {"schema": _INDEX_SCHEMA}}}}


def metadata_routes(models: Models, reader: BodyReader) -> APIRouter:
    """The Open Inference Protocol's metadata routes and Triton's extensions of them."""
    router = APIRouter(tags=["models"])

    async def counted() -> Mapping[str, Counts]:
        Sampler(models).sample()
        return counts_by_deployment(await read_records(recorder().folder))

    async def entries(*, is_ready: bool, as_triton: bool) -> list[dict[str, Any]]:
        """The index. ``as_triton``: without the deployments of repositories whose models are listed."""
        within, answered = await repository_index(models, is_ready=is_ready)
        answered = answered if as_triton else set()
        own = [
            index_entry(served, models)
            for served in models.by_version()
            if served.route.name not in answered and (not is_ready or served.route.state is State.READY)
        ]
        return own + within

    @router.get("/v2", summary="The server's name, version and protocol extensions")
    @router.get("/v2/", summary="The same")
    async def server() -> JSONResponse:
        return JSONResponse({"name": "headwater", "version": headwater_server.__version__, "extensions": EXTENSIONS})

    @router.get("/version", summary="The server's version, as vLLM has it")
    async def version() -> JSONResponse:
        return JSONResponse({"version": headwater_server.__version__})

    @router.get("/v2/models/stats", summary="Statistics of all models")
    async def all_statistics() -> JSONResponse:
        counts = await counted()
        statistics = [_statistics(served, counts[served.route.name]) for served in models.by_version()]
        return JSONResponse({"model_stats": statistics + await repository_statistics(models)})

    @router.get("/v2/models/{model}", summary="The model's inputs and outputs")
    @router.get("/v2/models/{model}/versions/{version}", summary="The version's inputs and outputs")
    async def metadata(model: str, version: str | None = None) -> JSONResponse:
        return JSONResponse(_metadata(models.get(model, version), models.get(model).versions))

    @router.get("/v2/models/{model}/config", summary="The model's configuration, in Triton's form")
    @router.get("/v2/models/{model}/versions/{version}/config", summary="The version's configuration")
    async def config(model: str, version: str | None = None) -> JSONResponse:
        return JSONResponse(_config(models.get(model, version)))

    @router.get("/v2/models/{model}/stats", summary="The model's statistics")
    @router.get("/v2/models/{model}/versions/{version}/stats", summary="The version's statistics")
    async def statistics(model: str, version: str | None = None) -> JSONResponse:
        versions = models.versions_of(models.get(model, version))
        counts = await counted()
        return JSONResponse({"model_stats": [_statistics(served, counts[served.route.name]) for served in versions]})

    @router.get("/v2/repository/index", summary="All models and their states")
    async def index() -> JSONResponse:
        return JSONResponse(await entries(is_ready=False, as_triton=False))

    @router.post("/v2/repository/index", summary="The same, as Triton has it", openapi_extra=_INDEX_BODY)
    async def index_by_post(request: Request) -> JSONResponse:
        body, _ = await reader.read(request.scope, request.receive)
        query = await decoded(_index_request, body, request.scope)
        return JSONResponse(await entries(is_ready=bool(query.ready), as_triton=True))

    return router


def index_entry(model: ServedModel, models: Models) -> dict[str, Any]:
    """A model's entry in the repository index: Triton's fields and Headwater's, such as replicas, devices and share."""
    route = model.route
    since = datetime.fromtimestamp(route.since_s, timezone.utc).isoformat(timespec="milliseconds")
    entry: dict[str, Any] = {
        "name": model.name,
        "version": model.version,
        "state": route.state.value,
        "reason": route.reason,
        "since": since.replace("+00:00", "Z"),
    }
    if (share := models.share(model)) is not None:
        entry["share"] = share
    if models.is_shadow(model):
        entry["shadow"] = True
    if route.has_replicas:
        wanted = 0 if route.is_set_aside else route.wanted
        entry["replicas"] = {"ready": len(route.replicas), "wanted": wanted, "min": route.least, "max": route.most}
        entry["devices"] = sorted({replica.device for replica in route.replicas})
        entry["environments"] = _environments(route.replicas)
        if nodes := Counter(replica.node for replica in route.replicas if replica.node):
            entry["nodes"] = dict(sorted(nodes.items()))
        if route.adapters:
            entry["adapters"] = list(route.adapters)
        if route.shortage:
            entry["shortage"] = route.shortage
    return entry


def _environments(replicas: Iterable[ReplicaRoute]) -> list[dict[str, Any]]:
    """The library versions that replicas run with, each set of versions with the ids of its replicas."""
    ids_by_versions: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for replica in replicas:
        ids_by_versions.setdefault(tuple(replica.versions.items()), []).append(replica.id)
    return [{"versions": dict(versions), "replicas": ids} for versions, ids in ids_by_versions.items()]


def _metadata(model: ServedModel, versions: list[str]) -> dict[str, Any]:
    signature = model.dispatcher.check_ready().public

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        labels = {"labels": list(spec.labels)} if spec.labels else {}
        ragged = {"ragged": True} if spec.ragged else {}
        return {"name": spec.name, "datatype": spec.datatype, "shape": [-1, *spec.shape], **labels, **ragged}

    return {
        "name": model.name,
        "versions": versions,
        "platform": model.route.kind.backend,
        "inputs": [tensor(spec) for spec in signature.inputs],
        "outputs": [tensor(spec) for spec in signature.outputs],
        **({"heads": msgspec.to_builtins(signature.heads)} if signature.heads else {}),
    }


def _config(model: ServedModel) -> dict[str, Any]:
    signature = model.dispatcher.check_ready().public
    route = model.route
    batching = {
        "preferred_batch_size": [signature.max_batch_size],
        "max_queue_delay_microseconds": int(route.max_queue_delay_ms * 1000),
    }
    states = [
        {
            "input_name": state.input, "output_name": state.output, "data_type": DATATYPES[state.datatype].config,
            "dims": list(state.shape),
        }
        for state in signature.states
    ]  # fmt: skip

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        return {"name": spec.name, "data_type": DATATYPES[spec.datatype].config, "dims": list(spec.shape)}

    return {
        "name": model.name,
        "platform": "",
        "backend": model.route.kind.backend,
        "max_batch_size": signature.max_batch_size,
        "input": [
            {**tensor(spec), "format": "FORMAT_NONE", "allow_ragged_batch": False, "optional": spec.optional}
            for spec in signature.inputs
        ],
        "output": [tensor(spec) for spec in signature.outputs],
        **({"model_transaction_policy": {"decoupled": True}} if signature.streams else {}),
        **({"sequence_batching": {"state": states}} if states else {"dynamic_batching": batching}),
        "instance_group": [
            {
                "name": replica.id,
                "kind": "KIND_GPU" if replica.device.startswith("cuda") else "KIND_CPU",
                "count": route.total_instances,
            }
            for replica in route.replicas
        ],
        "parameters": {
            parameter.name: {"string_value": f"{parameter.type}, default {parameter.default!r}, per {parameter.per}"}
            for parameter in signature.own_parameters
        },
    }


def _statistics(model: ServedModel, counts: Counts) -> dict[str, Any]:
    route = model.route
    executions, inferences = 0, counts.total("headwater_rows")
    failures, queue_ns = counts.total("headwater_failures"), 0
    # A pipeline's phases are counted with its steps. An engine does not report when it starts a sequence: the time in
    # its queue counts as computing.
    requests, compute_ns = counts.sum("headwater_request_seconds")
    if not route.takes_text and route.has_replicas:
        requests, compute_ns = counts.sum(PHASE_SECONDS, "compute")
        queue_ns = sum(counts.sum(PHASE_SECONDS, phase)[1] for phase in ("queue", "batch_wait"))
    more: dict[str, Any] = {}
    batches = []
    if route.takes_text:
        inferences, executions = counts.total("headwater_sequences"), counts.total("headwater_frames")
        failures = sum(counts.total(REQUESTS, outcome) for outcome in ("timeout", "failed", "unavailable", "lost"))
        more["language_model"] = _language_model_statistics(route.signature, counts, requests, failures)
    else:
        for rows, (calls, took_ns) in counts.statistics("headwater_batches"):
            executions += calls
            batches.append(
                {
                    "batch_size": int(rows),
                    "compute_input": {"count": calls, "ns": 0},
                    "compute_infer": {"count": calls, "ns": took_ns},
                    "compute_output": {"count": calls, "ns": 0},
                }
            )
        if steps := counts.statistics("headwater_steps"):
            more["steps"] = {
                step: {"execution_count": calls, "retries": retries, "compute_ns": took_ns}
                for step, (calls, retries, took_ns) in steps
            }
    return {
        "name": model.name,
        "version": model.version,
        "inference_count": inferences,
        "execution_count": executions,
        "inference_stats": {
            "success": {"count": requests, "ns": queue_ns + compute_ns},
            "fail": {"count": failures, "ns": 0},
            "queue": {"count": requests, "ns": queue_ns},
            "compute_input": {"count": requests, "ns": 0},
            "compute_infer": {"count": requests, "ns": compute_ns},
            "compute_output": {"count": requests, "ns": 0},
        },
        "batch_stats": sorted(batches, key=itemgetter("batch_size")),
        **more,
    }


def _language_model_statistics(
    signature: Signature | None, counts: Counts, requests: int, failures: int
) -> dict[str, Any]:
    first_tokens, first_token_ns = counts.sum("headwater_time_to_first_token_seconds")
    statistics: dict[str, Any] = {
        "requests": requests,
        "failures": failures,
        "shed": counts.total(REQUESTS, "shed"),
        "cancelled": counts.total(REQUESTS, "cancelled"),
        "prompt_tokens": counts.total("headwater_prompt_tokens"),
        "cached_prompt_tokens": counts.total("headwater_cached_prompt_tokens"),
        "generated_tokens": counts.total("headwater_generated_tokens"),
        "first_token": {"count": first_tokens, "ns": first_token_ns},
        "contract_violations": counts.total("headwater_contract_violations"),
        "sequences": {
            "active": counts.total("headwater_active_sequences"),
            "waiting": counts.total("headwater_waiting_sequences"),
        },
        "cache_used": counts.total("headwater_cache_used_tokens"),
    }
    if signature is not None and (limits := signature.limits) is not None:  # limits of one replica
        names = ("max_sequences", "max_waiting", "context_length", "cache_tokens")
        statistics["limits"] = {name: getattr(limits, name) for name in names if hasattr(limits, name)}
    return statistics
