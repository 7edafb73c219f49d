"""The body of the answer to ``POST /v2/models/{m}/infer``, laid out as Triton does.

Source: the Open Inference Protocol's inference response, and Triton's binary tensor data extension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import orjson

from app.answers import HeadAnswer
from app.errors import CallableFailed
from app.json_values import checked_size, flat_json
from app.tensors import InferRequest, RawTensor
from inference.datatypes import DATATYPES, Datatype
from inference.model import Scalar
from inference.signature import Signature

__all__ = ["ResponseEncoder", "omission_parameters"]


class _Declared(NamedTuple):
    datatype: Datatype
    head: bytes
    """The output's JSON up to its shape."""


class ResponseEncoder:
    """Encodes the answers of one model. Holds tables only, so any number of tasks may share it.

    Args:
        signature: the model's name and outputs.
    """

    def __init__(self, signature: Signature) -> None:
        self._model = b'"model_name":%b,"model_version":"1",' % orjson.dumps(signature.name)
        self._outputs = {
            spec.name: _Declared(
                DATATYPES[spec.datatype],
                b'{"name":%b,"datatype":"%b","shape":' % (orjson.dumps(spec.name), spec.datatype.encode()),
            )
            for spec in signature.outputs
        }
        self._heads = {head.name: head.outputs for head in signature.heads}

    def encode(
        self,
        request: InferRequest,
        outputs: Mapping[str, RawTensor],
        parameters: Mapping[str, Scalar] | None = None,
        omitted: Sequence[HeadAnswer] = (),
    ) -> tuple[list[bytes | memoryview], int | None]:
        """Encode one answer.

        Args:
            request: what was asked; its ``outputs`` decide which outputs are written, in which order and form.
            outputs: the model's outputs by name; those that were not asked for are left out.
            parameters: the response's own parameters, if it has any.
            omitted: heads whose outputs are left out; the parameters then say which, and why.

        Returns:
            The body in pieces, the first of which is the JSON; and, if any output is binary, the JSON's length for
            the header ``Inference-Header-Content-Length``, otherwise None. Binary pieces are the outputs' own bytes.

        Raises:
            BadRequest: an output was wanted in JSON and has no JSON form.
            CallableFailed: an output that was asked for is not there, or its bytes contradict its declaration.
        """
        wishes = request.outputs
        if omitted:
            parameters = {**(parameters or {}), **omission_parameters(omitted)}
            gone = {output for head in omitted for output in self._heads[head.head]}
            wishes = [wish for wish in wishes if wish.name not in gone]
        parts = [b"{"]
        if request.id:
            parts.append(b'"id":%b,' % orjson.dumps(request.id))
        parts.append(self._model)
        if parameters:
            parts.append(b'"parameters":%b,' % orjson.dumps(dict(parameters)))
        parts.append(b'"outputs":[')
        chunks: list[bytes | memoryview] = [b""]
        separator = b""
        binary = False
        for wish in wishes:
            declared = self._outputs[wish.name]
            tensor = outputs.get(wish.name)
            if tensor is None:
                raise CallableFailed(f"output {wish.name!r}: expected {declared.datatype.name}, got no such output")
            size_bytes = checked_size(wish.name, tensor, declared.datatype)
            shape = orjson.dumps(tensor.shape)
            if wish.binary:
                binary = True
                parts.append(
                    b'%b%b%b,"parameters":{"binary_data_size":%d}}' % (separator, declared.head, shape, size_bytes)
                )
                chunks.append(tensor.data)
            else:
                data = flat_json(wish.name, tensor, declared.datatype)
                parts += (separator, declared.head, shape, b',"data":', data, b"}")
            separator = b","
        parts.append(b"]}")
        chunks[0] = text = b"".join(parts)
        return chunks, len(text) if binary else None


def omission_parameters(omitted: Sequence[HeadAnswer]) -> dict[str, str]:
    """What a response's ``parameters``, which can be scalars only, say of omitted heads; {} if there are none."""
    if not omitted:
        return {}
    said = {"omitted_heads": ",".join(head.head for head in omitted)}
    for head in omitted:
        said[f"head.{head.head}.status"] = head.status
        said[f"head.{head.head}.reason"] = head.error.message if head.error is not None else ""
    return said
