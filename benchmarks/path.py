"""How much of our code one `infer` request and one token of a language model's stream run in a gateway worker.

``python -m benchmarks.path [--rounds N] [--check] [--smoke]``. The worker is the real one, in a process of its own with
a profile function in every thread (`benchmarks.path_worker`); requests reach it over a loopback socket. This process
stands in for everything around it: the supervisor, a replica's Triton that answers for ``scale`` over HTTP, and another
that answers over gRPC for a language model, from an engine without a model.

Prints, for a request and for a token, the files of ``headwater_server`` and ``headwater`` that ran and the calls in
each; for a token also the deepest chain of nested coroutines and async generators in each task. A request is measured
from its first byte until `SETTLE_S` after the last byte of its answer, a token from the token before it. Connection,
codecs and channel are warm. The calls printed are those of the median round, because some rounds also flush the access
log or acknowledge frames; the chains are the deepest of all rounds. With ``--check`` the exit status is 1 if a bound
fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import anyio
import grpc.aio
import msgspec
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from benchmarks.gateway import BODY, PATH
from benchmarks.path_worker import Window, is_ours
from benchmarks.smoke import parse_with_smoke
from benchmarks.stream_engine import folder, null
from headwater.engine import EngineLimits
from headwater.lm.engine_host import EngineHost
from headwater.signature import LanguageModelSpec, Signature, TensorSpec
from headwater.wire.frame import FRAME
from headwater.wire.report import HEADWATER, REPORT, RowReport, Status, encode_reports
from headwater_server.config.schema import Server
from headwater_server.control.control_server import ControlServer
from headwater_server.control.messages import WorkerSettings
from headwater_server.control.route_kinds import LanguageKind
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State

MOST_FILES: Final = 36
"""That one `infer` request may touch."""
MOST_COROUTINES: Final = 8
"""That may be nested in a task that handles a token."""
STEP_S: Final = 0.03
"""Of the engine: long enough for each token to be handled before the next."""
SETTLE_S: Final = 0.005
TIMEOUT_S: Final = 60.0
WARM_EVENTS: Final = 5
MORE_TOKENS: Final = 10
"""Than events, because special tokens have no text."""
DOUBLED: Final = [2.0 * value for value in range(16)]


class Worker:
    """A worker's process and one connection to it."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    async def mark(self) -> bytes:
        """Begin or end a window. Returns the worker's answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return await self._process.stdout.readline()

    async def end_window(self) -> Window:
        """End a window once the worker has finished what follows the last byte."""
        await asyncio.sleep(SETTLE_S)
        return msgspec.json.decode(await self.mark(), type=Window)

    def post(self, path: str, body: bytes) -> None:
        """Send a request."""
        head = f"POST {path} HTTP/1.1\r\nHost: worker\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def head(self) -> bytes:
        """Read the answer's head."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"expected status 200, got {head!r}")
        return head

    async def answer(self) -> Any:
        """Read an answer that is whole."""
        length = _length(await self.head())
        return json.loads(await self._reader.readexactly(length))

    async def infer(self) -> None:
        """Have `BODY` answered."""
        self.post(PATH, BODY)
        answer = await self.answer()
        if answer["outputs"][0]["data"] != DOUBLED:
            raise SystemExit(f"expected {DOUBLED}, got {answer}")

    async def event(self) -> None:
        """Read a stream's next event, which is a chunk of the answer."""
        size = int(await self._reader.readline(), 16)
        event = (await self._reader.readexactly(size + 2)).removesuffix(b"\r\n")
        if not json.loads(event.removeprefix(b"data: "))["choices"][0]["text"]:
            raise SystemExit(f"expected a text, got {event!r}")


class GrpcTriton(pb_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """A Triton that passes each message to an engine's host, and its frames back."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    async def ModelStreamInfer(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """See Triton's service."""
        answers: asyncio.Queue[Any] = asyncio.Queue()

        async def handle(message: Any) -> None:
            (tensor,), (raw,) = message.inputs, message.raw_input_contents
            parameters = {HEADWATER: message.parameters[HEADWATER].string_param}
            asked: Any = SimpleNamespace(data={tensor.name: np.frombuffer(raw, np.uint8)[None]}, parameters=parameters)
            async for (answer,) in self._host.handle([asked]):
                answers.put_nowait(pb.ModelInferResponse(id=message.id, raw_output_contents=[answer[FRAME].tobytes()]))
            final = pb.ModelInferResponse(id=message.id)
            final.parameters["triton_final_response"].bool_param = True
            answers.put_nowait(final)

        async def read() -> None:
            async with anyio.create_task_group() as group:
                async for message in messages:
                    group.start_soon(handle, message)

        reading = asyncio.create_task(read())
        try:
            while True:
                yield pb.ModelStreamInferResponse(infer_response=await answers.get())
        finally:
            reading.cancel()


async def answer_calls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A Triton's HTTP that answers every call as ``scale`` answers `BODY`."""
    report = encode_reports([RowReport(Status.OK)], 5)
    tensors: list[tuple[str, str, np.ndarray[Any, Any]]] = [
        ("y", "FP32", np.array([DOUBLED], np.float32)),
        (REPORT, "UINT8", report),
    ]
    outputs = [
        {"name": name, "datatype": datatype, "shape": array.shape, "parameters": {"binary_data_size": array.nbytes}}
        for name, datatype, array in tensors
    ]
    head = json.dumps({"outputs": outputs}).encode()
    body = head + b"".join(array.tobytes() for _, _, array in tensors)
    lengths = f"Content-Length: {len(body)}\r\nInference-Header-Content-Length: {len(head)}\r\n\r\n"
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            await reader.readexactly(_length(await reader.readuntil(b"\r\n\r\n")))
            writer.write(b"HTTP/1.1 200 OK\r\n" + lengths.encode() + body)
    writer.close()


def table(http: Path, grpc_socket: Path, limits: EngineLimits) -> RoutingTable:
    """A worker's models: ``scale`` and ``lm``."""
    scale = Signature("scale", (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),), max_batch_size=64)
    lm = Signature(
        "lm",
        (TensorSpec("text_input", "BYTES", (1,)),),
        (TensorSpec("text_output", "BYTES", (1,)),),
        streams=True,
        language_model=LanguageModelSpec(str(folder()), limits),
    )
    return RoutingTable(
        (
            DeploymentRoute("scale", State.READY, "", scale, (ReplicaRoute("scale-0", f"unix:{http}", ""),)),
            DeploymentRoute(
                "lm",
                State.READY,
                "",
                lm,
                (ReplicaRoute("lm-0", "unix:", "", f"unix:{grpc_socket}"),),
                kind=LanguageKind(),
            ),
        )
    )


@contextlib.asynccontextmanager
async def serving(place: Path) -> AsyncIterator[Worker]:
    """A worker and everything around it."""
    engine = null(folder(), device="cpu", on_broken=None, step_s=STEP_S)
    host = EngineHost(engine)
    triton = await asyncio.start_unix_server(answer_calls, place / "http")
    grpc_triton = grpc.aio.server()
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(GrpcTriton(host), grpc_triton)
    grpc_triton.add_insecure_port(f"unix:{place / 'grpc'}")
    await grpc_triton.start()
    control = ControlServer()
    await control.start(place / "control")
    control.publish(table(place / "http", place / "grpc", engine.limits))
    settings = WorkerSettings(str(place / "control"), Server().model_dump(mode="json"))
    (place / "settings").write_bytes(msgspec.json.encode(settings))
    with (place / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.path_worker", str(place / "settings"),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, limit=1 << 20,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline() or sys.exit((place / "log").read_text()))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield Worker(process, reader, writer)
        writer.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await control.close()
        await grpc_triton.stop(None)
        triton.close()
        await asyncio.to_thread(host.close)


async def measure(rounds: int) -> tuple[list[Window], list[Window]]:
    """The windows of some requests, and of some tokens."""
    with tempfile.TemporaryDirectory(prefix="hw-") as place:
        async with serving(Path(place)) as worker:
            requests, tokens = [], []
            asked = {"model": "lm", "prompt": "x", "max_tokens": WARM_EVENTS + rounds + MORE_TOKENS}
            worker.post("/v1/completions", json.dumps(asked).encode())
            await worker.answer()  # these tokens' texts are cached from now on
            await worker.infer()
            for _ in range(rounds):
                await worker.mark()
                await worker.infer()
                requests.append(await worker.end_window())
            worker.post("/v1/completions", json.dumps({**asked, "stream": True}).encode())
            await worker.head()
            for _ in range(WARM_EVENTS):
                await worker.event()
            for _ in range(rounds):
                await worker.mark()
                await worker.event()
                tokens.append(await worker.end_window())
            return requests, tokens


def report(what: str, windows: Sequence[Window]) -> int:
    """Print the calls of the median round. Returns how many files they are in."""
    calls = sorted((window.calls for window in windows), key=_count)[len(windows) // 2]
    print(f"{what}: {len(calls)} files, {_count(calls)} calls")
    for file, functions in sorted(calls.items()):
        print(f"  {file}: " + ", ".join(f"{name} {count}" for name, count in functions.items()))
    return len(calls)


def report_chains(windows: Sequence[Window]) -> int:
    """Print the deepest chain of each task. Returns how many coroutines the deepest of all has."""
    chains: dict[str, list[str]] = {}
    for window in windows:
        for task, chain in window.chains.items():
            chains[task] = max(chain, chains.get(task, []), key=len)
    for chain in sorted(chains.values(), key=len, reverse=True):
        print(f"one token: {len(chain)} nested coroutines in one task, {sum(map(is_ours, chain))} of them ours")
        print("".join(f"  {name}\n" for name in chain), end="")
    return max(map(len, chains.values()))


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="fail if a bound does not hold")
    options = parse_with_smoke(parser, rounds=2)
    requests, tokens = asyncio.run(asyncio.wait_for(measure(options.rounds), TIMEOUT_S))
    files = report("one infer", requests)
    report("one token", tokens)
    bounds = {
        "files that one infer touches": (files, MOST_FILES),
        "nested coroutines of one token": (report_chains(tokens), MOST_COROUTINES),
    }
    for name, (found, most) in bounds.items():
        print(f"{name}: {found}, at most {most}: {'holds' if found <= most else 'does not hold'}")
    if options.check and any(found > most for found, most in bounds.values()):
        sys.exit(1)


def _count(calls: dict[str, dict[str, int]]) -> int:
    return sum(sum(functions.values()) for functions in calls.values())


def _length(head: bytes) -> int:
    """The length of an HTTP message's body, by its head."""
    fields = dict(line.lower().split(b": ", 1) for line in head.splitlines()[1:] if line)
    return int(fields[b"content-length"])


if __name__ == "__main__":
    main()
