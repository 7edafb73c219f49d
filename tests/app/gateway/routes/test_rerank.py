"""What routes that rank ask of a model, and what they refuse."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from headwater.model import Parameter, Reranking
from headwater.signature import Signature, TensorSpec
from tests.app.gateway.routes.mapped_model import Columns, MappedModel

SIGNATURE = Signature(
    "m",
    inputs=(TensorSpec("q", "BYTES", (1,)), TensorSpec("d", "BYTES", (1,))),
    outputs=(TensorSpec("s", "FP32", (1,)), TensorSpec("n", "INT32", (1,))),
    reranking=Reranking("q", "d", "s", "n"),
)
DOCUMENTS = ["a boat", {"text": "the boat sleeps"}, "tax"]
TEXTS = ["the boat sleeps", "a boat", "tax"]
"""The documents, the best first."""


def compute(columns: Columns) -> dict[str, Any]:
    """A document's score is how many of the query's words it has, over ten; each character is a token."""
    pairs = list(zip(columns["q"], columns["d"], strict=True))
    scores = [[len(set(query.split()) & set(document.split())) / 10] for query, document in pairs]
    return {
        "s": np.array(scores, "<f4"),
        "n": np.array([[len(query) + len(document)] for query, document in pairs], "<i4"),
    }


def ask(path: str = "/v1/rerank", queue: int = 1024, **fields: Any) -> Any:
    body = {"model": "m", "query": "the boat sleeps", "documents": DOCUMENTS, **fields}
    return MappedModel(SIGNATURE, compute, queue).post(path, json=body)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_the_best_come_first_under_each_path(path: str) -> None:
    answer = ask(path)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert [(one["index"], round(one["relevance_score"], 4)) for one in content["results"]] == [
        (1, 0.3),
        (0, 0.1),
        (2, 0),
    ]
    assert content["model"] == "m"
    assert content["usage"] == {"prompt_tokens": 69, "total_tokens": 69}
    assert content["id"] == answer.headers["x-request-id"]
    documents = [one.get("document") for one in content["results"]]
    assert documents == ([None] * 3 if path == "/v2/rerank" else [{"text": text} for text in TEXTS])


def test_top_n_and_the_documents_themselves() -> None:
    results = ask(top_n=2, return_documents=True).json()["results"]
    assert [one["document"] for one in results] == [{"text": "the boat sleeps"}, {"text": "a boat"}]
    results = ask("/v2/rerank", top_n=1, return_documents=True).json()["results"]
    assert [one["document"] for one in results] == [{"text": "the boat sleeps"}]
    assert all("document" not in one for one in ask(return_documents=False).json()["results"])


def test_a_document_is_ranked_by_one_field_and_comes_back_whole() -> None:
    documents = [{"text": "tax", "title": "the boat"}, {"title": "tax", "text": "boat"}, "the boat sleeps"]
    results = ask(documents=documents).json()["results"]
    assert [one["index"] for one in results] == [2, 1, 0]
    assert [one["document"] for one in results] == [{"text": "the boat sleeps"}, documents[1], documents[0]]
    results = ask(documents=documents, rank_fields=["title"]).json()["results"]
    assert [one["index"] for one in results] == [2, 0, 1]


def test_documents_are_cut_by_a_model_that_can() -> None:
    cut = Parameter("max_tokens_per_doc", "int", 0, per="row", minimum=0, maximum=512)
    model = MappedModel(msgspec.structs.replace(SIGNATURE, parameters=(cut,)), compute)
    body = {"query": "q", "documents": ["d"]}
    for more in ({}, {"max_tokens_per_doc": 7}):
        assert model.post("/v2/rerank", json={**body, **more}).status_code == 200
    assert [request.row_parameters["max_tokens_per_doc"] for request in model.requests] == [0, 7]
    answer = model.post("/v2/rerank", json={**body, "max_tokens_per_doc": 513})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens_per_doc")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_no_number_is_an_error_and_no_order(bad: float) -> None:
    scores = np.array([[1], [bad], [3], [2], [bad], [4]], "<f4")
    model = MappedModel(SIGNATURE, lambda columns: {"s": scores, "n": np.ones((6, 1), "<i4")})
    answer = model.post("/v1/rerank", json={"model": "m", "query": "q", "documents": list("abcdef"), "top_n": 2})
    assert answer.status_code == 500
    expected = f"documents[1]: expected finite numbers in the model's output `s`, got {bad}"
    assert answer.json()["error"]["message"] == expected


def test_more_documents_than_the_queue_holds_go_in_parts() -> None:
    documents = ["boat " * (n % 2) for n in range(25)]
    model = MappedModel(SIGNATURE, compute, 10)
    answer = model.post("/v1/rerank", json={"model": "m", "query": "boat", "documents": documents})
    assert [one["index"] for one in answer.json()["results"]] == [*range(1, 25, 2), *range(0, 25, 2)]
    assert [request.rows for request in model.requests] == [5] * 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query": ""}, "query: expected a text, got an empty one"),
        ({"query": 1}, "query: expected a string, got an integer"),
        ({"documents": []}, "documents: expected 1 to 2048 documents, got 0"),
        ({"documents": ["x"] * 2049}, "documents: expected 1 to 2048 documents, got 2049"),
        ({"documents": [{"image": "x"}]}, "documents[0].text: expected a text to rank by, got an object without"),
        ({"documents": [{"text": 1}]}, "documents[0]"),
        ({"documents": ["x", {"text": "x"}], "rank_fields": ["title"]}, "documents[1].title: expected a text to rank"),
        ({"rank_fields": ["title", "text"]}, "rank_fields: expected the name of one field, got 2"),
        ({"documents": "x"}, "documents: expected an array, got a string"),
        ({"top_n": 0}, "top_n: expected at least 1, got 0"),
        ({"max_tokens_per_doc": 7}, "max_tokens_per_doc: model `m` can't be told where to cut documents; leave it out"),
        ({"max_chunks_per_doc": 7}, "max_chunks_per_doc: this model does not support it; leave it out"),
        ({"priority": 7}, "priority: expected one of the fields model, query"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_what_is_wrong_is_named_in_openais_form(fields: dict[str, Any], message: str, path: str) -> None:
    answer = ask(path, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message), answer.text


def test_a_model_that_ranks_nothing_is_refused() -> None:
    other = Signature("m", inputs=SIGNATURE.inputs, outputs=SIGNATURE.outputs)
    body = {"model": "m", "query": "x", "documents": ["y"]}
    answer = MappedModel(other, compute).post("/v1/rerank", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
