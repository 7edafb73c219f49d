"""Two inputs that clients may leave out: one with a default, one that the function looks for."""

# mypy: ignore-errors

import numpy as np
from pytriton.decorators import batch, fill_optionals, first_value
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton


@fill_optionals(shift=np.array([2], np.float32))
@batch
@first_value("weight")
def weighted(a, b, shift, **inputs):
    """`weight` is one number for all rows."""
    weight = inputs.get("weight", 1)
    return {"add": a * weight + b + shift, "sub": a * weight - b + shift}


def vector(name, **more):
    """A tensor of one dimension."""
    return Tensor(name=name, dtype=np.float32, shape=(-1,), **more)


def main():
    """Bind and serve."""
    with Triton() as triton:
        triton.bind(
            "AddSubOptional",
            weighted,
            inputs=[vector("a"), vector("b"), vector("shift", optional=True), vector("weight", optional=True)],
            outputs=[vector("add"), vector("sub")],
            config=ModelConfig(max_batch_size=128),
            strict=True,
        )
        triton.serve()


if __name__ == "__main__":
    main()
