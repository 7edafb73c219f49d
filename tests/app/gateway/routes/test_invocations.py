"""Which route answers a body of ``/invocations`` or ``/``, and which model a request means."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from headwater_server.config.schema import Server
from headwater_server.control.routing import DeploymentRoute, RoutingTable, State
from headwater_server.errors import BadRequest, Unavailable
from headwater_server.gateway.app import create_app
from headwater_server.gateway.models import Models
from tests.app.gateway.routes.mapped_model import MappedModel
from tests.app.gateway.routes.test_tei import classifier, embedder, ranker


@pytest.mark.parametrize(
    ("model", "body", "expected"),
    [
        (embedder(), {"inputs": "a"}, [[1, 0]]),
        (embedder(), {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, [0]),
        (classifier(), {"inputs": "abc", "parameters": {}}, [[("long", 0.75), ("short", 0.25)]]),
        (ranker(), {"inputs": ["ab", "b"]}, [("s", 1)]),
        (ranker(), {"query": "a", "texts": ["a"]}, [(0, 1)]),
    ],
)
def test_a_body_of_tei_goes_where_the_model_answers_it(model: MappedModel, body: Any, expected: Any) -> None:
    for path in ("/invocations", "/", "/?model=m"):
        answer = model.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert values(answer.json()) == expected


def values(content: Any) -> Any:
    """Objects as tuples of their values."""
    if isinstance(content, dict):
        return tuple(content.values())
    return [values(item) for item in content] if isinstance(content, list) else content


@pytest.mark.parametrize(
    ("model", "body", "kind"),
    [
        (embedder(), {"input": "a", "model": "m"}, "embedding"),
        (classifier(), {"input": "abc"}, "classification"),
        (ranker(), {"text_1": "a", "text_2": "b"}, "score"),
        (ranker(), {"queries": "a", "documents": "b"}, "score"),
    ],
)
def test_a_body_of_vllm_goes_where_the_model_answers_it(model: MappedModel, body: Any, kind: str) -> None:
    answer = model.post("/invocations", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["object"] == kind


def test_other_bodies() -> None:
    answer = ranker().post("/invocations", json={"query": "a", "documents": ["a"]})
    assert answer.json()["results"][0]["relevance_score"] == 1
    assert embedder().post("/invocations", json={"texts": ["a"]}).json()["embeddings"] == {"float": [[1, 0]]}
    answer = embedder().post("/invocations", json={"x": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("body: expected one of the fields messages, prompt, query")
    assert embedder().post("/", json={"inputs": 1}).json()["error"].startswith("inputs: expected a string")
    assert embedder().post("/invocations", json=[1]).status_code == 400


# Which model is meant


def models(*mapped: MappedModel, states: str = "") -> Models:
    """Models ``m0``, ``m1``, ... with the signatures of these, and one for each letter that has not loaded."""
    table = Models()
    routes = [DeploymentRoute(f"m{n}", State.READY, signature=one.signature) for n, one in enumerate(mapped)]
    routes += [DeploymentRoute(letter, State.LOADING) for letter in states]
    table.update(RoutingTable(deployments=tuple(routes)))
    return table


def test_the_only_model_with_a_mapping_is_meant() -> None:
    async def check() -> None:
        served = models(embedder(), classifier(), states="x")
        assert served.only(("embedding",)) == "m0"
        assert served.only(("classification", "reranking")) == "m1"
        with pytest.raises(BadRequest, match=r"got neither; models that can be meant: `m0`, `m1`"):
            served.only(("embedding", "classification"))
        with pytest.raises(Unavailable, match="model `x` is LOADING"):
            served.only(("reranking",))
        with pytest.raises(BadRequest, match=r"no model of this server can answer here: none declares `reranking`"):
            models(embedder()).only(("reranking",))
        assert served.mapping_of("m1", ("embedding", "classification")) == "classification"
        assert served.mapping_of("m1", ("embedding", "reranking")) == "embedding"

    asyncio.run(check())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "x"}),
        ("/v2/embed", {"texts": ["x"]}),
        ("/v1/embeddings", {"input": "x"}),
        ("/pooling", {"input": "x", "task": "embed"}),
    ],
)
def test_of_several_models_one_must_be_named(path: str, body: dict[str, Any]) -> None:
    async def check() -> None:
        served = models(embedder(), embedder())
        app = create_app(served, Server(access_log=False))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            answer = await client.post(path, json=body)
            assert (answer.status_code, "models that can be meant: `m0`, `m1`" in answer.text) == (400, True)
            for query, model in (("?model=m0", None), ("?model=m0&x=1", "m0"), ("", "m0")):
                named = body if model is None else {**body, "model": model}
                answer = await client.post(f"{path}{query}", json=named)
                assert answer.status_code == 503, answer.text  # it has no replica
            answer = await client.post(f"{path}?model=m0", json={**body, "model": "m1"})
            assert (answer.status_code, "expected one name, in the body or as ?model=" in answer.text) == (400, True)
            answer = await client.post(f"{path}?model=", json=body)
            assert answer.status_code == 404

    asyncio.run(check())


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (embedder(), {"embedding": {}}),
        (ranker(), {"reranker": {}}),
        (
            classifier(),
            {"classifier": {"id2label": {"0": "short", "1": "long"}, "label2id": {"short": 0, "long": 1}}},
        ),
    ],
)
def test_info_describes_a_model(model: MappedModel, kinds: dict[str, Any]) -> None:
    for path in ("/info", "/info?model=m"):
        info = model.send("GET", path).json()
        assert (info["model_id"], info["model_type"], info["max_client_batch_size"]) == ("m", kinds, 2048)
        assert model.send("GET", "/version").json() == {"version": info["version"]}
