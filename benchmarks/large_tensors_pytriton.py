"""A peer: the same callables bound with PyTriton as its documentation shows, served by Triton's own HTTP.

``python -m benchmarks.large_tensors_pytriton PORT``; dynamic batching on, the batch size that the gateway has.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor

from benchmarks.large_tensors_model import IMAGE_SHAPE, ChannelMeans, Echo
from benchmarks.local_triton import local_triton

MAX_BATCH_SIZE = 16


def main() -> None:
    """Serve until SIGINT."""
    port = int(sys.argv[1])
    models = {"channelmeans": (ChannelMeans(), "means", (IMAGE_SHAPE[0],)), "echo": (Echo(), "image", IMAGE_SHAPE)}
    with local_triton(port) as triton:
        for name, (model, output, shape) in models.items():

            @batch  # type: ignore[untyped-decorator]  # PyTriton carries no types
            def infer(image: Any, model: Any = model) -> Any:
                return model(image=image)

            triton.bind(
                model_name=name,
                infer_func=infer,
                inputs=[Tensor(name="image", dtype=np.float32, shape=IMAGE_SHAPE)],
                outputs=[Tensor(name=output, dtype=np.float32, shape=shape)],
                config=ModelConfig(max_batch_size=MAX_BATCH_SIZE, batcher=DynamicBatcher()),
            )
        triton.serve()


if __name__ == "__main__":
    main()
