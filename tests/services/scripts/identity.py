"""Numbers and bytes, given back as they came."""

# mypy: ignore-errors

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton


@batch
def same(**inputs):
    """Without names, tensors are INPUT_1 and OUTPUT_1, and so on."""
    return {"OUTPUT_1": inputs["INPUT_1"], "OUTPUT_2": inputs["INPUT_2"]}


TENSORS = [Tensor(dtype=np.float64, shape=(-1,)), Tensor(dtype=object, shape=(1,))]

with Triton() as triton:
    triton.bind("Identity", same, inputs=TENSORS, outputs=TENSORS, config=ModelConfig(max_batch_size=128), strict=True)
    triton.serve()
