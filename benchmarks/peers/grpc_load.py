"""Load on Triton's gRPC: closed loop over one channel, so many calls at once.

``python -m benchmarks.peers.grpc_load`` reads jobs, JSON lines, and answers each with what it found, as wrk's are
(`benchmarks.load.Load`). A client in Python takes more of the machine than wrk does.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from typing import Any

from benchmarks.load import Load
from benchmarks.stream_child import Child, give_back

__all__ = ["GrpcLoad"]
CONNECT_TIMEOUT_S = 30.0


class GrpcLoad(Child):
    """The process."""

    def __init__(self) -> None:
        super().__init__("benchmarks.peers.grpc_load")

    def run(self, port: int, model: str, tensor: dict[str, Any], raw: bytes, calls: int, seconds: float) -> Load:
        """Send one tensor again and again.

        Args:
            port: the server's.
            model: whom to ask.
            tensor: the input's name, datatype and shape.
            raw: its bytes.
            calls: how many at once.
            seconds: how long.

        Raises:
            RuntimeError: a call failed.
        """
        data = base64.b64encode(raw).decode()
        job = {"port": port, "model": model, "tensor": tensor, "raw": data, "calls": calls, "seconds": seconds}
        self.send(json.dumps(job).encode())
        found = json.loads(self.receive())
        if "error" in found:
            raise RuntimeError(found["error"])
        return Load(**found)


async def _run(job: dict[str, Any]) -> dict[str, Any]:
    import grpc.aio
    from tritonclient.grpc import service_pb2 as pb
    from tritonclient.grpc import service_pb2_grpc as pb_grpc

    message = pb.ModelInferRequest(model_name=job["model"])
    message.inputs.add(**job["tensor"])
    message.raw_input_contents.append(base64.b64decode(job["raw"]))
    latencies_ms: list[float] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{job['port']}") as channel:
        ask = pb_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        await ask(message, timeout=CONNECT_TIMEOUT_S, wait_for_ready=True)
        started = time.perf_counter()
        end = started + job["seconds"]

        async def keep_asking() -> None:
            while (sent := time.perf_counter()) < end:
                await ask(message)
                latencies_ms.append((time.perf_counter() - sent) * 1000)

        await asyncio.gather(*(keep_asking() for _ in range(job["calls"])))
        seconds = time.perf_counter() - started
    latencies_ms.sort()
    count = len(latencies_ms)
    return {
        "requests": count,
        "seconds": seconds,
        "p50_ms": latencies_ms[count // 2],
        "p99_ms": latencies_ms[min(count - 1, int(0.99 * count))],
        "status_errors": 0,
        "socket_errors": 0,
    }


def main() -> None:
    """Do jobs until the input ends."""
    import grpc

    for line in sys.stdin.buffer:
        try:
            found = asyncio.run(_run(json.loads(line)))
        except grpc.RpcError as error:
            found = {"error": f"{error.code().name}: {error.details()}"}
        give_back(json.dumps(found).encode())


if __name__ == "__main__":
    main()
