"""Every held-out digit, over HTTP and at once, is read as the model called directly reads it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch

from examples.training.digits_data import LabelledImages, held_out
from headwater.zoo.digits import Digits, Parity, Reconstruction, Trunk
from tests.running import Running

AT_ONCE = 32
ROWS_A_REQUEST = (*[1] * 24, 2, 7, 64, 130)
"""Over and over: single images mostly; the last is more than two of the model's batches."""

Array = np.ndarray[Any, np.dtype[Any]]


class Answers(NamedTuple):
    """What a model said of all images."""

    logits: Array
    """FP32 [n, 10]."""
    digits: Array
    """INT32 [n]."""


@pytest.fixture(scope="module")
def images() -> LabelledImages:
    return held_out()


@pytest.fixture(scope="module")
def direct(images: LabelledImages) -> Answers:
    """The model called in this process."""
    model = Digits()
    model.load("cpu")
    outputs = model(torch.from_numpy(images.images))
    return Answers(outputs["logits"].numpy(), outputs["digit"].numpy()[:, 0])


@pytest.fixture(scope="module")
def served(demo: Running, images: LabelledImages) -> Answers:
    """The model asked over HTTP, by many clients at once."""
    return asyncio.run(_ask(f"{demo.url}/v2/models/digits/infer", _requests(images.images)))


def _requests(images: Array) -> list[Array]:
    pieces = []
    sizes = itertools.cycle(ROWS_A_REQUEST)
    while len(images):
        rows = next(sizes)
        pieces.append(images[:rows])
        images = images[rows:]
    return pieces


async def _ask(url: str, requests: Sequence[Array]) -> Answers:
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        answers = await asyncio.gather(*[_ask_one(client, url, rows) for rows in requests])
    return Answers(*map(np.concatenate, zip(*answers, strict=True)))


async def _ask_one(client: httpx.AsyncClient, url: str, rows: Array) -> Answers:
    tensor = {"name": "image", "datatype": "FP32", "shape": list(rows.shape), "data": rows.tolist()}
    answer = await client.post(url, json={"inputs": [tensor], "parameters": {"heads": "digit"}})
    assert answer.status_code == 200, answer.text
    logits, digit = answer.json()["outputs"]
    assert (logits["shape"], digit["shape"]) == ([len(rows), 10], [len(rows), 1])
    return Answers(np.array(logits["data"], np.float32).reshape(-1, 10), np.array(digit["data"], np.int32))


def test_there_are_450_images_in_requests_of_several_sizes(images: LabelledImages) -> None:
    sizes = [len(rows) for rows in _requests(images.images)]
    assert sum(sizes) == len(images.labels) == 450
    assert len(sizes) > AT_ONCE
    assert {1, 64, 130} <= set(sizes)


def test_at_least_97_in_100_are_read_right(served: Answers, images: LabelledImages) -> None:
    assert (served.digits == images.labels).mean() >= 0.97


def test_every_digit_is_the_one_that_the_model_gives_directly(served: Answers, direct: Answers) -> None:
    assert served.digits.tolist() == direct.digits.tolist()


def test_logits_agree_with_the_model_called_directly(served: Answers, direct: Answers) -> None:
    assert np.abs(served.logits - direct.logits).max() < 1e-5


def test_all_images_in_one_binary_request(demo: Running, images: LabelledImages, direct: Answers) -> None:
    data = images.images.tobytes()
    tensor = {
        "name": "image",
        "datatype": "FP32",
        "shape": list(images.images.shape),
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True, "heads": "digit"}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = httpx.post(f"{demo.url}/v2/models/digits/infer", content=head + data, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    raw = answer.content[int(answer.headers["inference-header-content-length"]) :]
    logits = np.frombuffer(raw[: 450 * 10 * 4], "<f4").reshape(450, 10)
    assert np.abs(logits - direct.logits).max() < 1e-5
    assert np.frombuffer(raw[450 * 10 * 4 :], "<i4").tolist() == direct.digits.tolist()


def test_the_other_heads_agree_with_torch_called_directly(demo: Running, images: LabelledImages) -> None:
    image = torch.from_numpy(images.images[:40])
    models = trunk, parity, reconstruction = Trunk(), Parity(), Reconstruction()
    for model in models:
        model.load("cpu")
    features = trunk(image)["features"]
    expected = {**parity(features), **reconstruction(features, image)}
    tensor = {"name": "image", "datatype": "FP32", "shape": [40, 1, 8, 8], "data": images.images[:40].tolist()}
    body = {"inputs": [tensor], "parameters": {"heads": ["parity", "reconstruction"]}}
    answer = httpx.post(f"{demo.url}/v2/models/digits/infer", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    outputs = {output["name"]: output for output in answer.json()["outputs"]}
    assert set(outputs) == set(expected)
    for name in ("odd_probability", "reconstruction", "anomaly_score"):
        got = np.array(outputs[name]["data"], np.float32).reshape(outputs[name]["shape"])
        assert np.abs(got - expected[name].numpy()).max() < 1e-5 * max(1.0, float(expected[name].abs().max()))
    odd = images.labels[:40] % 2 == 1
    assert (np.array(outputs["parity"]["data"]) == np.where(odd, "odd", "even")).mean() >= 0.95
