"""A replica on a GPU."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.end_to_end.test_metrics import Scrape
from tests.running import Running, serve, wait_for

pytestmark = pytest.mark.gpu
TF32 = 5e-3
"""Of logits up to 5: torch lets cuDNN round a convolution's factors to 10 bits."""
DIGITS: dict[str, Any] = {"model": "headwater.zoo.digits:Digits", "device": "cuda"}


def test_a_model_on_a_gpu_answers_as_on_the_cpu() -> None:
    model = "headwater.zoo.digits:Digits"
    with serve({"deployments": {name: {"model": model, "device": name} for name in ("cuda", "cpu")}}) as running:
        from headwater.zoo.digits import Digits

        image = Digits.example["image"]
        flat = [value for row in image[0] for value in row]
        answers = [running.infer(name, flat, shape=[1, 1, 8, 8], name="image").json() for name in ("cuda", "cpu")]
        on_gpu, on_cpu = ({output["name"]: output["data"] for output in answer["outputs"]} for answer in answers)
        assert on_gpu["digit"] == on_cpu["digit"]
        assert on_gpu["logits"] == pytest.approx(on_cpu["logits"], abs=TF32)


def _logits(running: Running, model: str, image: list[float]) -> list[float]:
    answer = running.infer(model, image, shape=[len(image) // 64, 1, 8, 8], name="image")
    assert answer.status_code == 200, answer.text
    outputs: dict[str, Any] = {output["name"]: output["data"] for output in answer.json()["outputs"]}
    found: list[float] = outputs["logits"]
    return found


def test_compiled_models_and_two_streams_answer_as_one_model_does_under_load() -> None:
    """300 rows are 76,800 bytes, which come through shared memory."""
    ways: dict[str, dict[str, Any]] = {
        "plain": DIGITS,
        "compiled": {**DIGITS, "options": {"compile": True}},
        "two": {**DIGITS, "instances": 2},
    }
    config = {name: {**way, "batching": {"max_batch_size": 512}} for name, way in ways.items()}
    config["compiled"]["warmup_batch_sizes"] = [1, 8, 512]
    chance = random.Random(7)
    images = [[float(chance.randint(0, 16)) for _ in range(64 * rows)] for rows in (1, 5, 8, 30, 300) * 4]
    with serve({"deployments": config}) as running, ThreadPoolExecutor(8) as pool:
        expected = [_logits(running, "plain", image) for image in images]
        for name in ("compiled", "two"):
            answers = pool.map(lambda image, name=name: _logits(running, name, image), images)
            for answer, wanted in zip(answers, expected, strict=True):
                assert answer == pytest.approx(wanted, abs=TF32)
        wait_for(lambda: Scrape(running).of("headwater_replica_gpu_memory_bytes", deployment="two"), 30, "memory")


def test_several_compiled_modules_of_one_model_keep_their_outputs_apart() -> None:
    plain = {"model": "devices:Pair", "device": "cuda", "batching": {"max_batch_size": 4}}
    config = {"plain": plain, "compiled": {**plain, "options": {"compile": True}}}
    chance = random.Random(8)
    with serve({"deployments": config}) as running:
        for rows in (1, 3, 4, 2, 4):
            x = [chance.uniform(-1, 1) for _ in range(16 * rows)]
            answers = [running.infer(name, x, shape=[rows, 16]).json() for name in config]
            expected, got = (answer["outputs"][0]["data"] for answer in answers)
            assert got == pytest.approx(expected, abs=1e-4)


def test_memory_and_a_poisoned_context_of_a_real_gpu() -> None:
    """A row of x takes x GiB on the GPU; one of -1 poisons its context."""
    config = {"taker": {"model": "devices:Taker", "device": "cuda", "warmup_batch_sizes": [1]}}
    with serve({"deployments": config}) as running:
        import torch

        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        before = running.replica_folders("taker")
        answer = running.infer("taker", [gib / 6] * 8, shape=[8, 1])
        assert answer.status_code == 200, answer.text
        assert "out of memory with 8 rows at once; computes at most 4" in running.log.read_text()
        answer = running.infer("taker", [1, 2 * gib], shape=[2, 1])
        assert answer.status_code == 500
        assert "row 1: out of memory on cuda:0 with 1 row alone" in answer.text
        assert running.infer("taker", [1], shape=[1, 1]).status_code == 200
        assert running.replica_folders("taker") == before
        assert running.infer("taker", [-1], shape=[1, 1]).status_code == 503
        wait_for(lambda: not set(before) & set(running.replica_folders("taker")), 60, "the replica's end")
        wait_for(lambda: running.infer("taker", [1], shape=[1, 1]).status_code == 200, 120, "another one's answers")
