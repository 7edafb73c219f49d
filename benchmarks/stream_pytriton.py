"""A peer: token streams as PyTriton alone gives them, one decoupled response a token.

``python -m benchmarks.stream_pytriton serve HTTP_PORT GRPC_PORT``: an async generator that computes nothing and yields
a token as often as the request asks. Without PyTriton's shared-memory store, which is slower for so small answers.

``python -m benchmarks.stream_pytriton ask GRPC_PORT STREAMS TOKENS``: that many requests at once, on one gRPC stream,
which is the cheapest client; writes a line of JSON: tokens, seconds, and what went wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

__all__: list[str] = []

MODEL = "counter"


def main() -> None:
    """Serve until SIGINT, or ask."""
    if sys.argv[1] == "serve":
        _serve(int(sys.argv[2]), int(sys.argv[3]))
    else:
        found = asyncio.run(_ask(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
        print(json.dumps(found))


def _serve(http_port: int, grpc_port: int) -> None:
    os.environ["PYTRITON_NO_TENSORSTORE"] = "1"
    import numpy as np
    from pytriton.model_config import ModelConfig, Tensor

    from benchmarks.local_triton import local_triton

    async def count(requests: Any) -> AsyncIterator[list[dict[str, Any]]]:
        (request,) = requests
        for token in range(int(request.data["count"][0, 0])):
            yield [{"token": np.array([[token]], np.int32)}]

    with local_triton(http_port, grpc_port) as triton:
        triton.bind(
            model_name=MODEL,
            infer_func=count,
            inputs=[Tensor(name="count", dtype=np.int32, shape=(1,))],
            outputs=[Tensor(name="token", dtype=np.int32, shape=(1,))],
            # Without the batcher: what it merges would end as one.
            config=ModelConfig(max_batch_size=1, batcher=None, decoupled=True),
        )
        triton.serve()


async def _ask(port: int, streams: int, tokens: int) -> dict[str, Any]:
    import grpc.aio
    from tritonclient.grpc import service_pb2 as pb
    from tritonclient.grpc import service_pb2_grpc as pb_grpc

    got: dict[str, list[int]] = {str(number): [] for number in range(streams)}
    ended = set()
    errors: list[str] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = pb_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        started = time.perf_counter()
        for name in got:
            message = pb.ModelInferRequest(model_name=MODEL, id=name)
            # Otherwise the end of an answer is no message of its own.
            message.parameters["triton_enable_empty_final_response"].bool_param = True
            message.inputs.add(name="count", datatype="INT32", shape=[1, 1])
            message.raw_input_contents.append(tokens.to_bytes(4, "little"))
            await call.write(message)
        async for message in call:
            response = message.infer_response
            if message.error_message:
                errors.append(message.error_message[:200])
                ended.add(response.id)
            for raw in response.raw_output_contents:
                got[response.id].append(int.from_bytes(raw, "little"))
            if response.parameters["triton_final_response"].bool_param:
                ended.add(response.id)
            if len(ended) == streams:
                break
        seconds = time.perf_counter() - started
        call.cancel()
    wrong = sum(one != list(range(tokens)) for one in got.values())
    if wrong:
        errors.append(f"{wrong} of {streams} streams are not the tokens in order")
    return {"tokens": sum(map(len, got.values())), "seconds": seconds, "errors": sorted(set(errors))}


if __name__ == "__main__":
    main()
