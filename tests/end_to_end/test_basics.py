"""A server as its clients see it."""

from __future__ import annotations

import json

import numpy as np

from tests.running import Running


def test_a_model_answers(services: Running) -> None:
    answer = services.infer("faulty", [1.0, 2.0], shape=[1, 2])
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [2.0, 4.0]}]


def test_large_tensors_arrive_whole_again_and_again(services: Running) -> None:
    numbers = np.arange(200_000, dtype=np.float32).reshape(1, -1)
    described = {"name": "x", "datatype": "FP32", "shape": [1, 200_000], "parameters": {"binary_data_size": 800_000}}
    head = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    for factor in (1, 2, 3):  # from the second on there is room for the answer in shared memory
        answer = services.client.post(
            f"{services.url}/v2/models/faulty/infer",
            content=head + (numbers * factor).tobytes(),
            headers={"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"},
        )
        assert answer.status_code == 200, answer.text
        got = answer.content[int(answer.headers["inference-header-content-length"]) :]
        assert np.frombuffer(got, np.float32).tolist() == (numbers * factor * 2)[0].tolist()
