"""Reads a parameter and a header of each request."""

# mypy: ignore-errors

import numpy as np
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def infer(requests):
    """A header that matches the pattern is a parameter, too."""
    answers = []
    for request in requests:
        a, b = request.values()
        divisor, factor = (float(request.parameters[name]) for name in ("header_divisor", "factor"))
        answers.append({"scaled_add": (a + b) / divisor, "scaled_sub": (a - b) * factor})
    return answers


def vector(name=None):
    """A tensor of one dimension."""
    return Tensor(name=name, dtype=np.float32, shape=(-1,))


with Triton(config=TritonConfig(http_header_forward_pattern="header.*")) as triton:
    triton.bind(
        "Headers",
        infer,
        inputs=[vector(), vector()],
        outputs=[vector("scaled_add"), vector("scaled_sub")],
        config=ModelConfig(max_batch_size=128),
        strict=True,
    )
    triton.serve()
