"""Two models in one script."""

# mypy: ignore-errors

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton


def multiplier(factor):
    """A function of its own for each model."""

    @batch
    def multiply(multiplicand):
        return [multiplicand * factor]

    return multiply


with Triton() as triton:
    for factor in (2, 4):
        triton.bind(
            model_name=f"Multiply{factor}",
            infer_func=multiplier(np.float32(factor)),
            inputs=[Tensor(name="multiplicand", dtype=np.float32, shape=(-1,))],
            outputs=[Tensor(name="product", dtype=np.float32, shape=(-1,))],
            config=ModelConfig(max_batch_size=8),
            strict=True,
        )
    triton.serve()
