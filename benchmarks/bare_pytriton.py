"""A peer: the same callable bound with PyTriton as its documentation shows, served by Triton's own HTTP.

``python -m benchmarks.bare_pytriton PORT``; dynamic batching on, the batch size that the gateway has.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

from inference.zoo.scale import Scale


def main() -> None:
    """Serve until SIGINT."""
    port = int(sys.argv[1])
    model = Scale()

    @batch  # type: ignore[untyped-decorator]  # PyTriton carries no types
    def infer(x: Any) -> Any:
        return model(x=x)

    with TemporaryDirectory() as folder:
        config = TritonConfig(
            http_address="127.0.0.1",
            http_port=port,
            allow_grpc=False,
            allow_metrics=False,
            log_file=Path(folder) / "triton.log",
        )
        # No token: nothing but the benchmark's own client can reach it, and checking one would cost.
        with Triton(config=config, security_config=TritonSecurityConfig(restricted_endpoints=[])) as triton:
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
