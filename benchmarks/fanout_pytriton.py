"""The layout of the report: PyTriton alone, with a model that calls three others.

``python -m benchmarks.fanout_pytriton HTTP_PORT GRPC_PORT OPTIONS``; OPTIONS is JSON: the options of ``a``, ``b`` and
``c``. One Triton has four models bound, as PyTriton's documentation shows. A, B and C compute; ``router`` calls A with
PyTriton's own client, takes the features out, and calls the heads that the request names with them, one after the
other. Clients are made at the first use and kept; they speak gRPC, which was no slower here than HTTP.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor

from benchmarks.fanout_calibration import loaded
from benchmarks.fanout_models import ANSWER, Head, Trunk
from benchmarks.local_triton import local_triton
from headwater import Model

MAX_BATCH_SIZE = 8


def main() -> None:
    """Serve until SIGINT."""
    http_port, grpc_port = int(sys.argv[1]), int(sys.argv[2])
    options: dict[str, dict[str, Any]] = json.loads(sys.argv[3])
    torch.set_num_threads(1)
    models: dict[str, Model] = {
        "a": loaded(Trunk(**options["a"])),
        "b": loaded(Head(**options["b"])),
        "c": loaded(Head(**options["c"])),
    }
    with local_triton(http_port, grpc_port) as triton:
        model_config = ModelConfig(max_batch_size=MAX_BATCH_SIZE, batcher=DynamicBatcher())
        for name, model in models.items():
            triton.bind(
                model_name=name,
                infer_func=_computing(model),
                inputs=[_tensor(tensor) for tensor in model.inputs],
                outputs=[_tensor(tensor) for tensor in model.outputs],
                config=model_config,
            )
        triton.bind(
            model_name="router",
            infer_func=_routing(f"grpc://127.0.0.1:{grpc_port}"),
            inputs=[_tensor(models["a"].inputs[0]), Tensor(name="heads", dtype=np.bytes_, shape=(1,))],
            outputs=[_tensor(models[head].outputs[0]) for head in "bc"],
            config=model_config,
        )
        triton.serve()


def _computing(model: Model) -> Any:
    @batch  # type: ignore[untyped-decorator]  # PyTriton carries no types
    def infer(**arrays: Any) -> Any:
        # A copy: PyTriton's arrays can't be written, and torch warns of that.
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        return {name: tensor.numpy() for name, tensor in model(**tensors).items()}

    return infer


def _routing(url: str) -> Any:
    client: Callable[[str], Any] = functools.cache(lambda name: ModelClient(url, name))

    @batch  # type: ignore[untyped-decorator]  # PyTriton carries no types
    def infer(x: Any, heads: Any) -> Any:
        features = client("a").infer_batch(x)["features"]
        # The outputs of a head that isn't asked for are zeros: a Triton model answers all that it declares.
        merged = {f"y_{head}": np.zeros((len(x), ANSWER), np.float32) for head in "bc"}
        for head in heads[0, 0].decode().split(","):
            merged.update(client(head).infer_batch(features))
        return merged

    return infer


def _tensor(declared: Any) -> Any:
    dtypes = {"UINT8": np.uint8, "FP32": np.float32}
    return Tensor(name=declared.name, dtype=dtypes[declared.datatype], shape=tuple(declared.shape))


if __name__ == "__main__":
    main()
