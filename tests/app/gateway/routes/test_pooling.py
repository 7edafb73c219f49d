"""What ``/score`` and ``/pooling`` ask of a model, and what they refuse."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.app.gateway.routes.test_tei import CUT, PROMPT, SIZE, classifier, embedder, ranker


@pytest.mark.parametrize("names", ["text_1 text_2", "queries documents", "queries items", "data_1 data_2"])
@pytest.mark.parametrize(
    ("first", "second", "scores"),
    [
        ("ab", "bc", [1]),
        ("ab", ["bc", "ab", "c"], [1, 2, 0]),
        (["ab"], ["bc", "ab"], [1, 2]),
        (["ab", "c"], ["ab", "c"], [2, 1]),
    ],
)
def test_pairs_in_the_requests_order(names: str, first: Any, second: Any, scores: list[int]) -> None:
    body = dict(zip(names.split(), (first, second), strict=True))
    for path in ("/score", "/v1/score"):
        answer = ranker().post(path, json=body)
        assert answer.status_code == 200, answer.text
        content = answer.json()
        expected = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        assert content["data"] == expected
        assert (content["object"], content["model"], content["usage"]["prompt_tokens"]) == ("list", "m", 0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {},
            "text_1: expected text_1 and text_2, or queries and documents, or queries and items, or data_1 and data_2",
        ),
        ({"text_1": "x", "documents": "y"}, "text_1: expected text_1 and text_2, or"),
        ({"text_1": "x", "text_2": []}, "text_2: expected 1 to 2048 texts, got 0"),
        ({"text_1": "x", "text_2": ["y"] * 2049}, "text_2: expected 1 to 2048 texts, got 2049"),
        ({"text_1": ["x"] * 2, "text_2": ["y"] * 3}, "text_1: expected a single text, or 3 as in text_2, got 2"),
        ({"text_1": ["x"] * 2, "text_2": "y"}, "text_1: expected a single text, or 1 as in text_2, got 2"),
        ({"text_1": 1, "text_2": "y"}, "text_1: expected a string or an array, got an integer"),
        ({"text_1": "x", "text_2": "y", "max_tokens_per_doc": 7}, "max_tokens_per_doc: model `m` can't be told"),
        ({"text_1": "x", "text_2": "y", "use_activation": True}, "use_activation: expected one of the fields"),
    ],
)
def test_wrong_pairs_are_named(body: dict[str, Any], message: str) -> None:
    answer = ranker().post("/score", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message), answer.text


def test_pooling_gives_what_the_model_computes() -> None:
    content = embedder().post("/pooling", json={"input": ["ab", "b"]}).json()
    assert content["data"] == [
        {"index": 0, "object": "pooling", "data": [1, 1]},
        {"index": 1, "object": "pooling", "data": [0, 1]},
    ]
    assert content["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    for task in ({}, {"task": "classify"}):
        content = classifier().post("/pooling", json={"input": "abc", **task}).json()
        assert content["data"] == [{"index": 0, "object": "pooling", "data": [0.25, 0.75]}]
    content = embedder().post("/pooling", json={"input": "ab", "encoding_format": "base64", "task": "embed"}).json()
    assert np.frombuffer(base64.b64decode(content["data"][0]["data"]), "<f4").tolist() == [1, 1]


def test_pooling_cuts_inputs_if_the_request_says_so() -> None:
    model = embedder(CUT, PROMPT, SIZE)
    for more in ({}, {"truncate_prompt_tokens": 5}):
        assert model.post("/pooling", json={"input": "ab", **more}).status_code == 200
    assert [request.row_parameters["truncate_prompt_tokens"] for request in model.requests] == [0, 5]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": "x", "task": "token_embed"}, "task: expected 'classify' or 'embed', got 'token_embed'"),
        ({"input": "x", "task": "embed"}, "model: `m` has no embedding"),
        ({"input": "x", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens: expected it for a model that embeds"),
        ({"input": []}, "input: expected 1 to 2048 inputs, got 0"),
        ({"input": "x", "dimensions": 1}, "dimensions: expected one of the fields"),
    ],
)
def test_what_pooling_refuses_is_named(body: dict[str, Any], message: str) -> None:
    answer = classifier().post("/pooling", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message), answer.text
