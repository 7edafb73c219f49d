"""Inference requests and responses as messages of the Open Inference Protocol's gRPC service."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import orjson
from tritonclient.grpc import service_pb2 as pb

from headwater.datatypes import DATATYPES, pack_bytes, unpack_bytes
from headwater.signature import Signature
from headwater_server.codecs.infer_response import checked_size
from headwater_server.codecs.tensors import InferRequest, RawTensor
from headwater_server.errors import BadRequest, CallableFailed

__all__ = ["EMPTY_FINAL", "FINAL", "binary_body", "generate_fields", "infer_response", "parameters_of", "text_response"]

EMPTY_FINAL: Final = "triton_enable_empty_final_response"
"""The parameter by which a client of a stream asks for a response without outputs at the end of each request."""
FINAL: Final = "triton_final_response"
"""The parameter of each response of a stream: whether it is the last of its request."""
_BINARY: Final = "binary_data"
_CONTENTS: Final = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of ``InferTensorContents`` by datatype. FP16 and BF16 have no field."""
_NARROW: Final = ("INT8", "INT16", "UINT8", "UINT16")
"""Datatypes whose field takes numbers that they don't."""


def binary_body(message: Any) -> tuple[bytes, int]:
    """A ``ModelInferRequest`` as the body of the same request over HTTP, with binary tensors, and the length of its
    JSON. `EMPTY_FINAL` is left out.

    Raises:
        BadRequest: the message has no data for an input, has data of another datatype, or has too much data.
    """
    datas = _datas(message)
    inputs = []
    for tensor, data in zip(message.inputs, datas, strict=True):
        about = {**parameters_of(tensor), "binary_data_size": len(data)}
        shape = list(tensor.shape)
        inputs.append({"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "parameters": about})
    parameters = parameters_of(message)
    parameters.pop(EMPTY_FINAL, None)
    body: dict[str, Any] = {"inputs": inputs}
    if message.id:
        body["id"] = message.id
    if message.outputs:
        body["outputs"] = [
            {"name": output.name, "parameters": {**parameters_of(output), _BINARY: True}} for output in message.outputs
        ]
    else:
        parameters["binary_data_output"] = True
    if parameters:
        body["parameters"] = parameters
    text = orjson.dumps(body)
    return b"".join((text, *datas)), len(text)


def parameters_of(message: Any) -> dict[str, Any]:
    """The parameters of a request, an input or an output; None for a value that isn't set."""
    values = {}
    for name, parameter in message.parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        values[name] = None if choice is None else getattr(parameter, choice)
    return values


def _datas(message: Any) -> list[bytes]:
    """The data of each input, as raw bytes. Raises as `binary_body`."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        expected = f"expected {len(message.inputs)}, one for each input"
        raise BadRequest(f"raw_input_contents: {expected}, got {len(raw)}", field="raw_input_contents")
    return [_data(tensor, raw[index] if raw else None) for index, tensor in enumerate(message.inputs)]


def _data(tensor: Any, raw: bytes | None) -> bytes:
    """An input's data, as raw bytes. Raises as `binary_body`."""
    name, datatype = tensor.name, DATATYPES.get(tensor.datatype)
    given = [field.name for field, _ in tensor.contents.ListFields()]
    where = f"inputs, `{name[:100]}`"
    if raw is not None:
        if given:
            raise BadRequest(f"{where}: expected raw_input_contents or contents, got both", field="inputs")
        return raw
    if datatype is None:
        expected = ", ".join(DATATYPES)
        raise BadRequest(f"{where}, datatype: expected one of {expected}, got {tensor.datatype[:40]!r}", field="inputs")
    field = _CONTENTS.get(datatype.name)
    if field is None:
        raise BadRequest(f"{where}: expected {datatype.name} in raw_input_contents, got none", field="inputs")
    if given and given != [field]:
        got = ", ".join(given)
        raise BadRequest(f"{where}: expected {datatype.name} in contents.{field}, got {got}", field="inputs")
    values = getattr(tensor.contents, field)
    if not values and math.prod(tensor.shape):
        raise BadRequest(f"{where}: expected data in raw_input_contents or contents.{field}, got none", field="inputs")
    if datatype.name == "BYTES":
        return pack_bytes(values)
    wanted = datatype.numpy
    if datatype.name not in _NARROW:
        return np.array(values, wanted).tobytes()
    numbers = np.array(values, np.int64)
    least, most = np.iinfo(wanted).min, np.iinfo(wanted).max
    beyond = numbers[(numbers < least) | (numbers > most)]
    if len(beyond):
        expected = f"expected {least} to {most} for {datatype.name}"
        raise BadRequest(f"{where}: {expected}, got {beyond[0]}", field="inputs")
    return numbers.astype(wanted).tobytes()


def infer_response(
    model: str,
    version: str,
    signature: Signature,
    request: InferRequest,
    outputs: Mapping[str, RawTensor],
    parameters: Mapping[str, bool | int | float | str],
    *,
    is_partial: bool = False,
) -> Any:
    """A ``ModelInferResponse`` with raw data.

    Args:
        model, version: the model's name and version for clients.
        signature: the model's signature.
        request: the request; its ``outputs`` decide which outputs the response has.
        outputs: the model's outputs by name.
        parameters: the response's parameters.
        is_partial: whether outputs may be missing, as in one of several responses.

    Raises:
        CallableFailed: an output is missing, or its bytes contradict its declaration.
    """
    message = pb.ModelInferResponse(model_name=model, model_version=version, id=request.id)
    _set_parameters(message, parameters)
    datatypes = {spec.name: DATATYPES[spec.datatype] for spec in signature.outputs}
    for name, _ in request.outputs:
        tensor = outputs.get(name)
        if tensor is None:
            if is_partial:
                continue
            raise CallableFailed(f"output {name!r}: expected {datatypes[name].name}, got no such output")
        checked_size(name, tensor, datatypes[name])
        shape = tensor.shape[1:] if request.is_bare else tensor.shape
        message.outputs.add(name=name, datatype=tensor.datatype, shape=shape)
        message.raw_output_contents.append(bytes(tensor.data))
    return message


def text_response(
    model: str, version: str, id: str, text: str, parameters: Mapping[str, bool | int | float | str]
) -> Any:
    """A ``ModelInferResponse`` with a text in the output ``text_output``, ``BYTES`` [1]."""
    message = pb.ModelInferResponse(model_name=model, model_version=version, id=id)
    _set_parameters(message, parameters)
    message.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    message.raw_output_contents.append(pack_bytes([text.encode()]))
    return message


def _set_parameters(message: Any, parameters: Mapping[str, bool | int | float | str]) -> None:
    for name, value in parameters.items():
        entry = message.parameters[name]
        if isinstance(value, bool):
            entry.bool_param = value
        elif isinstance(value, int):
            entry.int64_param = value
        elif isinstance(value, float):
            entry.double_param = value
        else:
            entry.string_param = str(value)


def generate_fields(message: Any) -> tuple[dict[str, Any], bool]:
    """A ``ModelInferRequest`` to a language model as the fields of Triton's generate extension, and whether the client
    asks for a stream. Each input is a field; ``text_input`` is the text, and ``stream`` asks for a stream.

    Raises:
        BadRequest: an input has no element, has several elements that are no texts, or is no text where it must be;
            see `binary_body`, too.
    """
    fields: dict[str, Any] = {}
    for tensor, data in zip(message.inputs, _datas(message), strict=True):
        values = _values(tensor, data)
        fields[tensor.name] = values[0] if len(values) == 1 else values
    parameters = parameters_of(message)
    parameters.pop(EMPTY_FINAL, None)
    streams = fields.pop("stream", parameters.pop("stream", False))
    if not isinstance(streams, bool):
        raise BadRequest(f"stream: expected true or false, got {streams!r:.100}", field="stream")
    for output in message.outputs:
        if output.name != "text_output":
            raise BadRequest(f"outputs: expected text_output, got {output.name[:100]!r}", field="outputs")
    if parameters:
        fields["parameters"] = parameters
    if message.id:
        fields["id"] = message.id
    return fields, streams


def _values(tensor: Any, data: bytes) -> list[Any]:
    """The elements of an input, as Python's values. Raises `BadRequest`."""
    where = f"inputs, `{tensor.name[:100]}`"
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None or not datatype.json:
        raise BadRequest(f"{where}, datatype: expected a datatype with a JSON form, got {tensor.datatype[:40]!r}")
    try:
        if datatype.name == "BYTES":
            values: list[Any] = [element.decode() for element in unpack_bytes(data)]
        else:
            values = np.frombuffer(data, datatype.numpy).tolist()
    except UnicodeDecodeError:
        raise BadRequest(f"{where}: expected UTF-8 text, got other bytes", field="inputs") from None
    except ValueError as error:
        raise BadRequest(f"{where}: {error}", field="inputs") from None
    if len(values) != math.prod(tensor.shape):
        expected = f"expected {math.prod(tensor.shape)} elements for shape {list(tensor.shape)}"
        raise BadRequest(f"{where}: {expected}, got {len(values)}", field="inputs")
    return values
