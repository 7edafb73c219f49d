"""A layer of torch with weights of its own, whose tensors have no names."""

# mypy: ignore-errors

import logging

import numpy as np
import torch
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton

torch.manual_seed(7)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYER = torch.nn.Linear(20, 30).to(DEVICE).eval()

logging.basicConfig(level=logging.INFO)
logger = logging.getLogger("linear")


@batch
def infer(**inputs):
    """The layer's output."""
    (features,) = inputs.values()
    result = LAYER(torch.from_numpy(features).to(DEVICE))
    return [result.cpu().detach().numpy()]


with Triton() as triton:
    logger.info("binding")
    triton.bind(
        model_name="Linear",
        infer_func=infer,
        inputs=[Tensor(dtype=np.float32, shape=(-1,))],
        outputs=[Tensor(dtype=np.float32, shape=(-1,))],
        config=ModelConfig(max_batch_size=128),
        strict=True,
    )
    triton.serve()
