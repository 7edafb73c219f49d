"""What text-embeddings-inference's routes ask of a model, and what they refuse."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from headwater.model import Classification, Embedding, Parameter, Reranking
from headwater.signature import Signature, TensorSpec
from tests.app.gateway.routes.mapped_model import Columns, MappedModel

TEXT = TensorSpec("text", "BYTES", (1,))
TOKENS = TensorSpec("n", "INT32", (1,))
PROMPT = Parameter("prompt", "str", "", per="row", choices=("", "query"))
CUT = Parameter("truncate_prompt_tokens", "int", -1, per="row", minimum=-1, maximum=512)
SIZE = Parameter("size", "int", 0, per="row", minimum=0, maximum=2)


def embedder(*parameters: Parameter) -> MappedModel:
    """A model whose embedding is the numbers of a's and b's."""

    def compute(columns: Columns) -> dict[str, Any]:
        counts = [[text.count("a"), text.count("b")] for text in columns["text"]]
        return {"v": np.array(counts, "<f4"), "n": np.ones((len(counts), 1), "<i4")}

    spec = (
        Embedding("text", "v", "n", prompt="prompt", dimensions="size") if parameters else Embedding("text", "v", "n")
    )
    outputs = (TensorSpec("v", "FP32", (2,)), TOKENS)
    return MappedModel(Signature("m", (TEXT,), outputs, parameters=parameters, embedding=spec), compute)


def classifier() -> MappedModel:
    def compute(columns: Columns) -> dict[str, Any]:
        shares = [[1 / (1 + len(text)), len(text) / (1 + len(text))] for text in columns["text"]]
        return {"s": np.array(shares, "<f4"), "n": np.ones((len(shares), 1), "<i4")}

    outputs = (TensorSpec("s", "FP32", (2,), labels=("short", "long")), TOKENS)
    return MappedModel(Signature("m", (TEXT,), outputs, classification=Classification("text", "s", "n")), compute)


def ranker() -> MappedModel:
    """A model whose score is how many letters query and document share."""

    def compute(columns: Columns) -> dict[str, Any]:
        scores = [[len({*query} & {*text})] for query, text in zip(columns["q"], columns["text"], strict=True)]
        return {"s": np.array(scores, "<f4")}

    inputs = (TensorSpec("q", "BYTES", (1,)), TEXT)
    outputs = (TensorSpec("s", "FP32", (1,)),)
    return MappedModel(Signature("m", inputs, outputs, reranking=Reranking("q", "text", "s")), compute)


@pytest.mark.parametrize(("inputs", "count"), [("aaabbbb", 1), (["aaabbbb"], 1), (["aaabbbb"] * 3, 3), ([], 0)])
def test_embeddings_have_length_1_unless_the_request_says_otherwise(inputs: Any, count: int) -> None:
    assert embedder().post("/embed", json={"inputs": inputs}).json() == [pytest.approx([0.6, 0.8])] * count
    body = {"inputs": inputs, "normalize": False, "model": "m"}
    assert embedder().post("/embed", json=body).json() == [[3, 4]] * count


def test_an_embedding_of_zeros_stays_so() -> None:
    assert embedder().post("/embed", json={"inputs": "c"}).json() == [[0, 0]]


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        ({}, {"truncate_prompt_tokens": 0}),
        ({"truncate": False}, {"truncate_prompt_tokens": 0}),
        ({"truncate": True, "truncation_direction": "right"}, {"truncate_prompt_tokens": -1}),
        ({"truncation_direction": "Right"}, {"truncate_prompt_tokens": 0}),
        ({"prompt_name": "query"}, {"truncate_prompt_tokens": 0, "prompt": "query"}),
        ({"dimensions": 1}, {"truncate_prompt_tokens": 0, "size": 1}),
    ],
)
def test_fields_of_embed_set_the_models_parameters(fields: dict[str, Any], parameters: dict[str, Any]) -> None:
    model = embedder(CUT, PROMPT, SIZE)
    answer = model.post("/embed", json={"inputs": "a", **fields})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()[0]) == fields.get("dimensions", 2)
    (request,) = model.requests
    assert request.row_parameters == {"truncate_prompt_tokens": -1, "prompt": "", "size": 0} | parameters


@pytest.mark.parametrize(("fields", "cut"), [({}, -1), ({"truncate": True}, -1), ({"truncate": False}, 0)])
def test_a_model_may_cut_longer_texts_unless_the_request_says_otherwise(fields: dict[str, Any], cut: int) -> None:
    embedding = Embedding("text", "v", "n", truncate=True)
    model = embedder(CUT)
    model.signature = msgspec.structs.replace(model.signature, embedding=embedding)
    model.post("/embed", json={"inputs": "a", **fields})
    model.post("/similarity", json={"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": fields})
    assert [request.row_parameters for request in model.requests] == [{"truncate_prompt_tokens": cut}] * 2


def test_cosines() -> None:
    inputs = {"source_sentence": "a", "sentences": ["aa", "b", "aaabbbb", "c"]}
    for body in ({"inputs": inputs}, {"inputs": inputs, "parameters": {}}):
        assert embedder().post("/similarity", json=body).json() == pytest.approx([1, 0, 0.6, 0])
    model = embedder(CUT, PROMPT, SIZE)
    model.post("/similarity", json={"inputs": inputs, "parameters": {"truncate": True, "prompt_name": "query"}})
    (request,) = model.requests
    assert request.row_parameters == {"truncate_prompt_tokens": -1, "prompt": "query", "size": 0}


LONG = [{"label": "long", "score": 0.75}, {"label": "short", "score": 0.25}]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"inputs": "abc"}, LONG),
        ({"inputs": ["abc"], "truncate": True, "raw_scores": False}, LONG),
        ({"inputs": [["abc"]]}, [LONG]),
        ({"inputs": [["abc"], ["abc"]]}, [LONG, LONG]),
        ({"inputs": "abc", "parameters": {}}, [LONG]),
        ({"inputs": "abc", "parameters": {"top_k": 1}}, [LONG[:1]]),
    ],
)
def test_labels_have_the_form_that_the_inputs_have(body: dict[str, Any], expected: Any) -> None:
    assert classifier().post("/predict", json=body).json() == expected


def test_pairs_are_scored_by_a_model_that_ranks() -> None:
    assert ranker().post("/predict", json={"inputs": ["ab", "bc"]}).json() == [{"label": "s", "score": 1}]
    answer = ranker().post("/predict", json={"inputs": [["ab", "bc"], ["ab", "ab"]]}).json()
    assert answer == [[{"label": "s", "score": 1}], [{"label": "s", "score": 2}]]
    assert classifier().post("/predict", json={"inputs": ["ab", "bc"]}).json() == {
        "error": "model: `m` has no reranking"
    }


def test_texts_are_ranked_at_the_route_of_documents() -> None:
    body = {"query": "ab", "texts": ["c", "bc", "ab"]}
    ranks = [(2, 2), (1, 1), (0, 0)]
    answer = ranker().post("/rerank", json=body).json()
    assert answer == [{"index": index, "score": score} for index, score in ranks]
    answer = ranker().post("/rerank", json={**body, "return_text": True, "raw_scores": False, "truncate": True}).json()
    assert answer == [{"index": index, "text": body["texts"][index], "score": score} for index, score in ranks]
    documents = [{"text": "c", '"texts"': "x"}]
    assert ranker().post("/rerank", json={"query": "ab", "documents": documents}).json()["object"] == "list"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/embed", {"inputs": ["x"] * 2049}, "inputs: expected at most 2048 inputs, got 2049"),
        ("/embed", {"inputs": None}, "inputs: expected a string or an array, got null"),
        ("/embed", {"inputs": [1]}, "inputs: this model takes a string or an array of strings; token ids are not"),
        ("/embed", {"inputs": "x", "prompt_name": "query"}, "prompt_name: model `m` has no prompts to choose"),
        ("/embed", {"inputs": "x", "dimensions": 1}, "dimensions: model `m` serves embeddings of a fixed length"),
        ("/embed", {"inputs": "x", "dimensions": 0}, "dimensions: expected at least 1, got 0"),
        (
            "/embed",
            {"inputs": "x", "truncation_direction": "left"},
            "truncation_direction: expected 'Right' or 'right'",
        ),
        ("/embed", {"inputs": "x", "encoding_format": "base64"}, "encoding_format: expected one of the fields"),
        ("/embed", {"input": "x"}, "input: expected one of the fields"),
        ("/similarity", {"inputs": {"source_sentence": "x", "sentences": []}}, "inputs.sentences: expected 1 to 2048"),
        ("/similarity", {"inputs": {"source_sentence": "x"}}, "inputs.sentences: expected this field"),
        ("/similarity", {"inputs": "x"}, "inputs: expected an object, got a string"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "x", "sentences": ["y"]}, "parameters": {"prompt_name": "query"}},
            "parameters.prompt_name: model `m` has no prompts to choose",
        ),
        ("/predict", {"inputs": []}, "inputs: expected a text, a pair [text, text], or"),
        ("/predict", {"inputs": ["x"] * 3}, "inputs: expected a text, a pair [text, text], or"),
        ("/predict", {"inputs": [["x"], ["x", "y"]]}, "inputs: expected a text, a pair [text, text], or"),
        ("/predict", {"inputs": [["x"], "y"]}, "inputs: expected a text, a pair [text, text], or"),
        ("/predict", {"inputs": [["x"]] * 2049}, "inputs: expected 1 to 2048 inputs, got 2049"),
        ("/predict", {"inputs": "x", "raw_scores": True}, "raw_scores: expected false"),
        ("/predict", {"inputs": "x", "truncate": False}, "truncate: expected true, since models"),
        ("/predict", {"inputs": "x", "parameters": {"function_to_apply": "softmax"}}, "parameters.function_to_apply: "),
        ("/embed_sparse", {"inputs": "x"}, "route /embed_sparse: no model of this server gives sparse embeddings"),
        ("/embed_all", {"inputs": "x"}, "route /embed_all: no model gives embeddings of tokens here"),
        ("/decode", {"ids": [1]}, "route /decode: this server has no tokenizer of a model that embeds"),
    ],
)
def test_what_is_wrong_is_named_in_teis_form(path: str, body: dict[str, Any], message: str) -> None:
    answer = (classifier() if path == "/predict" else embedder()).post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(message), answer.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"texts": []}, "texts: expected 1 to 2048 documents, got 0"),
        ({"query": ""}, "query: expected a text, got an empty one"),
        ({"raw_scores": True}, "raw_scores: expected false"),
        ({"truncate": False}, "truncate: expected true, since models"),
        ({"documents": ["x"]}, "documents: expected one of the fields"),
        ({"top_n": 1}, "top_n: expected one of the fields"),
    ],
)
def test_what_is_wrong_with_texts_is_named(fields: dict[str, Any], message: str) -> None:
    answer = ranker().post("/rerank", json={"query": "x", "texts": ["y"], **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message), answer.text
