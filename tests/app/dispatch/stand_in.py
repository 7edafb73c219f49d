"""Replicas that a test answers for, and dispatchers that call them: in tensors (`Bench`), in frames (`FrameBench`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headwater.signature import HeadSpec, Signature, TensorSpec
from headwater.wire.frame import Frame, FrameTensor, Piece, StepCount, encode_frame
from headwater.wire.report import HEADWATER, REPORT, CallNote, RowReport, Status, encode_reports
from headwater_server.codecs.tensors import Answer, HeadAnswer, InferRequest, OutputWish, RawTensor
from headwater_server.control.messages import ReplicaLoss
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, State
from headwater_server.dispatch.admission import QueueBudget
from headwater_server.dispatch.dispatcher import ModelDispatcher
from headwater_server.dispatch.pool import ReplicaCalls
from headwater_server.errors import HeadwaterError, ReplicaLost, ReplicaUnreachable
from headwater_server.transport.replica_protocol import FrameRequest
from headwater_server.transport.segments import RemoteSegment

NUMBERS = Signature("m", (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),), max_batch_size=4)


class Call:
    """One call that the replica has, to be answered by the test."""

    def __init__(self, head: bytes, data: Sequence[bytes | memoryview]) -> None:
        self.head: dict[str, Any] = json.loads(head)
        self.data = b"".join(data)
        self.answered: asyncio.Future[dict[str, RawTensor]] = asyncio.get_running_loop().create_future()

    @property
    def shape(self) -> list[int]:
        return list(self.head["inputs"][0]["shape"])

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def values(self) -> list[float]:
        return [float(value) for value in np.frombuffer(self.data, np.float32)]

    @property
    def note(self) -> CallNote:
        return msgspec.json.decode(self.head.get("parameters", {}).get(HEADWATER, "{}"), type=CallNote)

    def answer(self, reports: Sequence[RowReport] | None = None, **told: Any) -> None:
        """Answer with the inputs doubled."""
        doubled = (np.frombuffer(self.data, np.float32) * 2).tobytes()
        self.give({"y": RawTensor("FP32", tuple(self.shape), doubled)}, reports, **told)

    def give(self, outputs: dict[str, RawTensor], reports: Sequence[RowReport] | None = None, **told: Any) -> None:
        """Answer with outputs; ``told`` are further arguments of `encode_reports`."""
        report = encode_reports(reports or [RowReport(Status.OK)] * self.rows, 5, **told)
        self.answered.set_result({**outputs, REPORT: RawTensor("UINT8", report.shape, report.tobytes())})


class Replica:
    """A `ReplicaClient`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.called = asyncio.Event()
        self.is_closed = False

    async def infer(
        self, head: bytes, data: Sequence[bytes | memoryview], segment: RemoteSegment | None = None
    ) -> dict[str, RawTensor]:
        if self.is_closed:
            raise ReplicaUnreachable("the replica ended")
        call = Call(head, data)
        self.calls.append(call)
        self.called.set()
        return await call.answered

    def close(self) -> None:
        self.is_closed = True
        for call in self.calls:
            if not call.answered.done():
                call.answered.set_exception(ReplicaLost("the replica ended"))


class Bench:
    """A dispatcher with replicas of the test's own."""

    def __init__(
        self,
        signature: Signature = NUMBERS,
        replicas: int = 1,
        budget: QueueBudget | None = None,
        folder: Path | None = None,
        **route: Any,
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.route = DeploymentRoute(
            name="m",
            state=State.READY,
            signature=signature,
            replicas=tuple(ReplicaRoute(f"m-{index}", "unix:", "") for index in range(replicas)),
            **route,
        )
        self.quarantined: list[bytes] = []
        self.losses: list[ReplicaLoss] = []
        self.dispatcher = ModelDispatcher(
            self.route, self.connect, self.quarantined.append, budget, self.losses.append, folder
        )

    def connect(self, name: str, route: ReplicaRoute) -> Replica:
        self.replicas[route.id] = Replica()
        return self.replicas[route.id]

    @property
    def calls(self) -> list[Call]:
        return [call for replica in self.replicas.values() for call in replica.calls]

    @property
    def connected(self) -> list[ReplicaCalls]:
        """What the dispatcher knows of its replicas."""
        # private: the rows that a replica has, and those of other workers, show only in the choice among replicas
        return list(self.dispatcher._pool.connected.values())

    def send(self, *values: float, **fields: Any) -> asyncio.Task[dict[str, RawTensor]]:
        """A request with these values, one a row."""
        data = np.array(values, np.float32).tobytes()
        return self.send_tensor("x", RawTensor("FP32", (len(values), 1), data), **fields)

    def send_tensor(self, name: str, tensor: RawTensor, **fields: Any) -> asyncio.Task[dict[str, RawTensor]]:
        request = InferRequest(
            id="",
            inputs={name: tensor},
            rows=tensor.shape[0],
            outputs=[OutputWish(spec.name, True) for spec in self.route.signature.outputs],  # type: ignore[union-attr]
            batch_parameters=fields.pop("batch", {}),
            row_parameters=fields.pop("row", {}),
            **fields,
        )

        async def outputs() -> dict[str, RawTensor]:
            return (await self.dispatcher.infer(request)).outputs

        return asyncio.create_task(outputs())


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Move the running loop's clock forward: what is due by then happens at its next turn. A test has 120 s in all."""
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + seconds)


def stop_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the running loop's clock, so that what is left of a limit is exact."""
    now_s = asyncio.get_running_loop().time()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)


async def settle() -> None:
    """Let everything that is due happen."""
    for _ in range(10):
        await asyncio.sleep(0)


def numbers(outputs: dict[str, RawTensor]) -> list[float]:
    return [float(value) for value in np.frombuffer(outputs["y"].data, np.float32)]


FACTORS = {"a": 2.0, "b": 3.0, "c": 5.0}
"""What each head multiplies with; head `a` answers `out_a`, and so on."""
HEADS = tuple(FACTORS)


def pipeline(*, streams: bool = False, **heads: HeadSpec) -> Signature:
    """Heads `a` and `b`, which must not fail, and `c`, which may be left out."""
    specs = {
        "a": HeadSpec("a", ("out_a",)),
        "b": HeadSpec("b", ("out_b",)),
        "c": HeadSpec("c", ("out_c",), None, "omit"),
    }
    return Signature(
        name="m",
        inputs=(TensorSpec("x", "FP32", (1,)),),
        outputs=tuple(TensorSpec(f"out_{name}", "FP32", (1,)) for name in HEADS),
        max_batch_size=4,
        heads=tuple({**specs, **heads}.values()),
        streams=streams,
    )


PIPELINE = pipeline()
STREAMING = pipeline(streams=True)
ONCE = msgspec.structs.replace(PIPELINE, idempotent=False)


class FrameCall:
    """One call that the replica has, to be answered by the test."""

    def __init__(self, name: str, request: FrameRequest) -> None:
        self.name = name
        self.note = request.note
        ((_, _, self.shape, pieces),) = request.inputs
        self.values = np.frombuffer(b"".join(pieces), np.float32)
        self.answers: asyncio.Queue[bytes | HeadwaterError | None] = asyncio.Queue()
        self.is_left = False

    def rows_of(self, head: str) -> list[int]:
        """Rows that want a head."""
        masks = [mask for mask, count in self.note.heads for _ in range(count)]
        assert len(masks) == len(self.values)
        return [row for row, mask in enumerate(masks) if mask >> HEADS.index(head) & 1]

    @property
    def wanted(self) -> list[str]:
        return [head for head in HEADS if self.rows_of(head)]

    def piece(self, head: str, failures: Mapping[int, tuple[Status, str]] | None = None, **fields: Any) -> Piece:
        """What the head says of the rows that want it; ``failures`` are by row among these."""
        array = self.values[self.rows_of(head)] * FACTORS[head]
        return Piece(
            head,
            len(array),
            7,
            [(row, int(status), message) for row, (status, message) in (failures or {}).items()],
            [FrameTensor(f"out_{head}", "FP32", (len(array), 1), array.nbytes)],
            **fields,
        )

    def say(self, *pieces: Piece, counts: Sequence[StepCount] = ()) -> None:
        """Answer with one frame."""
        data = [(self.values[self.rows_of(one.head)] * FACTORS[one.head]).tobytes() for one in pieces if one.tensors]
        self.answers.put_nowait(encode_frame(Frame(list(pieces), list(counts)), data).tobytes())

    def answer(self, *heads: str) -> None:
        """Each of these heads in a frame of its own."""
        for head in heads:
            self.say(self.piece(head))

    def end(self, error: HeadwaterError | None = None) -> None:
        self.answers.put_nowait(error)


class FrameReplica:
    """A `FrameReplicaClient`."""

    def __init__(self) -> None:
        self.opened: list[FrameRequest] = []
        self.calls: list[FrameCall] = []
        self.cancelled: list[str] = []

    def open(self, nothing: FrameRequest, *, streams: bool = False) -> None:
        self.opened.append(nothing)

    async def frames(self, name: str, request: FrameRequest) -> AsyncGenerator[bytes, None]:
        call = FrameCall(name, request)
        self.calls.append(call)
        try:
            while (answer := await call.answers.get()) is not None:
                if isinstance(answer, HeadwaterError):
                    raise answer
                yield answer
        finally:
            call.is_left = True

    def placed(self, segment: RemoteSegment) -> contextlib.AbstractAsyncContextManager[str]:
        raise NotImplementedError  # it is on this machine

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)

    def close(self) -> None:
        for call in self.calls:
            call.end(ReplicaLost("the replica ended"))


class FrameBench:
    """A dispatcher with replicas of the test's own."""

    def __init__(self, signature: Signature = PIPELINE, replicas: int = 1, **route: Any) -> None:
        self.replicas: dict[str, FrameReplica] = {}
        self.signature = signature
        self.route = DeploymentRoute(
            name="m",
            state=State.READY,
            signature=signature,
            replicas=tuple(ReplicaRoute(f"m-{index}", "unix:", "", "unix:grpc") for index in range(replicas)),
            **route,
        )
        self.dispatcher = ModelDispatcher(self.route, self._connect)

    def _connect(self, name: str, route: ReplicaRoute) -> FrameReplica:
        self.replicas[route.id] = FrameReplica()
        return self.replicas[route.id]

    @property
    def calls(self) -> list[FrameCall]:
        return [call for replica in self.replicas.values() for call in replica.calls]

    def request(self, *values: float, heads: str = "abc", **fields: Any) -> InferRequest:
        return InferRequest(
            id="",
            inputs={"x": RawTensor("FP32", (len(values), 1), np.array(values, np.float32).tobytes())},
            rows=len(values),
            outputs=[OutputWish(f"out_{head}", True) for head in heads],
            batch_parameters={},
            row_parameters={},
            heads=tuple(heads),
            **fields,
        )

    def send(self, *values: float, heads: str = "abc", **fields: Any) -> asyncio.Task[Answer]:
        """A request with these values, one a row."""
        return asyncio.create_task(self.dispatcher.infer(self.request(*values, heads=heads, **fields)))

    def stream(self, *values: float, heads: str = "abc", **fields: Any) -> FrameReader:
        return FrameReader(self.dispatcher, self.request(*values, heads=heads, **fields))


class FrameReader:
    """A client that reads a stream as it comes."""

    def __init__(self, dispatcher: ModelDispatcher, request: InferRequest) -> None:
        self.pieces: list[HeadAnswer] = []
        self.task = asyncio.create_task(self._read(dispatcher, request))

    async def _read(self, dispatcher: ModelDispatcher, request: InferRequest) -> None:
        async with contextlib.aclosing(dispatcher.stream(request)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                self.pieces.append(piece)

    @property
    def statuses(self) -> list[tuple[str, str]]:
        return [(piece.head, piece.status) for piece in self.pieces]


def head_numbers(answer: Answer | HeadAnswer) -> dict[str, list[float]]:
    return {
        name.removeprefix("out_"): np.frombuffer(tensor.data, np.float32).tolist()
        for name, tensor in answer.outputs.items()
    }


def expected_heads(values: Sequence[float], heads: str) -> dict[str, list[float]]:
    return {head: [value * FACTORS[head] for value in values] for head in heads}
