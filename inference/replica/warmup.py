"""Warm-up: real calls through the replica's own Triton, so that no part of the path is cold for the first client."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from inference.datatypes import DATATYPES, float32_to_bf16, pack_bytes
from inference.errors import DeclarationError, ReplicaError
from inference.replica.triton import EmbeddedTriton, UnixConnection
from inference.signature import Signature, TensorSpec
from inference.wire.frame import decode_frame
from inference.wire.report import HEADWATER, REPORT, CallNote, RowReport, Status, decode_reports
from inference.wire.shared_memory import ANSWER_HEAD_BYTES, SHARED_FROM_BYTES, SharedCall, aligned, stand_in_shape
from inference.wire.tensor_store import batch_bytes

__all__ = ["Caller", "FrameCaller", "HttpCaller", "batch_sizes", "example_rows", "warm_up"]


def batch_sizes(max_batch_size: int) -> list[int]:
    """Powers of two up to ``max_batch_size``, and ``max_batch_size`` itself."""
    sizes = [1 << power for power in range(max_batch_size.bit_length()) if 1 << power < max_batch_size]
    return [*sizes, max_batch_size]


def example_rows(spec: TensorSpec, value: object, rows: int) -> tuple[bytes, list[int]]:
    """One example row repeated: its bytes as they travel, and the shape with the batch axis.

    Raises:
        DeclarationError: the value doesn't fit the declaration.
    """
    datatype = DATATYPES[spec.datatype]
    where = f"example, input {spec.name!r}"
    wanted = f"{spec.datatype} [{', '.join(str(dim) for dim in spec.shape)}]"
    try:
        if datatype.numpy.hasobject:
            array = np.array(value, dtype=object)
        else:
            array = np.array(value, dtype=np.float32 if spec.datatype == "BF16" else datatype.numpy)
    except (TypeError, ValueError) as error:
        raise DeclarationError(f"{where}: expected {wanted}: {error}") from error
    if array.ndim != len(spec.shape) or any(
        dim not in (-1, got) for dim, got in zip(spec.shape, array.shape, strict=True)
    ):
        raise DeclarationError(f"{where}: expected {wanted}, got shape {list(array.shape)}")
    if datatype.numpy.hasobject:
        elements = [item if isinstance(item, bytes) else str(item).encode() for item in array.ravel().tolist()]
        row = pack_bytes(elements)
    else:
        row = (float32_to_bf16(array) if spec.datatype == "BF16" else array).tobytes()
    return row * rows, [rows, *array.shape]


class Caller(Protocol):
    """Calls the replica's own Triton as a gateway does."""

    def call(self, inputs: Sequence[tuple[TensorSpec, bytes, list[int]]], rows: int) -> list[RowReport]:
        """Make one call. Returns a report for each row that failed, and any number for the others.

        Args:
            inputs: declaration, bytes and shape with the batch axis.
            rows: the number of rows.

        Raises:
            ReplicaError: there was no answer.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def warm_up(
    signature: Signature, caller: Caller, sizes: Sequence[int], *, progress: Callable[[str], None]
) -> None:  # fmt: skip
    """Call the model once with each batch size; a pipeline with all its heads.

    Raises:
        ReplicaError: a call failed; the message includes the callable's own.
    """
    row = signature.example_row()
    try:
        for number, rows in enumerate(sizes, start=1):
            progress(f"warming up, batch of {rows} ({number}/{len(sizes)})")
            inputs = [
                (spec, *example_rows(spec, row[spec.name], rows)) for spec in signature.inputs if spec.name in row
            ]
            for report in caller.call(inputs, rows):
                if report.status is Status.OK:
                    continue
                hint = ""
                if report.status in (Status.RAISED, Status.BAD_INPUT):
                    tried = json.dumps(row, default=str)[:300]
                    hint = f". The values tried were {tried}; if the model can't take these, declare `example` in it"
                raise ReplicaError(f"warm-up with a batch of {rows}: {report.message}{hint}")
    finally:
        caller.close()


class HttpCaller:
    """Calls a model that answers whole, over HTTP.

    Args:
        signature: the model's.
        triton: started.
        token: its access token.
        timeout_s: of a call.
    """

    def __init__(self, signature: Signature, triton: EmbeddedTriton, token: str, timeout_s: float) -> None:
        self._signature = signature
        self._token = token
        self._connection = UnixConnection(triton.http_socket, timeout_s)

    def call(self, inputs: Sequence[tuple[TensorSpec, bytes, list[int]]], rows: int) -> list[RowReport]:
        """See `Caller.call`."""
        with contextlib.ExitStack() as stack:
            shared = _share(stack, self._signature, inputs, rows)
            if shared is not None:
                inputs = [
                    _stand_in(spec, rows) if spec.name in shared.inputs else (spec, data, shape)
                    for spec, data, shape in inputs
                ]
            return self._call(inputs, rows, CallNote(warmup=True, shared=shared))

    def _call(
        self, inputs: Sequence[tuple[TensorSpec, bytes, list[int]]], rows: int, note: CallNote
    ) -> list[RowReport]:
        tensors: list[dict[str, Any]] = [
            {
                "name": spec.name,
                "datatype": DATATYPES[spec.datatype].wire,
                "shape": shape,
                "parameters": {"binary_data_size": len(data)},
            }
            for spec, data, shape in inputs
        ]
        head = json.dumps(
            {
                "inputs": tensors,
                "outputs": [{"name": REPORT, "parameters": {"binary_data": True}}],
                "parameters": {HEADWATER: msgspec.json.encode(note).decode()},
            }
        ).encode()
        body = b"".join((head, *(data for _, data, _ in inputs)))
        headers = {"Inference-Header-Content-Length": str(len(head)), "triton-access-token": self._token}
        try:
            self._connection.request("POST", f"/v2/models/{self._signature.name}/infer", body, headers)
            response = self._connection.getresponse()
            answer = response.read()
        except OSError as error:
            raise ReplicaError(f"warm-up with a batch of {rows}: no answer: {error}") from error
        if response.status != 200:
            raise ReplicaError(f"warm-up with a batch of {rows}: Triton said {answer.decode(errors='replace')}")
        return decode_reports(answer[int(response.headers["Inference-Header-Content-Length"]) :], rows).rows

    def close(self) -> None:
        """See `Caller.close`."""
        self._connection.close()


def _share(
    stack: contextlib.ExitStack, signature: Signature, inputs: Sequence[tuple[TensorSpec, bytes, list[int]]], rows: int
) -> SharedCall | None:
    """Leave the large inputs where a gateway would; None if there are none, and the answer hasn't large ones either."""
    large = [
        (spec.name, data, shape)
        for spec, data, shape in inputs
        if spec.datatype != "BYTES" and len(data) >= SHARED_FROM_BYTES
    ]
    answer_bytes = batch_bytes(signature.outputs, rows)
    if not large and answer_bytes < SHARED_FROM_BYTES:
        return None
    fd = os.memfd_create("headwater-warm-up", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    placed: dict[str, tuple[int, list[int]]] = {}
    end = 0
    for name, data, shape in large:
        placed[name] = (end, shape)
        # Not `os.pwrite`, which writes at most two gigabytes at once.
        with open(fd, "wb", closefd=False) as file:
            file.seek(end)
            file.write(data)
        end += aligned(len(data))
    size_bytes = end + ANSWER_HEAD_BYTES + aligned(answer_bytes)
    os.ftruncate(fd, size_bytes)
    return SharedCall(f"/proc/{os.getpid()}/fd/{fd}", size_bytes, placed, end)


def _stand_in(spec: TensorSpec, rows: int) -> tuple[TensorSpec, bytes, list[int]]:
    shape = stand_in_shape(spec, rows)
    return spec, bytes(math.prod(shape) * DATATYPES[spec.datatype].size_bytes), shape


class FrameCaller:
    """Calls a pipeline or a streaming model over gRPC. It reads only the first result of a stream.

    Args:
        signature: the model's.
        triton: started.
        token: its access token.
        timeout_s: of a call.
    """

    def __init__(self, signature: Signature, triton: EmbeddedTriton, token: str, timeout_s: float) -> None:
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        self._signature = signature
        self._metadata = (("triton-grpc-protocol-triton-access-token", token),)
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(f"unix:{triton.grpc_socket}")
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._failure = grpc.RpcError

    def call(self, inputs: Sequence[tuple[TensorSpec, bytes, list[int]]], rows: int) -> list[RowReport]:
        """See `Caller.call`."""
        from tritonclient.grpc import service_pb2

        name = f"warm-up-{rows}"
        request = service_pb2.ModelInferRequest(model_name=self._signature.name, id=name)
        note = CallNote(warmup=True, stream=name if self._signature.streams else "")
        request.parameters[HEADWATER].string_param = msgspec.json.encode(note).decode()
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for spec, data, shape in inputs:
            request.inputs.add(name=spec.name, datatype=DATATYPES[spec.datatype].wire, shape=shape)
            request.raw_input_contents.append(data)
        reports: list[RowReport] = []
        try:
            answers = self._stub.ModelStreamInfer(iter([request]), metadata=self._metadata, timeout=self._timeout_s)
            for answer in answers:
                if answer.error_message:
                    raise ReplicaError(f"warm-up with a batch of {rows}: Triton said {answer.error_message}")
                for raw in answer.infer_response.raw_output_contents:
                    for piece in decode_frame(raw)[0].pieces:
                        reports += [RowReport(Status(status), message) for _, status, message in piece.failures]
        except self._failure as error:
            raise ReplicaError(f"warm-up with a batch of {rows}: no answer: {error}") from error
        return reports

    def close(self) -> None:
        """See `Caller.close`."""
        self._channel.close()
