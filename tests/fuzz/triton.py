"""Targets: messages over gRPC, and configurations of a Triton repository's models."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from headwater_server.errors import HeadwaterError
from headwater_server.gateway.grpc.tensor_messages import binary_body, generate_fields
from headwater_server.repository.config_fields import problems_of
from headwater_server.repository.model_config import CONFIG_FILE, models_of, write_config
from headwater_server.repository.triton_host import sequences_of
from headwater_server.triton.request_json import sequence_parameters, with_parameters
from headwater_server.triton.sequence_turn import sequence_of
from tests.fuzz.promises import check_refusal
from tests.fuzz.tensors import INFER

__all__ = ["model_config", "rpc_message", "sequence_json"]

MORE: Final = {"headwater_step": 5}


def rpc_message(data: bytes) -> bool:
    """A ``ModelInferRequest``: refused, or the same request as over HTTP."""
    try:
        message = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return False
    accepted = False
    for decoder in INFER.values():
        try:
            body, length = binary_body(message)
            request = decoder.decode(body, length)
        except HeadwaterError as error:
            check_refusal(error)
            continue
        assert {tensor.name for tensor in message.inputs} == set(request.inputs)
        accepted = True
    try:
        fields, streams = generate_fields(message)
    except HeadwaterError as error:
        check_refusal(error)
    else:
        assert "stream" not in fields or not streams
    return accepted


def model_config(data: bytes) -> bool:
    """A ``config.pbtxt``: problems in words, or a configuration that is the same when it is written and read again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "m"
        (folder / "1").mkdir(parents=True)
        (folder / CONFIG_FILE).write_bytes(data)
        (model,) = models_of(Path(name))
        assert all(problem.reason for problem in problems_of(model))
        sequences_of(Path(name))
        if model.problem:
            return False
        write_config(model.config, folder / CONFIG_FILE)
        (again,) = models_of(Path(name))
        assert again.config == model.config or _has_nan(model.config)
        return True


def _has_nan(config: Any) -> bool:
    return "nan" in str(config)


def sequence_json(data: bytes) -> bool:
    """The JSON of a request for a Triton's model: its parameters change, and nothing else does."""
    accepted = False
    for are_fields in (False, True):
        found = sequence_parameters(data, None, are_fields=are_fields)
        sequence = sequence_of("m", found, has_state=True)
        if sequence is None:
            continue
        changed, _ = with_parameters(data, None, MORE, are_fields=are_fields)
        assert sequence_of("m", sequence_parameters(changed, None, are_fields=are_fields), has_state=True) == sequence
        accepted = True
    return accepted
