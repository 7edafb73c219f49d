"""Checks a request's ``parameters``: the model's declared parameters, the protocol's, and a pipeline's ``heads``.

Sources: the Open Inference Protocol's parameters; Triton's binary tensor data and schedule policy extensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from headwater.errors import DeclarationError
from headwater.model import Parameter, Scalar
from headwater.signature import REQUEST, HeadSpec, Signature
from headwater_server.codecs.faults import at, key_text, shown
from headwater_server.codecs.tensors import InferRequest
from headwater_server.errors import BadRequest

__all__ = ["MAX_SEQUENCE_ID", "MAX_UINT64", "RequestId", "RequestParameters", "boolean", "integer", "unsupported"]

MAX_UINT64: Final = 2**64 - 1
_MAX_PRIORITY: Final = 2**32 - 1
_INT64: Final = range(-(2**63), 2**63)
_BINARY_OUTPUT: Final = "binary_data_output"
_HEADS: Final = "heads"
_SEQUENCE: Final = ("sequence_id", "sequence_start", "sequence_end")
MAX_SEQUENCE_ID: Final = 128
"""Most characters of a sequence's id, as in Triton."""
RequestId: TypeAlias = Annotated[str, Meta(max_length=1000)]
"""An id of at most 1000 characters that a client gives to a request."""


class _HeadChoice:
    """Finds the heads of a pipeline that a request asks for by ``parameters.heads``, by ``outputs``, or by both.

    Args:
        heads: the pipeline's heads, in the configuration's order; every output belongs to exactly one head.
    """

    def __init__(self, heads: Sequence[HeadSpec]) -> None:
        self.names = tuple(head.name for head in heads)
        """All heads, in the signature's order."""
        self._listed = ", ".join(map(repr, self.names))
        self._owners = {output: head.name for head in heads for output in head.outputs}

    def read(self, value: object, path: str) -> tuple[str, ...]:
        """Read the parameter's value: a list of names, or names separated by commas.

        Args:
            value: the value, parsed from JSON.
            path: the parameter's path, for messages.

        Returns:
            The names, in the signature's order.

        Raises:
            BadRequest: the value is neither a list nor a text, is empty, or has an unknown or repeated name.
        """
        if isinstance(value, str):
            named: list[object] = [part.strip() for part in value.split(",")] if value.strip() else []
        elif isinstance(value, list):
            named = value
        else:
            raise at(path, None, f"expected names of heads, as a list or separated by commas, got {shown(value)}")
        if not named:
            raise at(path, None, f"expected at least one of {self._listed}, got no head")
        heads = set()
        for index, name in enumerate(named):
            place = f"{path}[{index}]" if isinstance(value, list) else path
            if not isinstance(name, str) or name not in self.names:
                raise at(place, None, f"expected one of the heads {self._listed}, got {shown(name)}")
            if name in heads:
                raise at(place, None, f"expected every head at most once, got {shown(name)} a second time")
            heads.add(name)
        return tuple(name for name in self.names if name in heads)

    def outputs_of(self, heads: Sequence[str], outputs: Sequence[str]) -> list[str]:
        """The elements of ``outputs`` that these heads compute."""
        return [output for output in outputs if self._owners[output] in heads]

    def heads_of(self, outputs: Sequence[str], heads: Sequence[str]) -> tuple[str, ...]:
        """The heads that compute the requested outputs, in the signature's order. Other heads are not run.

        Args:
            outputs: the request's ``outputs``.
            heads: the request's ``parameters.heads``; empty: any head is allowed.

        Raises:
            BadRequest: an output belongs to a head that is not among ``heads``.
        """
        owners = set()
        for index, output in enumerate(outputs):
            owner = self._owners[output]
            if heads and owner not in heads:
                expected = f"expected an output of the heads {', '.join(map(repr, heads))} (parameters.{_HEADS})"
                fix = "add the head there, or leave the output out"
                raise at(f"outputs[{index}].name", output, f"{expected}, got an output of head {owner!r}; {fix}")
            owners.add(owner)
        return tuple(name for name in self.names if name in owners)


class RequestParameters:
    """Checks the parameters of requests to a model.

    Args:
        signature: the model's parameters and heads.
        binary: whether ``binary_data_output`` is accepted.
    """

    def __init__(self, signature: Signature, *, binary: bool) -> None:
        self._declared = {parameter.name: parameter for parameter in signature.own_parameters}
        self.takes_any = signature.takes_any_parameter
        """Whether the model accepts parameters that it doesn't declare."""
        self._defaults: dict[str, dict[str, Scalar]] = {"batch": {}, "row": {}}
        for parameter in signature.parameters:
            self._defaults[parameter.per][parameter.name] = parameter.default
        self.heads = _HeadChoice(signature.heads) if signature.heads else None
        """None unless the model is a pipeline."""
        self._binary = binary
        self._has_sequences = bool(signature.states)
        server_parameters = (
            ((_BINARY_OUTPUT,) if binary else ())
            + ("priority", "timeout")
            + ((_HEADS,) if signature.heads else ())
            + (_SEQUENCE if self._has_sequences else ())
        )
        self.known = (*self._declared, *server_parameters)
        """Names of all parameters that the model declares or the server defines for it."""

    def request(self, id: str | None) -> InferRequest:
        """A request with an id and default parameters. Its inputs, rows and outputs are yet to be set."""
        return InferRequest(id or "", {}, 0, (), self._defaults["batch"].copy(), self._defaults["row"].copy())

    def take(self, parameters: Mapping[str, Any], request: InferRequest, where: str = "parameters") -> bool:
        """Check parameters and set them in the request.

        Args:
            parameters: the parameters' values, by name.
            request: the request whose parameters are set.
            where: the field that holds the parameters, for messages; empty: the parameters are fields of the body.

        Returns:
            The value of ``binary_data_output``; False if it isn't given.

        Raises:
            BadRequest: a parameter is unknown, of another type, or out of bounds.
        """
        binary_output = False
        undeclared: dict[str, Scalar] = {}
        for name, value in parameters.items():
            parameter = self._declared.get(name)
            if parameter is not None:
                values = request.batch_parameters if parameter.per == "batch" else request.row_parameters
                values[name] = _checked(parameter, value, where)
            elif name == _BINARY_OUTPUT and self._binary:
                binary_output = boolean(_path(where, name), None, value)
            elif name == "priority":
                request.priority = integer(_path(where, name), None, value, _MAX_PRIORITY)
            elif name == "timeout":
                request.timeout_us = integer(_path(where, name), None, value, MAX_UINT64)
            elif name == _HEADS and self.heads is not None:
                request.heads = self.heads.read(value, _path(where, name))
            elif self._has_sequences and name in _SEQUENCE:
                _take_sequence(name, value, _path(where, name), request)
            elif self.takes_any and name not in (REQUEST, _BINARY_OUTPUT) and not _is_protocols(name):
                undeclared[name] = _scalar(value, where, name)
            else:
                raise unsupported(where, None, name, self.known)
        if undeclared:
            before = msgspec.json.decode(str(request.row_parameters[REQUEST] or "{}"))
            request.row_parameters[REQUEST] = msgspec.json.encode({**before, **undeclared}).decode()
        return binary_output


def _take_sequence(name: str, value: object, path: str, request: InferRequest) -> None:
    if name == "sequence_start":
        request.starts_sequence = boolean(path, None, value)
    elif name == "sequence_end":
        request.ends_sequence = boolean(path, None, value)
    elif isinstance(value, str) and 0 < len(value) <= MAX_SEQUENCE_ID:
        request.sequence_id = value
    else:
        id = _whole(value)
        if not isinstance(id, int) or isinstance(id, bool) or not 0 < id <= MAX_UINT64:
            expected = f"expected an integer from 1 on, or a text of 1 to {MAX_SEQUENCE_ID} characters"
            raise at(path, None, f"{expected}, got {shown(value)}")
        request.sequence_id = id


def boolean(path: str, tensor: str | None, value: object) -> bool:
    """Check that a value is true or false. Returns it.

    Raises:
        BadRequest: it is another value.
    """
    if isinstance(value, bool):
        return value
    raise at(path, tensor, f"expected true or false, got {shown(value)}")


def integer(path: str, tensor: str | None, value: object, maximum: int) -> int:
    """Check that a value is an integer from 0 to ``maximum``; below 2**53 it may be written as a float. Returns the
    integer.

    Raises:
        BadRequest: it is another value.
    """
    whole = _whole(value)
    if isinstance(whole, int) and not isinstance(whole, bool) and 0 <= whole <= maximum:
        return whole
    raise at(path, tensor, f"expected an integer, 0 to {maximum}, got {shown(value)}")


def unsupported(where: str, tensor: str | None, name: str, names: Sequence[str]) -> BadRequest:
    """The error for a parameter that is unknown or not supported."""
    path = _path(where, key_text(name))
    if _is_protocols(name):
        return at(path, tensor, f"not supported by this server; expected one of {', '.join(names)}, got {shown(name)}")
    return at(path, tensor, f"expected one of the parameters {', '.join(names)}, got {shown(name)}")


def _is_protocols(name: str) -> bool:
    """Whether this parameter is defined by the protocol or an extension of it, but not supported by this server."""
    return name.startswith(("shared_memory_", "sequence_")) or name == "classification"


def _scalar(value: object, where: str, name: str) -> Scalar:
    if not isinstance(value, (str, int, float)) or (type(value) is int and value not in _INT64):
        path = _path(where, key_text(name))
        raise at(path, None, f"expected a text, a number of at most 64 bits, true or false, got {shown(value)}")
    return value


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _whole(value: object) -> object:
    """Convert a float that is an integer, and less than 2**53 from zero, to the integer; return any other value
    unchanged."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 2.0**53 else value


def _checked(parameter: Parameter, value: object, where: str) -> Scalar:
    path = _path(where, parameter.name)
    if parameter.type == "int":
        value = _whole(value)
    if type(value) is int and parameter.type != "float" and value not in _INT64:
        raise at(path, None, f"expected {parameter.type} of at most 64 bits, got {shown(value)}")
    try:
        return parameter.check(value)
    except OverflowError:
        raise at(path, None, f"expected float, got {shown(value)}, which is beyond a float") from None
    except DeclarationError as error:
        # The error's message quotes the value in Python's notation; `shown` quotes it as JSON.
        raise at(path, None, f"expected {error.expected}, got {shown(value)}") from None
