"""What ``/v1/embeddings`` asks of a model, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
import numpy as np
import pytest

from headwater.datatypes import unpack_bytes
from headwater.model import Embedding, Parameter
from headwater.signature import Signature, TensorSpec
from headwater_server.codecs.tensors import Answer, InferRequest, RawTensor
from headwater_server.config.schema import Server
from headwater_server.control.routing import DeploymentRoute, State
from headwater_server.errors import NotFound
from headwater_server.gateway.app import create_app
from headwater_server.gateway.models import Models

TEXT = TensorSpec("text", "BYTES", (1,))
IDS = TensorSpec("token_ids", "INT32", (-1,), optional=True)
PROMPT = Parameter("prompt", "str", "query", per="row", choices=("", "query", "document"))
CUT = Parameter("truncate_prompt_tokens", "int", -1, per="row", minimum=-1, maximum=9)


class Embedder:
    """A model, its dispatcher and its route: an input's vector is its length, which is also its number of tokens."""

    def __init__(self, *inputs: TensorSpec, max_queue_size: int = 1024, prompts: bool = False) -> None:
        self.signature = Signature(
            "m",
            inputs=(TEXT, *inputs),
            outputs=(TensorSpec("v", "FP32", (1,)), TensorSpec("n", "INT32", (1,))),
            parameters=(*((CUT,) if inputs else ()), *((PROMPT,) if prompts else ())),
            embedding=Embedding("text", "v", "n", prompt="prompt" if prompts else None),
        )
        self.route = DeploymentRoute("m", State.READY, signature=self.signature, max_queue_size=max_queue_size)
        self.dispatcher = self
        self.name = "m"
        self.requests: list[InferRequest] = []

    def check_ready(self) -> Signature:
        return self.signature

    async def infer(self, request: InferRequest) -> Answer:
        self.requests.append(request)
        if "token_ids" in request.inputs:
            ids = request.inputs["token_ids"]
            lengths = (np.frombuffer(ids.data, "<i4").reshape(ids.shape) >= 0).sum(axis=1)
        else:
            lengths = np.array([len(text) for text in unpack_bytes(request.inputs["text"].data)])
        column = lengths.reshape(-1, 1)
        return Answer(
            {
                "v": RawTensor("FP32", column.shape, column.astype("<f4").tobytes()),
                "n": RawTensor("INT32", column.shape, column.astype("<i4").tobytes()),
            }
        )

    # What of `Models` the route uses.

    def choose(self, scope: object, name: str) -> Embedder:
        if name != "m":
            raise NotFound("unknown", field="model")
        return self

    def check_mapped(self, model: Embedder, mapping: str) -> None:
        assert mapping == "embedding"

    def ask(self, given: Any, **fields: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            app = create_app(cast(Models, self), Server(access_log=False))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
                body = json.dumps({"model": "m", "input": given, **fields})
                return await client.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})

        return asyncio.run(send())

    def lengths(self, given: Any, **fields: Any) -> list[int]:
        """The inputs' lengths as the vectors say."""
        answer = self.ask(given, **fields)
        assert answer.status_code == 200, answer.text
        content = answer.json()
        assert [item["index"] for item in content["data"]] == list(range(len(content["data"])))
        found = [int(item["embedding"][0]) for item in content["data"]]
        assert content["usage"] == {"prompt_tokens": sum(found), "total_tokens": sum(found)}
        return found


@pytest.mark.parametrize(
    ("given", "expected"),
    [("abc", [3]), (["a", "abc"], [1, 3]), ([7, 8, 9, 0], [4]), ([[7], [8, 9], [0, 0, 0]], [1, 2, 3])],
)
def test_texts_and_token_ids_of_every_form(given: Any, expected: list[int]) -> None:
    assert Embedder(IDS).lengths(given) == expected


class Unsound(Embedder):
    """A model whose vectors of empty texts are not numbers."""

    async def infer(self, request: InferRequest) -> Answer:
        answer = await super().infer(request)
        vectors = answer.outputs["v"]
        lengths = np.frombuffer(vectors.data, "<f4")
        data = np.where(lengths == 0, np.inf, lengths).astype("<f4").tobytes()
        return Answer({**answer.outputs, "v": RawTensor("FP32", vectors.shape, data)})


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("queue", [1024, 2])
def test_a_vector_that_is_no_number_is_an_error(encoding: str, queue: int) -> None:
    answer = Unsound(max_queue_size=queue).ask(["ab", "abc", "a", ""], encoding_format=encoding)
    assert answer.status_code == 500
    expected = "input[3]: expected finite numbers in the model's output `v`, got inf"
    assert answer.json()["error"]["message"] == expected


def test_2048_inputs_go_in_parts_that_the_queue_holds() -> None:
    model = Embedder(IDS, max_queue_size=1000)
    given = ["x" * (n % 7) for n in range(2048)]
    assert model.lengths(given) == [n % 7 for n in range(2048)]
    assert [request.rows for request in model.requests] == [500, 500, 500, 500, 48]
    assert all(0 < request.timeout_us <= 30_000_000 for request in model.requests)


def test_what_the_queue_holds_goes_at_once_with_the_models_own_deadline() -> None:
    model = Embedder(IDS, max_queue_size=1000)
    model.lengths(["x"] * 1000)
    assert [(request.rows, request.timeout_us) for request in model.requests] == [(1000, 0)]


def test_one_long_input_does_not_lengthen_all_others() -> None:
    model = Embedder(IDS)
    given = [[1]] * 1000 + [[1] * 10_000] + [[1]] * 1000
    assert model.lengths(given) == [len(ids) for ids in given]
    assert len(model.requests) > 1
    assert all(len(request.inputs["token_ids"].data) <= 4 << 20 for request in model.requests)


def test_a_longer_input_is_cut_only_if_the_request_says_so() -> None:
    model = Embedder(IDS)
    model.lengths("a")
    model.lengths("a", truncate_prompt_tokens=5)
    model.lengths("a", truncate_prompt_tokens=-1)
    model.lengths("a", truncate=True)
    model.lengths("a", truncate=False)
    assert [request.row_parameters["truncate_prompt_tokens"] for request in model.requests] == [0, 5, -1, -1, 0]


def test_no_input_has_no_embedding_and_no_tokens() -> None:
    model = Embedder(IDS)
    assert model.lengths([]) == []
    assert model.requests == []
    assert Embedder().lengths(" [ ] ") == [5]


@pytest.mark.parametrize("cuts", [True, False])
def test_truncate_has_no_effect_on_a_model_that_cuts_nothing(cuts: bool) -> None:
    model = Embedder()
    model.lengths("a", truncate=cuts)
    assert [request.row_parameters for request in model.requests] == [{}]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "query"),
        ({"prompt_name": "document"}, "document"),
        ({"prompt_name": ""}, ""),
        ({"input_type": "query"}, "query"),
        ({"input_type": "search_query"}, "query"),
        ({"input_type": "search_document"}, "document"),
        ({"input_type": "passage"}, "document"),
        ({"input_type": "query", "prompt_name": "document"}, "document"),
    ],
)
def test_a_request_chooses_the_prompt_by_its_name_or_a_synonym(fields: dict[str, str], prompt: str) -> None:
    model = Embedder(prompts=True)
    model.lengths("a", **fields)
    assert [request.row_parameters for request in model.requests] == [{"prompt": prompt}]


@pytest.mark.parametrize("field", ["prompt_name", "input_type"])
def test_a_prompt_that_is_not_there_is_refused(field: str) -> None:
    answer = Embedder(prompts=True).ask("a", **{field: "clustering"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert "expected one of '', 'query', 'document', got 'clustering'" in answer.json()["error"]["message"]
    answer = Embedder().ask("a", **{field: "query"})
    assert answer.json()["error"]["message"] == f"{field}: model `m` has no prompts to choose; leave it out"


@pytest.mark.parametrize(
    ("given", "fields", "message"),
    [
        (["x"] * 2049, {}, "input: expected at most 2048 inputs, got 2049; send them in several requests"),
        ([[1]] * 2049, {}, "input: expected at most 2048 inputs, got 2049; send them in several requests"),
        ([[]], {}, "input[0]: expected at least 1 entries, got 0"),
        ([1, "x"], {}, "input[1]: expected an integer, got a string"),
        ([[1], "x"], {}, "input[1]: expected an array, got a string"),
        ([-1], {}, "input[0]: expected an integer from 0 to 2147483647, got -1"),
        ([[1, 2**31]], {}, f"input[0][1]: expected an integer from 0 to 2147483647, got {2**31}"),
        (["x", 1], {}, "input[1]: expected a string, got an integer; this model takes a string or an array of strings"),
        ([True], {}, "input[0]: expected a string, got a boolean; this model takes"),
        (1.5, {}, "input: expected a string or an array, got a number; this model takes"),
        (None, {}, "input: expected a string or an array, got null; this model takes"),
        ("x", {"encoding_format": "hex"}, "encoding_format: expected 'base64' or 'float', got 'hex'"),
        ("x", {"encoding_format": 0}, "encoding_format: expected a string, got an integer"),
        ("x", {"model": 123}, "model: expected a string, got an integer"),
        ("x", {"truncate": 1}, "truncate: expected a boolean, got an integer"),
        ("x", {"truncate": True, "truncate_prompt_tokens": 5}, "truncate: expected it or truncate_prompt_tokens"),
        ("x", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens: expected at least -1, got -2"),
        ("x", {"truncate_prompt_tokens": 10}, "truncate_prompt_tokens: parameter 'truncate_prompt_tokens': expected"),
    ],
)
def test_what_is_wrong_is_named(given: Any, fields: dict[str, Any], message: str) -> None:
    answer = Embedder(IDS).ask(given, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert message.startswith(answer.json()["error"]["param"].partition("[")[0])


@pytest.mark.parametrize("model", ["", "other"])
def test_a_model_that_is_not_there_is_none_that_can_not(model: str) -> None:
    answer = Embedder().ask("x", model=model)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_an_empty_text_has_a_vector_too() -> None:
    assert Embedder().lengths("") == Embedder().lengths([""]) == [0]


@pytest.mark.parametrize(
    ("given", "fields", "message"),
    [
        ([1], {}, "input: this model takes a string or an array of strings; token ids are not supported"),
        ("x", {"truncate_prompt_tokens": 1}, "truncate_prompt_tokens: model `m` cuts no inputs; leave it out"),
    ],
)
def test_what_the_model_does_not_do_is_refused(given: Any, fields: dict[str, Any], message: str) -> None:
    assert Embedder().ask(given, **fields).json()["error"]["message"] == message
