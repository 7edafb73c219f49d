"""A Triton that nothing stands before: what servers that are not Headwater bind their models to, with PyTriton alone.

The environment of PyTriton among `benchmarks.peers` runs this too: nothing else of ours is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

__all__ = ["local_triton"]


@contextlib.contextmanager
def local_triton(http_port: int, grpc_port: int | None = None) -> Iterator[Any]:
    """A Triton that listens on the loopback interface, to bind models to and then to call ``serve`` of.

    Args:
        http_port: of its HTTP.
        grpc_port: of its gRPC; None: it has none.
    """
    grpc = {"allow_grpc": False} if grpc_port is None else {"grpc_address": "127.0.0.1", "grpc_port": grpc_port}
    with TemporaryDirectory() as folder:
        config = TritonConfig(
            http_address="127.0.0.1",
            http_port=http_port,
            allow_metrics=False,
            log_file=Path(folder) / "triton.log",
            **grpc,
        )
        # No token: nothing but the benchmark's own client can reach it, and checking one would cost.
        with Triton(config=config, security_config=TritonSecurityConfig(restricted_endpoints=[])) as triton:
            yield triton
