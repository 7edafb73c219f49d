"""The parameters in the JSON of a request, read and changed without a look at its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

__all__ = ["parameters_of", "with_parameters"]

_PARAMETERS: Final = "parameters"
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def parameters_of(body: bytes, header_length: int | None, *, are_fields: bool) -> dict[str, Any]:
    """The parameters of a request; empty if there are none, or the body is no JSON that Triton takes.

    Args:
        body: the request's body.
        header_length: the length of the JSON before binary tensors; None: the whole body is JSON.
        are_fields: whether the parameters are fields of the body, as in the generate extension, rather than in the
            field ``parameters``.
    """
    try:
        fields = _read(body[:header_length])
        given = fields if are_fields else _value(fields.get(_PARAMETERS))
        if not isinstance(given, dict):
            return {}
        wanted = {name: value for name, value in given.items() if name.startswith("sequence_")}
        return {name: _value(value) for name, value in wanted.items()}
    except (ValueError, RecursionError):
        return {}


def with_parameters(
    body: bytes, header_length: int | None, more: Mapping[str, Any], *, are_fields: bool
) -> tuple[bytes, int | None]:
    """A body with further parameters, and the new ``header_length``. Other arguments as for `parameters_of`, which has
    read this body."""
    fields = _read(body[:header_length])
    if are_fields:
        fields.update(more)
    else:
        fields[_PARAMETERS] = {**(_value(fields.get(_PARAMETERS)) or {}), **more}
    members = (json.dumps(name).encode() + b":" + _text(value) for name, value in fields.items())
    text = b"{%b}" % b",".join(members)
    if header_length is None:
        return text, None
    return text + body[header_length:], len(text)


def _read(text: bytes) -> dict[str, Any]:
    """The fields of a JSON object. Raises `ValueError`."""
    try:
        return dict(_fields(text))
    except msgspec.DecodeError:
        found = json.loads(text)  # takes NaN and infinities, as Triton does
        if not isinstance(found, dict):
            raise ValueError("expected an object") from None
        return found


def _text(value: Any) -> bytes:
    return bytes(value) if isinstance(value, msgspec.Raw) else json.dumps(value).encode()


def _value(value: Any) -> Any:
    return json.loads(bytes(value)) if isinstance(value, msgspec.Raw) else value
