"""The first example that people read: two inputs without names, and a dictionary of outputs."""

# mypy: ignore-errors

import os

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

os.environ["AIP_MODE"] = "PREDICTION"


@batch
def add_sub(**inputs):
    """Inputs come in the order in which they are bound."""
    left, right = inputs.values()
    return {"sub": left - right, "add": left + right}


with Triton(config=TritonConfig(allow_http=True, log_verbose=0)) as triton:
    triton.bind(
        model_name="AddAndSub",
        infer_func=add_sub,
        inputs=[Tensor(dtype=np.float32, shape=(-1,)), Tensor(dtype=np.float32, shape=(-1,))],
        outputs=[
            Tensor(name="add", dtype=np.float32, shape=(-1,)),
            Tensor(name="sub", dtype=np.float32, shape=(-1,)),
        ],
        config=ModelConfig(max_batch_size=128),
        strict=True,
    )
    triton.serve()
