"""A deployment that vLLM computes is a language model wherever the server tells of its models."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.signature import Signature, VllmSpec, text_signature
from headwater_server.cli.announce import print_what_is_served
from headwater_server.config.schema import Server
from headwater_server.control.route_kinds import VllmKind
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State
from headwater_server.gateway.app import create_app
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.status import metrics_routes, status_routes
from headwater_server.gateway.sampler import Sampler
from headwater_server.telemetry.ledger import Ledger

SPEC = VllmSpec(max_sequences=8, context_length=512, cache_tokens=1000, version="0.32.0")
SIGNATURE = text_signature("chat", Path("models/llama"), vllm=SPEC)
POOLING = text_signature("chat", Path("models/bert"), vllm=VllmSpec(8, 256, 0, "0.32.0", embedding_length=384))
METRICS = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="chat"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="chat"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="chat"} 0.25
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="chat"} 4.0
"""


async def answer_metrics(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """What a vLLM says of itself."""
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /metrics ")
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(METRICS), METRICS))
    writer.close()


@contextlib.asynccontextmanager
async def gateway_with_vllm(signature: Signature = SIGNATURE) -> AsyncIterator[tuple[httpx.AsyncClient, Models]]:
    """A client of a gateway with one vLLM."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own is too long for a socket's path
        folder = Path(name)
        async with await asyncio.start_unix_server(answer_metrics, folder / "h"):
            models = Models()
            replica = ReplicaRoute("chat-1", f"unix:{folder / 'h'}", "", facts={"device": "cpu"})
            models.update(
                RoutingTable((DeploymentRoute("chat", State.READY, "", signature, (replica,), kind=VllmKind()),))
            )
            sampler = Sampler(models)
            Ledger(folder / "metrics")
            routers = metrics_routes(models, folder / "metrics", sampler), status_routes(models, None, sampler)
            app = create_app(models, Server(access_log=False), *routers)
            try:
                async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
                    yield client, models
            finally:
                models.update(RoutingTable(()))


async def test_metadata_and_statistics_are_those_of_a_language_model() -> None:
    async with gateway_with_vllm() as (client, _models):
        metadata = (await client.get("/v2/models/chat")).json()
        assert [one["name"] for one in metadata["inputs"] + metadata["outputs"]] == ["text_input", "text_output"]
        (told,) = (await client.get("/v2/models/chat/stats")).json()["model_stats"]
        assert told["language_model"]["limits"] == {"max_sequences": 8, "context_length": 512, "cache_tokens": 1000}
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert {path for path in paths if "chat" in path} == {
            "/v1/chat/completions", "/v2/models/chat/generate", "/v2/models/chat/generate_stream",
        }  # fmt: skip


async def test_the_status_page_gets_how_full_the_cache_is() -> None:
    async with gateway_with_vllm() as (client, _models):
        while True:  # until the worker has asked vLLM
            (chat,) = (await client.get("/v2/status")).json()["deployments"]
            found = chat["language_model"]
            if found["active_sequences"]:
                break
            await asyncio.sleep(0.01)
        assert chat["kind"] == "language model"
        assert (found["active_sequences"], found["waiting_sequences"]) == (3, 2)
        assert (found["cache_used_tokens"], found["cache_limit_tokens"]) == (250, 1000)


async def test_a_scrape_passes_its_own_series_through() -> None:
    async with gateway_with_vllm() as (client, _models):
        text = (await client.get("/metrics")).text
        labels = 'deployment="chat",engine="0",model_name="chat",replica="chat-1"'
        assert f"vllm:num_preemptions_total{{{labels}}} 4.0" in text
        assert 'headwater_scrape_errors_total{deployment="chat"}' not in text


def test_it_is_announced_with_what_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    print_what_is_served("http://here", [("chat", SIGNATURE, "")])
    said = capsys.readouterr().out
    assert "chat: language model, 512 tokens, 8 sequences at once, computed by vLLM 0.32.0" in said
    assert "http://here/v1/chat/completions" in said


async def test_one_that_pools_is_described_as_an_embedding_model(capsys: pytest.CaptureFixture[str]) -> None:
    async with gateway_with_vllm(POOLING) as (client, _models):

        async def got(path: str) -> Any:
            return (await client.get(path)).json()

        assert [one["id"] for one in (await got("/v1/models"))["data"]] == ["chat"]
        about = await got("/v2/models/chat")
        assert (about["platform"], about["outputs"][0]["shape"]) == ("vllm", [-1, 384])
        assert "model_transaction_policy" not in await got("/v2/models/chat/config")
        paths = (await got("/openapi.json"))["paths"]
        assert not [path for path in paths if "chat" in path or path in ("/v1/completions", "/v1/responses")]
        content = paths["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"]["properties"]["model"]["enum"] == ["chat"]
        (status,) = (await got("/v2/status"))["deployments"]
        assert status["kind"] == "embedding model"
    print_what_is_served("http://here", [("chat", POOLING, "")])
    said = capsys.readouterr().out
    assert "chat: embedding model, 256 tokens, 8 sequences at once, computed by vLLM 0.32.0" in said
    assert "http://here/v1/embeddings" in said
    assert "completions" not in said
