"""What ``/v1/rerank`` asks of a model, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headwater.model import Reranking
from headwater.signature import Signature, TensorSpec
from tests.app.gateway.routes.mapped_model import Columns, MappedModel

SIGNATURE = Signature(
    "m",
    inputs=(TensorSpec("q", "BYTES", (1,)), TensorSpec("d", "BYTES", (1,))),
    outputs=(TensorSpec("s", "FP32", (1,)), TensorSpec("n", "INT32", (1,))),
    reranking=Reranking("q", "d", "s", "n"),
)
DOCUMENTS = ["a boat", {"text": "the boat sleeps"}, "tax"]


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
    assert all(one.keys() == {"index", "relevance_score"} for one in content["results"])


def test_top_n_and_the_documents_themselves() -> None:
    results = ask(top_n=2, return_documents=True).json()["results"]
    assert [one["document"] for one in results] == [{"text": "the boat sleeps"}, {"text": "a boat"}]


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
        ({"documents": [{"image": "x"}]}, "documents[0].image: expected one of the fields text, got"),
        ({"documents": "x"}, "documents: expected an array, got a string"),
        ({"top_n": 0}, "top_n: expected at least 1, got 0"),
        ({"max_tokens_per_doc": 7}, "max_tokens_per_doc: expected one of the fields model, query"),
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
