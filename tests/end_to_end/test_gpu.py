"""A replica on a GPU."""

from __future__ import annotations

import pytest

from tests.running import serve


def _no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.skipif(_no_gpu(), reason="needs a CUDA device")
def test_a_model_on_a_gpu_answers_as_on_the_cpu() -> None:
    model = "inference.zoo.digits:Digits"
    with serve({"deployments": {name: {"model": model, "device": name} for name in ("cuda", "cpu")}}) as running:
        from inference.zoo.digits import Digits

        image = Digits.example["image"]
        flat = [value for row in image[0] for value in row]
        answers = [running.infer(name, flat, shape=[1, 1, 8, 8], name="image").json() for name in ("cuda", "cpu")]
        on_gpu, on_cpu = ({output["name"]: output["data"] for output in answer["outputs"]} for answer in answers)
        assert on_gpu["digit"] == on_cpu["digit"]
        assert on_gpu["logits"] == pytest.approx(on_cpu["logits"], abs=1e-4)
