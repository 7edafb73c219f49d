"""The OpenAPI schema: it describes every route, and what answers it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from fastapi import FastAPI

from headwater.model import Classification, Embedding, Reranking, Transcription
from headwater.signature import Signature, TensorSpec
from headwater_server.control.routing import DeploymentRoute, State
from headwater_server.gateway.http.replies import ANTHROPIC_PATH, OPENAI_PATHS
from headwater_server.gateway.models import Models
from headwater_server.gateway.openapi.openapi_schema import openapi_schema
from tests.app.lm.stand_in import route_of
from tests.app.security.test_key_check import KEYS, TABLE, Ring, bearer, filled

PAGES: Final = ("/", "/static/{name}", "/docs", "/docs/assets/x", "/openapi.json")
TEXT: Final = TensorSpec("text", "BYTES", (1,))
MAPPED: Final = Signature(
    "mapped", (TEXT,), (TensorSpec("y", "FP32", (1,)),), embedding=Embedding("text", "y"),
    reranking=Reranking("text", "text", "y"), classification=Classification("text", "y"),
    transcription=Transcription("text", "y"),
)  # fmt: skip
DESCRIBED: Final = [(method, path) for method, path in TABLE if path not in PAGES]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Ring:
    """A gateway that has no model."""
    return Ring(tmp_path_factory.mktemp("gateway"))


@pytest.fixture(scope="module")
def operations(gateway: Ring) -> dict[tuple[str, str], Any]:
    """What a schema describes with a model of each kind, by method and path."""
    routes = (route_of("lm-0"), DeploymentRoute("mapped", State.READY, "", MAPPED))
    models = cast(Models, [SimpleNamespace(route=route) for route in routes])
    assert isinstance(gateway.app.framework, FastAPI)
    schema = openapi_schema(FastAPI.openapi(gateway.app.framework), models, has_keys=True)
    ids = [one["operationId"] for by_method in schema["paths"].values() for one in by_method.values()]
    assert len(ids) == len(set(ids))
    return {
        (method.upper(), path): described
        for path, by_method in schema["paths"].items()
        for method, described in by_method.items()
    }


@pytest.mark.parametrize(("method", "path"), DESCRIBED, ids=lambda one: one)
def test_every_route_is_described_with_its_404(
    gateway: Ring, operations: dict[tuple[str, str], Any], method: str, path: str
) -> None:
    described = operations[method, path.replace(":path", "")]["responses"]["404"]
    kind = "OpenAIError" if path.startswith(OPENAI_PATHS) else "Error"
    kind = "AnthropicError" if path.startswith(ANTHROPIC_PATH) else kind
    assert described["content"] == {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}"}}}
    scope: Any = (TABLE[method, path] or ("infer",))[0]
    answer = gateway.ask(method, filled(path), bearer(KEYS[scope]), b"{}")
    if answer.status_code == 404:
        assert isinstance(answer.json()["error"], dict if kind == "OpenAIError" else str)
