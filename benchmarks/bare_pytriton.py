"""A peer: the same callable bound with PyTriton as its documentation shows, served by Triton's own HTTP.

``python -m benchmarks.bare_pytriton PORT``; dynamic batching on, the batch size that the gateway has.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor

from benchmarks.local_triton import local_triton
from inference.zoo.scale import Scale


def main() -> None:
    """Serve until SIGINT."""
    port = int(sys.argv[1])
    model = Scale()

    @batch  # type: ignore[untyped-decorator]  # PyTriton carries no types
    def infer(x: Any) -> Any:
        return model(x=x)

    with local_triton(port) as triton:
        triton.bind(
            model_name="scale",
            infer_func=infer,
            inputs=[Tensor(name="x", dtype=np.float32, shape=(-1,))],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(-1,))],
            config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher()),
        )
        triton.serve()


if __name__ == "__main__":
    main()
