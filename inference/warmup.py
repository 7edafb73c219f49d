"""Warm-up: real calls through the replica's own Triton, so that nothing on the way runs for the first time later."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from inference.datatypes import DATATYPES, float32_to_bf16, pack_bytes
from inference.embedded_triton import UnixConnection
from inference.errors import DeclarationError, ReplicaError
from inference.report import HEADWATER, REPORT, CallNote, Status, decode_reports
from inference.signature import Signature, TensorSpec

__all__ = ["batch_sizes", "example_rows", "warm_up"]


def batch_sizes(max_batch_size: int) -> list[int]:
    """Powers of two up to ``max_batch_size``, and that itself."""
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


def warm_up(
    signature: Signature, socket: Path, token: str, sizes: Sequence[int], *, timeout_s: float,
    progress: Callable[[str], None],
) -> None:  # fmt: skip
    """Call the model once with each batch size.

    Raises:
        ReplicaError: a call failed; the message has the callable's own.
    """
    connection = UnixConnection(socket, timeout_s)
    try:
        for number, rows in enumerate(sizes, start=1):
            progress(f"warming up, batch of {rows} ({number}/{len(sizes)})")
            _call(connection, signature, token, rows)
    finally:
        connection.close()


def _call(connection: UnixConnection, signature: Signature, token: str, rows: int) -> None:
    row = signature.example_row()
    inputs: list[dict[str, Any]] = []
    chunks: list[bytes] = []
    for spec in signature.inputs:
        if spec.name not in row:
            continue
        data, shape = example_rows(spec, row[spec.name], rows)
        wire = DATATYPES[spec.datatype].wire
        inputs.append(
            {"name": spec.name, "datatype": wire, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        )
        chunks.append(data)
    note = msgspec.json.encode(CallNote(warmup=True)).decode()
    head = json.dumps(
        {
            "inputs": inputs,
            "outputs": [{"name": REPORT, "parameters": {"binary_data": True}}],
            "parameters": {HEADWATER: note},
        }
    ).encode()
    body = head + b"".join(chunks)
    headers = {"Inference-Header-Content-Length": str(len(head)), "triton-access-token": token}
    try:
        connection.request("POST", f"/v2/models/{signature.name}/infer", body, headers)
        response = connection.getresponse()
        answer = response.read()
    except OSError as error:
        raise ReplicaError(f"warm-up with a batch of {rows}: no answer: {error}") from error
    if response.status != 200:
        raise ReplicaError(f"warm-up with a batch of {rows}: Triton said {answer.decode(errors='replace')}")
    reports, _ = decode_reports(answer[int(response.headers["Inference-Header-Content-Length"]) :], rows)
    for report in reports:
        if report.status is Status.OK:
            continue
        hint = ""
        if report.status in (Status.RAISED, Status.BAD_INPUT):
            tried = json.dumps(row, default=str)[:300]
            hint = f". The values tried were {tried}; if the model can't take these, declare `example` in it"
        raise ReplicaError(f"warm-up with a batch of {rows}: {report.message}{hint}")
