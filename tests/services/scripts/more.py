"""A PyTriton script without a main function, which loads its model when it is run."""

# mypy: ignore-errors

import numpy as np
import torch
from pytriton.decorators import (
    batch,
    first_value,
    group_by_keys,
    group_by_values,
    pad_batch,
    triton_context,
)
from pytriton.model_config import ModelConfig, Tensor
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.triton import Triton

MODEL = torch.nn.Linear(2, 1)
with torch.no_grad():
    MODEL.weight.copy_(torch.tensor([[2.0, -1.0]]))
    MODEL.bias.fill_(0.5)


@batch
def linear(**inputs):
    """A linear layer of torch."""
    (features,) = inputs.values()
    with torch.no_grad():
        return [MODEL(torch.from_numpy(features)).numpy()]


@group_by_keys
@batch
def with_missing(**inputs):
    """A group of requests has the same inputs."""
    there = inputs["x"] if "extra" not in inputs else inputs["x"] + inputs["extra"]
    return {"y": there}


@batch
@group_by_values("power")
@first_value("power")
def with_power(x, power):
    """Rows with the same exponent share a call."""
    return {"y": x ** np.float32(power)}


@batch
@pad_batch
def padded(x):
    """Padded to a preferred size, of which each row is told."""
    return {"size": np.full((len(x), 1), len(x), np.int32)}


@batch
def counted(x):
    """Numbers in a type that may not hold them."""
    return {"count": x.astype(np.float64)}


async def waited(requests):
    """A coroutine."""
    return [{"y": request["x"] + 1} for request in requests]


class Warm:
    """Counts its calls, of which ``model_warmup`` makes the first."""

    def __init__(self):
        self.calls = 0

    @triton_context
    @batch
    def infer(self, x, triton_context=None):
        """The number of rows that this instance has had before."""
        before = self.calls
        self.calls += len(x)
        return {"before": np.full((len(x), 1), before, np.int32)}


def tensor(name, dtype=np.float32, shape=(-1,), **more):
    """A tensor of one dimension."""
    return Tensor(name=name, dtype=dtype, shape=shape, **more)


x, y = [tensor("x")], [tensor("y")]
warmup = ModelWarmup("zeros", 2, {"x": WarmupInput(np.float32, (3,), zero_data=True)}, 2)
with Triton() as triton:
    triton.bind("Linear", linear, [Tensor(dtype=np.float32, shape=(2,))], [Tensor(dtype=np.float32, shape=(1,))])
    triton.bind("Missing", with_missing, [*x, tensor("extra", optional=True)], y, config=ModelConfig(max_batch_size=16))
    triton.bind("Power", with_power, [*x, tensor("power", np.int32, (1,))], y, strict=True)
    triton.bind("Padded", padded, x, [tensor("size", np.int32, (1,))])
    triton.bind("Counted", counted, x, [tensor("count", np.int8)])
    triton.bind("Waited", waited, x, y)
    config = ModelConfig(model_warmup=[warmup])
    triton.bind("Warm", Warm().infer, x, [tensor("before", np.int32, (1,))], config=config)
    triton.serve()
