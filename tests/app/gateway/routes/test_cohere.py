"""What ``/v2/embed`` and ``/v1/embed`` ask of a model, and what they refuse."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from headwater.model import Embedding, Parameter
from headwater.signature import Signature, TensorSpec
from tests.app.gateway.routes.mapped_model import Columns, MappedModel

PROMPT = Parameter("prompt", "str", "", per="row", choices=("", "query", "document"))
CUT = Parameter("truncate_prompt_tokens", "int", -1, per="row", minimum=-1, maximum=512)
SIZE = Parameter("size", "int", 0, per="row", minimum=0, maximum=8)
EMBEDDING = [0.5, -0.5, 1e-3, -1, 0, 0, 2, 3]
BITS = 0b10100011


def compute(columns: Columns) -> dict[str, Any]:
    count = len(columns["text"])
    return {"v": np.array([EMBEDDING] * count, "<f4"), "n": np.array([[2]] * count, "<i4")}


def model(*parameters: Parameter) -> MappedModel:
    return MappedModel(
        Signature(
            "m",
            inputs=(TensorSpec("text", "BYTES", (1,)),),
            outputs=(TensorSpec("v", "FP32", (8,)), TensorSpec("n", "INT32", (1,))),
            parameters=parameters,
            embedding=Embedding(
                "text",
                "v",
                "n",
                prompt="prompt" if PROMPT in parameters else None,
                dimensions="size" if SIZE in parameters else None,
            ),
        ),
        compute,
    )


def ask(path: str = "/v2/embed", *parameters: Parameter, **fields: Any) -> Any:
    body = {"model": "m", "texts": ["a", "b"], "input_type": "search_query", **fields}
    return model(*parameters).post(path, json=body)


def test_the_second_version_has_embeddings_by_type() -> None:
    answer = ask()
    assert answer.json() == {
        "id": answer.headers["x-request-id"],
        "response_type": "embeddings_by_type",
        "embeddings": {"float": [pytest.approx(EMBEDDING)] * 2},
        "texts": ["a", "b"],
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 4}},
    }


def test_the_first_version_has_a_list_unless_types_are_named() -> None:
    content = ask("/v1/embed").json()
    assert (content["response_type"], content["meta"]["api_version"]) == ("embeddings_floats", {"version": "1"})
    assert content["embeddings"] == [pytest.approx(EMBEDDING)] * 2
    content = ask("/v1/embed", embedding_types=["float"]).json()
    assert (content["response_type"], content["embeddings"].keys()) == ("embeddings_by_type", {"float"})


def test_each_type_is_as_cohere_defines_it() -> None:
    types = ["float", "binary", "ubinary", "base64"]
    embeddings = ask(texts=["a"], embedding_types=types).json()["embeddings"]
    assert list(embeddings) == types
    assert (embeddings["ubinary"], embeddings["binary"]) == ([[BITS]], [[BITS - 128]])
    assert np.frombuffer(base64.b64decode(embeddings["base64"][0]), "<f4").tolist() == pytest.approx(EMBEDDING)


@pytest.mark.parametrize(
    ("fields", "cut"),
    [({}, -1), ({"truncate": "END"}, -1), ({"truncate": "NONE"}, 0), ({"max_tokens": 7}, 7)],
)
def test_longer_texts_are_cut_at_their_end_unless_the_request_says_otherwise(fields: dict[str, Any], cut: int) -> None:
    cutting = model(CUT)
    assert cutting.post("/v2/embed", json={"texts": ["a"], **fields}).status_code == 200
    assert [request.row_parameters for request in cutting.requests] == [{"truncate_prompt_tokens": cut}]


@pytest.mark.parametrize(("kind", "prompt"), [("search_query", "query"), ("search_document", "document")])
def test_the_kind_of_input_chooses_a_prompt(kind: str, prompt: str) -> None:
    prompted = model(PROMPT)
    prompted.post("/v2/embed", json={"texts": ["a"], "input_type": kind})
    assert [request.row_parameters for request in prompted.requests] == [{"prompt": prompt}]


@pytest.mark.parametrize("kind", ["search_query", "search_document", "classification", "clustering"])
def test_the_kind_of_input_has_no_effect_on_a_model_without_prompts(kind: str) -> None:
    assert ask(input_type=kind).status_code == 200


def test_a_shorter_embedding() -> None:
    assert len(ask("/v2/embed", SIZE, output_dimension=3).json()["embeddings"]["float"][0]) == 3
    answer = ask("/v2/embed", SIZE, output_dimension=3, embedding_types=["binary"])
    message = "embedding_types: expected embeddings of a multiple of 8 numbers for binary, got 3"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"texts": []}, "texts: expected 1 to 2048 texts, got 0"),
        ({"texts": ["x"] * 2049}, "texts: expected 1 to 2048 texts, got 2049"),
        ({"texts": None}, "texts: expected an array, got null"),
        ({"images": ["data:image/png;base64,AA=="]}, "images: this model does not support it; leave it out"),
        ({"inputs": [{"content": []}]}, "inputs: this model does not support it; leave it out"),
        (
            {"input_type": "image"},
            "input_type: expected 'classification' or 'clustering' or 'search_document' or",
        ),
        (
            {"embedding_types": ["int8"]},
            "embedding_types[0]: expected 'base64' or 'binary' or 'float' or",
        ),
        (
            {"embedding_types": ["uint8"]},
            "embedding_types[0]: expected 'base64' or 'binary' or 'float' or",
        ),
        ({"embedding_types": []}, "embedding_types: expected at least 1 entries, got 0"),
        ({"truncate": "START"}, "truncate: expected 'END' or 'NONE', got 'START'"),
        ({"truncate": "NONE", "max_tokens": 7}, "max_tokens: expected it with truncate END, got it with NONE"),
        ({"max_tokens": 7}, "max_tokens: model `m` cuts no inputs; leave it out"),
        ({"output_dimension": 7}, "output_dimension: model `m` serves embeddings of a fixed length; leave it out"),
        ({"priority": 1}, "priority: expected one of the fields model, texts"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed"])
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str, path: str) -> None:
    answer = ask(path, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message), answer.text
    assert message.startswith(answer.json()["error"]["param"].partition("[")[0])


def test_an_input_type_without_its_prompt_is_refused() -> None:
    answer = ask("/v2/embed", PROMPT, input_type="clustering")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_type")
