"""Reads Triton's requests according to the model's signature."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from headwater.errors import DeclarationError
from headwater.signature import Signature
from headwater.wire.arrays import Array
from headwater.wire.report import HEADWATER, CallNote, RowReport, Status
from headwater.wire.shared_memory import MappedCall

__all__ = ["Part", "TritonRequest", "read_note", "read_request", "refusal"]


class TritonRequest(Protocol):
    """A request of Triton: the fields of `headwater.replica.callee.CalleeRequest`."""

    data: dict[str, Array]
    parameters: dict[str, Any] | None


class Part(NamedTuple):
    """A Triton request, read."""

    rows: int
    inputs: dict[str, Array]
    """Inputs in wire form, without the inputs that the request left out."""
    batch_parameters: dict[str, Any]
    """Values of per-batch parameters, with defaults filled in."""
    row_parameters: dict[str, list[Any]]
    """Values of per-row parameters, with defaults filled in: a list with a value for each row."""
    note: CallNote
    memory: MappedCall | None
    """The mapped segment of the request's large tensors; None if the request has no segment."""


def read_note(request: TritonRequest) -> CallNote:
    """Read a request's note.

    Raises:
        DeclarationError: the note is malformed.
    """
    parameters = request.parameters or {}
    try:
        return msgspec.json.decode(parameters[HEADWATER], type=CallNote) if HEADWATER in parameters else CallNote()
    except (msgspec.MsgspecError, TypeError) as error:
        raise DeclarationError(f"parameter {HEADWATER!r}: expected the JSON of a note: {error}") from error


def read_request(signature: Signature, request: TritonRequest) -> Part:
    """Read a request: restore the true shape of tensors without elements, and fill in parameters' defaults.

    Raises:
        DeclarationError: a parameter is invalid (the gateway would have refused it), or the note is malformed.
        OSError: the request's shared memory can't be opened.
    """
    parameters = request.parameters or {}
    note = read_note(request)
    memory = MappedCall(note.shared) if note.shared is not None else None
    inputs: dict[str, Array] = {}
    rows = 0
    for spec in signature.inputs:
        array = request.data.get(spec.name)
        if array is None:
            continue
        if spec.name in note.shapes:
            array = np.empty(note.shapes[spec.name], array.dtype)
        elif memory is not None and spec.name in memory.inputs:
            array = memory.input(spec)
        inputs[spec.name] = array
        rows = len(array)
    batch: dict[str, Any] = {}
    per_row: dict[str, list[Any]] = {}
    for parameter in signature.parameters:
        name = parameter.name
        if parameter.per == "row" and name in note.rows:
            per_row[name] = list(note.rows[name])
        elif parameter.per == "batch" and name in note.parameters:
            batch[name] = note.parameters[name]
        else:
            value = parameter.check(parameters[name]) if name in parameters else parameter.default
            if parameter.per == "row":
                per_row[name] = [value] * rows
            else:
                batch[name] = value
    return Part(rows, inputs, batch, per_row, note, memory)


def refusal(error: DeclarationError | OSError) -> RowReport:
    """The report for all rows of a request for which `read_request` raised this error."""
    if isinstance(error, OSError):
        return RowReport(Status.UNSHARED, f"{type(error).__name__}: {error}")
    return RowReport(Status.BAD_INPUT, str(error))  # only a client that talks to Triton directly gets here
