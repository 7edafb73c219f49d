"""The body of the answer to ``POST /v2/models/{m}/infer``, in Triton's layout.

Sources: the Open Inference Protocol's inference response; Triton's binary tensor data extension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson

from headwater.datatypes import DATATYPES, Datatype, unpack_bytes
from headwater.signature import Signature
from headwater_server.codecs.faults import at, no_json_form
from headwater_server.codecs.tensors import HeadAnswer, InferRequest, RawTensor
from headwater_server.errors import CallableFailed

__all__ = ["ResponseEncoder", "checked_size", "flat_json", "omission_parameters"]

_NUMPY: Final = orjson.OPT_SERIALIZE_NUMPY


def checked_size(name: str, tensor: RawTensor, datatype: Datatype) -> int:
    """The tensor's size in bytes, checked against its shape (except for ``BYTES``) and declared datatype.

    Raises:
        CallableFailed: the tensor has another datatype, or its size contradicts its shape.
    """
    data = tensor.data
    size_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
    if tensor.datatype != datatype.name:
        raise CallableFailed(f"output {name!r}, datatype: expected {datatype.name}, got {tensor.datatype}")
    if datatype.size_bytes and size_bytes != (expected := math.prod(tensor.shape) * datatype.size_bytes):
        raise CallableFailed(
            f"output {name!r}: expected {expected} bytes for {datatype.name} of shape {list(tensor.shape)}, "
            f"got {size_bytes}"
        )
    return size_bytes


def flat_json(name: str, tensor: RawTensor, datatype: Datatype) -> bytes:
    """The tensor's elements as a flat JSON array.

    Raises:
        BadRequest: the datatype has no JSON form, or an element of ``BYTES`` isn't UTF-8 text.
        CallableFailed: the lengths or the number of ``BYTES`` elements are wrong. Other datatypes are checked by
            `checked_size`.
    """
    if not datatype.json:
        raise no_json_form("outputs", name, datatype.name)
    if datatype.size_bytes == 0:
        return orjson.dumps(_texts(name, tensor))
    return _numbers(np.frombuffer(tensor.data, datatype.numpy))


def _numbers(values: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """An array of numbers or truth values as JSON."""
    text = orjson.dumps(values, option=_NUMPY)
    # orjson writes null for NaN and infinities; to search for an "n" is faster than np.isfinite.
    if values.dtype.kind == "f" and b"n" in text:
        return _not_finite(text, values)
    return text


def _ragged_json(name: str, tensor: RawTensor, datatype: Datatype, counts: Sequence[int]) -> bytes:
    """A ragged output as a JSON array with, for each row, nested arrays of the row's own size; errors as
    `flat_json`."""
    if not datatype.json:
        raise no_json_form("outputs", name, datatype.name)
    if datatype.size_bytes == 0:
        texts = np.array(_texts(name, tensor), object).reshape(tensor.shape)
        return orjson.dumps([texts[row, :count].tolist() for row, count in enumerate(counts)])
    values = np.frombuffer(tensor.data, datatype.numpy).reshape(tensor.shape)
    return b"[%b]" % b",".join([_numbers(values[row, :count]) for row, count in enumerate(counts)])


def _not_finite(text: bytes, values: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """Replace each null with ``NaN``, ``Infinity`` or ``-Infinity``, which Triton writes and Python's json reads."""
    first, *rest = text.split(b"null")
    pieces = [first]
    for value, piece in zip(values[~np.isfinite(values)], rest, strict=True):
        pieces += (b"NaN" if np.isnan(value) else b"Infinity" if value > 0 else b"-Infinity", piece)
    return b"".join(pieces)


def _texts(name: str, tensor: RawTensor) -> list[str]:
    try:
        elements = unpack_bytes(tensor.data)
    except ValueError as error:
        raise CallableFailed(f"output {name!r}, {error}") from None
    if len(elements) != math.prod(tensor.shape):
        raise CallableFailed(
            f"output {name!r}: expected {math.prod(tensor.shape)} elements for shape {list(tensor.shape)}, "
            f"got {len(elements)}"
        )
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError as error:
        fix = 'ask /infer for binary data: "parameters": {"binary_data": true} on the output'
        got = f"byte 0x{error.object[error.start]:02x}"
        raise at("outputs", name, f"expected UTF-8 text, for JSON strings, got {got}; {fix}") from None


class ResponseEncoder:
    """Encodes the answers of a model. Stateless, so any number of tasks may share it.

    Args:
        signature: the model's name and outputs.
        version: the model's version in answers.
    """

    def __init__(self, signature: Signature, version: str = "1") -> None:
        self._model = b'"model_name":%b,"model_version":%b,' % (orjson.dumps(signature.name), orjson.dumps(version))
        self._outputs = {
            spec.name: (
                DATATYPES[spec.datatype],
                b'{"name":%b,"datatype":"%b","shape":' % (orjson.dumps(spec.name), spec.datatype.encode()),
            )
            for spec in signature.outputs
        }
        """Each output's datatype, and its JSON up to the shape."""
        self._heads = {head.name: head.outputs for head in signature.heads}
        self._counts = {spec.counts: spec.name for spec in signature.outputs if spec.counts}
        """The outputs with counts, by ragged output."""

    def encode(
        self, request: InferRequest, outputs: Mapping[str, RawTensor], omitted: Sequence[HeadAnswer] = ()
    ) -> tuple[list[bytes | memoryview], int | None]:
        """Encode an answer.

        Args:
            request: the request; its ``outputs`` decide which outputs are written, in which order and form.
            outputs: the model's outputs by name; outputs that were not requested are left out.
            omitted: heads whose outputs are left out; the answer's ``parameters`` then name the heads and the reasons.

        Returns:
            The body in pieces, the first of which is the JSON; and, if any output is binary, the JSON's length for
            the header ``Inference-Header-Content-Length``, otherwise None. Binary pieces are the outputs' bytes,
            not copied.

        Raises:
            BadRequest: an output was requested in JSON and has no JSON form, or isn't UTF-8 text.
            CallableFailed: a requested output is missing, or its bytes contradict its declaration.
        """
        requested = request.outputs
        if omitted:
            gone = {name for head in omitted for name in self._heads[head.head]}
            requested = [output for output in requested if output.name not in gone]
        parts = [b"{"]
        if request.id:
            parts.append(b'"id":%b,' % orjson.dumps(request.id))
        parts.append(self._model)
        if omitted:
            parts.append(b'"parameters":%b,' % orjson.dumps(omission_parameters(omitted)))
        parts.append(b'"outputs":[')
        chunks: list[bytes | memoryview] = [b""]
        separator = b""
        binary = False
        for output in requested:
            datatype, head = self._outputs[output.name]
            tensor = outputs.get(output.name)
            if tensor is None:
                raise CallableFailed(f"output {output.name!r}: expected {datatype.name}, got no such output")
            size_bytes = checked_size(output.name, tensor, datatype)
            shape = orjson.dumps(tensor.shape[1:] if request.is_bare else tensor.shape)
            if output.binary:
                binary = True
                parts.append(b'%b%b%b,"parameters":{"binary_data_size":%d}}' % (separator, head, shape, size_bytes))
                chunks.append(tensor.data)
            else:
                if output.name in self._counts and not request.is_bare:
                    shape = orjson.dumps((tensor.shape[0], -1, *tensor.shape[2:]))
                    counts = np.frombuffer(outputs[self._counts[output.name]].data, "<i4").tolist()
                    data = _ragged_json(output.name, tensor, datatype, counts)
                else:
                    data = flat_json(output.name, tensor, datatype)
                parts += (separator, head, shape, b',"data":', data, b"}")
            separator = b","
        parts.append(b"]}")
        chunks[0] = text = b"".join(parts)
        return chunks, len(text) if binary else None


def omission_parameters(omitted: Sequence[HeadAnswer]) -> dict[str, str]:
    """The ``parameters`` of an answer without some heads: ``omitted_heads``, their names separated by commas, and for
    each head ``head.NAME.status`` and ``head.NAME.reason``."""
    parameters = {"omitted_heads": ",".join(head.head for head in omitted)}
    for head in omitted:
        parameters[f"head.{head.head}.status"] = head.status
        parameters[f"head.{head.head}.reason"] = head.error.message if head.error is not None else ""
    return parameters
