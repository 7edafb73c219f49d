"""A server as its clients see it."""

from __future__ import annotations

from tests.running import Running


def test_a_model_answers(services: Running) -> None:
    answer = services.infer("faulty", [1.0, 2.0], shape=[1, 2])
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [2.0, 4.0]}]
