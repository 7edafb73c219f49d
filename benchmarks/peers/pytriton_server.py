"""A peer: the callables bound with PyTriton as its documentation shows, served by Triton's own HTTP and gRPC.

``python -m benchmarks.peers.pytriton_server SCENARIO HTTP_PORT GRPC_PORT``; dynamic batching on, without a delay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor

from benchmarks.local_triton import local_triton
from benchmarks.peers.work import IMAGE_SHAPE, MAX_BATCH_SIZE, SCALINGS, work


def main() -> None:
    """Serve until SIGINT."""
    scenario, http_port, grpc_port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    infer, inputs, outputs = _bound(scenario)
    with local_triton(http_port, grpc_port) as triton:
        triton.bind(
            model_name=scenario,
            infer_func=batch(infer),
            inputs=inputs,
            outputs=outputs,
            config=ModelConfig(max_batch_size=MAX_BATCH_SIZE[scenario], batcher=DynamicBatcher()),
        )
        triton.serve()


def _bound(scenario: str) -> tuple[Callable[..., Any], list[Any], list[Any]]:
    """The callable, its inputs and its outputs."""
    todo = work(scenario)
    if scenario in SCALINGS:
        return (
            lambda x: todo.batch(x),
            [Tensor(name="x", dtype=np.float32, shape=(-1,))],
            [Tensor(name="y", dtype=np.float32, shape=(-1,))],
        )
    if scenario in ("text", "mixed"):
        return (
            lambda text: todo.batch([row for (row,) in text]),
            [Tensor(name="text", dtype=np.bytes_, shape=(1,))],
            [Tensor(name="embedding", dtype=np.float32, shape=(384,))],
        )
    if scenario == "fanout":
        shapes = {"logits": (10,), "digit": (1,), "odd_probability": (1,), "reconstruction": (1, 8, 8)}
        dtypes = {"FP32": np.float32, "INT32": np.int32}
        return (
            lambda image: todo.batch(image),
            [Tensor(name="image", dtype=np.float32, shape=(1, 8, 8))],
            [
                Tensor(name=name, dtype=dtypes[datatype], shape=shapes.get(name, (1,)))
                for name, datatype in todo.datatypes.items()
            ],
        )
    return (
        lambda image: todo.batch(image),
        [Tensor(name="image", dtype=np.float32, shape=IMAGE_SHAPE)],
        [Tensor(name="means", dtype=np.float32, shape=(IMAGE_SHAPE[0],))],
    )


if __name__ == "__main__":
    main()
