"""Warm-up: real calls through the replica's Triton, so that no part of the path is cold for the first client."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final, Literal

import grpc
import msgspec
from tritonclient.grpc import service_pb2, service_pb2_grpc

from headwater.datatypes import DATATYPES
from headwater.errors import FAULTS, ModelUnfit, ReplicaError
from headwater.signature import Signature, TensorSpec
from headwater.wire.example_rows import example_hint, example_rows
from headwater.wire.frame import decode_frame
from headwater.wire.handshake import ReplicaSpec, WarmUpRequest
from headwater.wire.report import (
    CLIENT_FAULTS,
    HEADWATER,
    OF_VALUES,
    REPORT,
    CallNote,
    RowReport,
    Status,
    decode_reports,
)
from headwater.wire.shared_memory import (
    ANSWER_HEAD_BYTES,
    SHARED_FROM_BYTES,
    SharedCall,
    aligned,
    batch_bytes,
    stand_in_shape,
)  # fmt: skip
from headwater.wire.triton_words import SHARED_MEMORY_FULL, is_shared_memory_full
from headwater_server.binder.embedded_triton import EmbeddedTriton, UnixConnection

__all__ = ["grpc_outputs", "warm_up"]

LONGEST_CALL_S: Final = 5.0
"""Seconds that a call of the warm-up may take; from the first call on that would take longer, sizes are left out."""
_RAISED: Final = re.compile(r"(?:element \d+: )?(?:(?:step|model) `[^`]*`: )?(\w+)(?::|\Z)")
"""Matches the exception's class at the beginning of the message of a row whose call raised."""

Input = tuple[TensorSpec, bytes, list[int]]
"""A tensor's declaration, bytes and shape with the batch axis."""


def warm_up(
    request: WarmUpRequest,
    triton: EmbeddedTriton,
    spec: ReplicaSpec,
    report: Callable[[Literal["progress", "warning"], str], None],
) -> None:
    """Call the model once with each of the request's numbers of rows. A pipeline is called with all its heads.

    If a call fails and an input has no example, the model may be right and only the invented values wrong: the warm-up
    then ends with a warning.

    Args:
        request: what to call.
        triton: the replica's Triton.
        spec: the replica's specification.
        report: called with each stage, and with each warning.

    Raises:
        ReplicaError: a call with the model's own example failed, or Triton did; the message includes the callable's
            message. `ModelUnfit`: it would fail again.
    """
    signature = request.signature
    row = signature.example_row()
    call = _call_over_grpc if signature.is_framed else _call_over_http
    expected_s = 0.0
    for number, rows in enumerate(request.sizes, start=1):
        if request.skips_slow and expected_s * rows > LONGEST_CALL_S:
            report(
                "progress",
                f"warming up, batches of {rows} and more left out: each would take {expected_s * rows:.0f} s",
            )
            return
        report("progress", f"warming up, batch of {rows} ({number}/{len(request.sizes)})")
        inputs = [
            (tensor_spec, *example_rows(tensor_spec, row[tensor_spec.name], rows))
            for tensor_spec in signature.inputs
            if tensor_spec.name in row
        ]
        begun_s = time.monotonic()
        reports = call(signature, triton, spec, inputs, rows)
        expected_s = (time.monotonic() - begun_s) / rows
        if (failed := next((found for found in reports if found.status is not Status.OK), None)) is None:
            continue
        failure = f"warm-up with a batch of {rows}: {failed.message}"
        if not signature.invented or failed.status not in OF_VALUES:
            raise (ModelUnfit if _is_permanent(failed) else ReplicaError)(failure)
        report(
            "warning",
            f"served without a warm-up, so the first requests take longer. {failure}. {example_hint(signature)}",
        )
        return


def _is_permanent(report: RowReport) -> bool:
    """Whether the model would fail again with the same row. Errors of memory and of the device have other classes; such
    causes may disappear."""
    if report.status is not Status.RAISED:
        return report.status in (*CLIENT_FAULTS.values(), Status.BAD_OUTPUT)
    raised = _RAISED.match(report.message)
    return raised is not None and raised[1] in {"RuntimeError", *(fault.__name__ for fault in FAULTS)}


def _call_over_http(
    signature: Signature, triton: EmbeddedTriton, spec: ReplicaSpec, inputs: Sequence[Input], rows: int
) -> list[RowReport]:
    """Call a model that is not framed (`Signature.is_framed`), with large tensors in shared memory, and return the
    report of each row.

    Raises:
        ReplicaError: there was no answer, or Triton answered with an error.
    """
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(contextlib.closing(UnixConnection(triton.http_socket, spec.load_timeout_s)))
        shared = _share(stack, signature, inputs, rows)
        sent = [
            _stand_in(tensor[0], rows) if shared and tensor[0].name in shared.inputs else tensor for tensor in inputs
        ]
        tensors: list[dict[str, Any]] = [
            {
                "name": tensor.name,
                "datatype": DATATYPES[tensor.datatype].wire,
                "shape": shape,
                "parameters": {"binary_data_size": len(data)},
            }
            for tensor, data, shape in sent
        ]
        note = msgspec.json.encode(CallNote(warmup=True, shared=shared)).decode()
        outputs = [{"name": REPORT, "parameters": {"binary_data": True}}]
        head = json.dumps({"inputs": tensors, "outputs": outputs, "parameters": {HEADWATER: note}}).encode()
        body = b"".join((head, *(data for _, data, _ in sent)))
        headers = {"Inference-Header-Content-Length": str(len(head)), "triton-access-token": spec.token}
        try:
            connection.request("POST", f"/v2/models/{signature.name}/infer", body, headers)
            response = connection.getresponse()
            answer = response.read()
        except OSError as error:
            raise ReplicaError(f"warm-up with a batch of {rows}: no answer: {error}") from error
    if response.status != 200:
        raise ReplicaError(f"warm-up with a batch of {rows}: {_said(answer.decode(errors='replace'))}")
    return decode_reports(answer[int(response.headers["Inference-Header-Content-Length"]) :], rows).rows


def _said(error: str) -> str:
    return SHARED_MEMORY_FULL if is_shared_memory_full(error) else f"Triton said {error}"


def _share(
    stack: contextlib.ExitStack, signature: Signature, inputs: Sequence[Input], rows: int
) -> SharedCall | None:  # fmt: skip
    """Write the large inputs to shared memory, as a gateway does, and leave space for the answer. Returns None if
    neither an input nor the whole answer is large (`SHARED_FROM_BYTES`)."""
    large = [tensor for tensor in inputs if tensor[0].datatype != "BYTES" and len(tensor[1]) >= SHARED_FROM_BYTES]
    answer_bytes = batch_bytes(signature.outputs, rows)
    if not large and answer_bytes < SHARED_FROM_BYTES:
        return None
    fd = os.memfd_create("headwater-warm-up", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    placed: dict[str, tuple[int, list[int]]] = {}
    end = 0
    for tensor, data, shape in large:
        placed[tensor.name] = (end, shape)
        # Not `os.pwrite`, which writes at most 2 GB per call.
        with open(fd, "wb", closefd=False) as file:
            file.seek(end)
            file.write(data)
        end += aligned(len(data))
    size_bytes = end + ANSWER_HEAD_BYTES + aligned(answer_bytes)
    os.ftruncate(fd, size_bytes)
    return SharedCall(f"/proc/{os.getpid()}/fd/{fd}", size_bytes, placed, end)


def _stand_in(tensor: TensorSpec, rows: int) -> Input:
    shape = stand_in_shape(tensor, rows)
    return tensor, bytes(math.prod(shape) * DATATYPES[tensor.datatype].size_bytes), shape


def _call_over_grpc(
    signature: Signature, triton: EmbeddedTriton, spec: ReplicaSpec, inputs: Sequence[Input], rows: int
) -> list[RowReport]:
    """Call a framed model (`Signature.is_framed`), and return the reports of the rows that failed.

    Raises:
        ReplicaError: there was no answer, or Triton answered with an error.
    """
    name = f"warm-up-{rows}"
    request = service_pb2.ModelInferRequest(model_name=signature.name, id=name)
    note = CallNote(warmup=True, stream=name if signature.streams else "")
    request.parameters[HEADWATER].string_param = msgspec.json.encode(note).decode()
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for tensor, data, shape in inputs:
        request.inputs.add(name=tensor.name, datatype=DATATYPES[tensor.datatype].wire, shape=shape)
        request.raw_input_contents.append(data)
    frames = grpc_outputs(triton, spec, iter([request]), f"warm-up with a batch of {rows}")
    return [
        RowReport(Status(status), message)
        for raw in frames
        for piece in decode_frame(raw)[0].pieces
        for _, status, message in piece.failures
    ]


def grpc_outputs(
    triton: EmbeddedTriton, spec: ReplicaSpec, requests: Iterator[Any], subject: str
) -> Generator[bytes, None, None]:
    """Send requests over one gRPC stream, and yield the bytes of each output in the answers. The whole stream may take
    ``spec.load_timeout_s``.

    Raises:
        ReplicaError: Triton answered with an error or not at all; the message begins with `subject`.
    """
    with grpc.insecure_channel(f"unix:{triton.grpc_socket}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = (("triton-grpc-protocol-triton-access-token", spec.token),)
        try:
            for answer in stub.ModelStreamInfer(requests, metadata=metadata, timeout=spec.load_timeout_s):
                if answer.error_message:
                    raise ReplicaError(f"{subject}: {_said(answer.error_message)}")
                yield from answer.infer_response.raw_output_contents
        except grpc.RpcError as error:
            raise ReplicaError(f"{subject}: no answer: {error}") from error
