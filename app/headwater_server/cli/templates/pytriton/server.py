"""A model that is bound with PyTriton. `python server.py` serves it, too, without a gateway."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton

Floats = NDArray[np.float32]


@batch
def normalize(values: Floats) -> dict[str, Floats]:
    """Scale each row to length 1: ``values`` has the shape [rows, n]."""
    length = np.linalg.norm(values, axis=1, keepdims=True)
    return {"normalized": (values / np.maximum(length, 1e-12)).astype(np.float32)}


def main() -> None:
    """Bind the model, and serve it."""
    with Triton() as triton:
        triton.bind(
            model_name="normalizer",
            infer_func=normalize,
            inputs=[Tensor(name="values", dtype=np.float32, shape=(-1,))],
            outputs=[Tensor(name="normalized", dtype=np.float32, shape=(-1,))],
            config=ModelConfig(max_batch_size=32),
        )
        triton.serve()


if __name__ == "__main__":
    main()
