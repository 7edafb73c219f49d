"""The JSON of a request for Triton: its depth, and its parameters, without a look at its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headwater_server.errors import BadRequest

__all__ = ["check_depth", "sequence_parameters", "with_parameters"]

MAX_OPEN: Final = 500
"""Text with at most so many opening brackets is not looked at: it can't be nested deeper."""

_PARAMETERS: Final = "parameters"
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_skip = msgspec.json.Decoder(msgspec.Raw).decode


def check_depth(text: bytes | memoryview, field: str = "body") -> None:
    """Check that JSON isn't nested too deep: Triton's process ends (SIGSEGV) while it parses such JSON.

    Args:
        text: the JSON.
        field: the name of the field, for messages.

    Raises:
        BadRequest: it is nested deeper than Python's limit of recursion, some 1,000 levels; or it has many brackets
            and is no JSON.
    """
    raw = bytes(text)
    if raw.count(b"[") + raw.count(b"{") <= MAX_OPEN:
        return
    try:
        try:
            _skip(raw)
        except msgspec.DecodeError:
            json.loads(raw)  # takes NaN and infinities, as Triton does
    except RecursionError:
        raise BadRequest(f"{field}: expected JSON of fewer levels, got arrays or objects nested too deep") from None
    except ValueError as error:
        raise BadRequest(f"{field}: expected JSON, got other text: {error}"[:300]) from None


def sequence_parameters(body: bytes, header_length: int | None, *, are_fields: bool) -> dict[str, Any]:
    """The parameters of a request that concern its sequence; empty if there are none, or the body is no JSON.

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
    """A body with further parameters, and the new ``header_length``. Other arguments as for
    `sequence_parameters`, which has read this body."""
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
