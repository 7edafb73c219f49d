"""What clients and editors read of models: OpenAI's and Anthropic's lists, Ollama's and llama.cpp's routes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai.types import Model

from headwater.model import Embedding
from headwater.signature import LanguageModelSpec, Signature, TensorSpec, VllmSpec, text_signature
from headwater_server.config.schema import Server
from headwater_server.control.route_kinds import LanguageKind, VllmKind
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State
from headwater_server.gateway.app import create_app
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.editors import OLLAMA_VERSION
from headwater_server.gateway.routes.model_cards import model_card_routes
from headwater_server.lm.language_model import LmDispatcher
from tests.app.lm.scripted import FOLDER
from tests.app.lm.stand_in import LIMITS, Replica
from tests.app.lm.tool_text import tool_folder

SINCE = "2027-01-15T08:00:00Z"
REPLICAS = (ReplicaRoute("r", "unix:", "", "unix:grpc"),)


def language_model(name: str, folder: Path, **fields: Any) -> DeploymentRoute:
    signature = text_signature(name, folder, language_model=LanguageModelSpec(str(folder), LIMITS))
    fields = {"kind": LanguageKind(), "since_s": 1.8e9, **fields}
    return DeploymentRoute(name, State.READY, "", signature, REPLICAS, **fields)


VLLM = DeploymentRoute(
    "base", State.READY, "", text_signature("base", Path("llama"), vllm=VllmSpec(8, 512, 0, "0", max_lora_rank=8)),
    (ReplicaRoute("r", "unix:", ""),), since_s=1.8e9, kind=VllmKind({"tuned": 0}),
)  # fmt: skip
TENSORS = DeploymentRoute(
    "vectors", State.READY, "",
    Signature("vectors", (TensorSpec("text", "BYTES", (1,)),), (TensorSpec("embedding", "FP32", (3,)),),
              embedding=Embedding("text", "embedding")),
    (ReplicaRoute("r", "unix:", ""),), since_s=1.8e9,
)  # fmt: skip
PLAIN = DeploymentRoute(
    "plain", State.READY, "", Signature("plain", (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),)),
    (ReplicaRoute("r", "unix:", ""),), since_s=1.8e9,
)  # fmt: skip


@contextlib.asynccontextmanager
async def served(*routes: DeploymentRoute) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway with these deployments, whose chat templates are loaded."""
    models = Models(lambda name, route: Replica())
    models.update(RoutingTable(routes))
    for model in models:
        if isinstance(model.dispatcher, LmDispatcher):
            await model.dispatcher.text()
    app = create_app(models, Server(access_log=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield client
    models.close()


async def got(client: httpx.AsyncClient, path: str, **headers: str) -> Any:
    return (await client.get(path, headers=headers)).json()


async def test_openais_form_has_what_other_servers_clients_look_for(tmp_path: Path) -> None:
    hermes = language_model("hermes", tool_folder(tmp_path / "m", "hermes"))
    async with served(hermes, language_model("tiny", FOLDER), VLLM, PLAIN) as client:
        cards = {card["id"]: card for card in (await got(client, "/v1/models"))["data"]}
        assert list(cards) == ["hermes", "tiny", "base", "tuned", "plain"]
        for card in cards.values():
            assert Model.model_validate(card, strict=True).created == 1_800_000_000
        assert cards["hermes"] == {
            "id": "hermes", "object": "model", "created": 1_800_000_000, "owned_by": "headwater", "root": "hermes",
            "parent": None, "max_model_len": 64, "context_length": 64, "context_window": 64,
            "capabilities": {
                "responses": True, "messages": True, "tools": True, "reasoning": False, "images": False,
            },
        }  # fmt: skip
        assert cards["tiny"]["capabilities"]["tools"] is False
        assert cards["base"]["capabilities"] == {"responses": True, "messages": True}
        assert (cards["tuned"]["root"], cards["tuned"]["parent"]) == ("base", "base")
        assert "capabilities" not in cards["plain"]
        assert await got(client, "/v1/models/tuned") == cards["tuned"]
        assert await got(client, "/v1//models/tuned/") == cards["tuned"]
        assert await got(client, "http://server//v1/models/") == await got(client, "/v1/models")
        assert (await client.head("/v1/models/tiny")).status_code == 200


async def test_a_route_for_messages_is_a_capability() -> None:
    models = Models(lambda name, route: Replica())
    models.update(RoutingTable((language_model("tiny", FOLDER),)))
    app = FastAPI()
    app.include_router(model_card_routes(models))
    app.add_api_route("/v1/messages", lambda: None, methods=["POST"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        capabilities = (await got(client, "/v1/models/tiny"))["capabilities"]
    assert (capabilities["messages"], capabilities["responses"]) == (True, False)
    models.close()


async def test_anthropics_clients_get_their_form() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    async with served(language_model("tiny", FOLDER), VLLM) as client:
        listed = await got(client, "/v1/models?limit=1000", **headers)
        first = {"type": "model", "id": "tiny", "display_name": "tiny", "created_at": SINCE}
        assert listed["data"][0] == first
        assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "tiny", "tuned")
        assert await got(client, "/v1/models/tiny", **headers) == first
        unknown = await client.get("/v1/models/none", headers=headers)
        assert unknown.status_code == 404
        assert unknown.headers["request-id"] == unknown.json()["request_id"]
        assert unknown.json()["error"]["type"] == "not_found_error"
        assert (await got(client, "/v1/models/none"))["error"]["type"] == "invalid_request_error"
    async with served() as client:
        assert await got(client, "/v1/models", **headers) == {
            "data": [], "has_more": False, "first_id": None, "last_id": None
        }  # fmt: skip


async def test_ollamas_editors_find_the_models(tmp_path: Path) -> None:
    hermes = language_model("hermes", tool_folder(tmp_path / "m", "hermes"))
    async with served(hermes, VLLM, TENSORS, PLAIN) as client:
        assert await got(client, "/api/version") == {"version": OLLAMA_VERSION}
        listed = (await got(client, "/api/tags"))["models"]
        assert [model["name"] for model in listed] == ["hermes", "base", "tuned", "vectors"]
        details = {
            "parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "",
            "quantization_level": "",
        }  # fmt: skip
        assert listed[0] == {"name": "hermes", "model": "hermes", "modified_at": SINCE, "details": details}
        assert listed[2]["details"]["parent_model"] == "base"

        async def shown(**body: Any) -> Any:
            return (await client.post("/api/show", json=body)).json()

        about = await shown(model="hermes", verbose=True)
        architecture = about["model_info"]["general.architecture"]
        assert about["model_info"][f"{architecture}.context_length"] == 64
        assert about["capabilities"] == ["completion", "tools"]
        assert "<tool_call>" in about["template"]
        assert about["details"] == details
        assert await shown(name="hermes:latest") == about
        assert (await shown(model="tuned"))["capabilities"] == ["completion"]
        assert (await shown(model="vectors"))["capabilities"] == ["embedding"]
        assert (await shown(model="plain"))["capabilities"] == []


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{}", 400, "model: expected a model's name, got none"),
        (b'{"model": 1}', 400, "model: expected"),
        (b"[]", 400, "body: expected an object"),
        (b'{"model": "none:latest"}', 404, "model"),
    ],
)
async def test_what_is_wrong_with_show_is_named(body: bytes, status: int, message: str) -> None:
    async with served(VLLM) as client:
        answer = await client.post("/api/show", content=body)
        assert answer.status_code == status
        assert answer.json()["error"].startswith(message)


async def test_props_is_that_of_llama_cpp(tmp_path: Path) -> None:
    hermes = language_model("hermes", tool_folder(tmp_path / "m", "hermes"))
    async with served(hermes, PLAIN) as client:
        props = await got(client, "/props")
        assert props == await got(client, "/props?model=hermes")
        assert props["default_generation_settings"] == {"n_ctx": 64}
        assert (props["total_slots"], props["model_alias"]) == (4, "hermes")
        assert "<tool_call>" in props["chat_template"]
        assert props["modalities"] == {"vision": False, "audio": False}
        refused = await client.get("/props?model=plain")
        assert (refused.status_code, refused.json()["error"]) == (400, "model: `plain` is not a language model")
    async with served(hermes, VLLM) as client:
        refused = await client.get("/props")
        assert refused.status_code == 400
        assert refused.json()["error"].endswith("got none; this server has `hermes`, `base`")
        props = await got(client, "/props?model=base")
        assert (props["default_generation_settings"], "chat_template" in props) == ({"n_ctx": 512}, False)
