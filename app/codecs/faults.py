"""What is wrong with a request's JSON, in the client's terms: the field, what was expected, what came."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from app.errors import BadRequest

__all__ = [
    "PARSE_ERRORS",
    "at",
    "key_text",
    "kind_of",
    "no_json_form",
    "shape_text",
    "shown",
    "split_path",
    "unreadable",
]

PARSE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises for input of a client's choosing."""

_KINDS: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_EXPECTED: Final = re.compile(r"Expected `([^`]*)`, got `([^`]*)`\Z")
_FIELD: Final = re.compile(r"Object (contains unknown|missing required) field `(.*)`\Z", re.DOTALL)
_BYTE: Final = re.compile(r"\(byte (\d+)\)\Z")
_NOT_FINITE: Final = re.compile(rb"-?\b(?:NaN|Infinity)\b")
_NOT_FINITE_HERE: Final = re.compile(rb"nan|inf", re.IGNORECASE)
_HIGH_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
# Past this, an error is told without looking again for the tensor's name: errors must stay cheap, too.
_LOOK_AGAIN_BYTES: Final = 1 << 20


class _Entry(msgspec.Struct):
    """A tensor of which only what an error message needs is read."""

    name: Any = None
    data: msgspec.Raw = msgspec.Raw(b"")
    parameters: Any = None


class _Loose(msgspec.Struct):
    inputs: list[_Entry] = []
    outputs: list[_Entry] = []
    parameters: Any = None


_LOOSE: Final = msgspec.json.Decoder(_Loose)


def at(path: str, tensor: str | None, message: str) -> BadRequest:
    """A `BadRequest` that names the field by its path and, if there is one, the tensor."""
    named = f"{path} (tensor {shown(tensor)})" if tensor is not None else path
    return BadRequest(f"{named}: {message}", field=path)


def shown(value: object) -> str:
    """A JSON value as a message may quote it: of bounded length, whatever it is."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 80 else f"{value[:80]!r}... ({len(value)} characters)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (int, float)):
        return repr(value)
    return "null" if value is None else _KINDS["object" if isinstance(value, dict) else "array"]


def key_text(name: str) -> str:
    """A client's own key as the last part of a path."""
    return repr(name[:80])[1:-1] + "..." * (len(name) > 80)


def shape_text(shape: Sequence[int]) -> str:
    """A shape as a message may quote it."""
    text = ", ".join(shown(dim) for dim in shape[:12])
    return f"[{text}]" if len(shape) <= 12 else f"[{text}, ...] ({len(shape)} dimensions)"


def no_json_form(path: str, tensor: str, datatype: str) -> BadRequest:
    """The error for an output that was wanted in JSON but has no JSON form."""
    return at(
        path,
        tensor,
        f"expected a datatype that has a JSON form, got {datatype}; ask for binary data: "
        '"parameters": {"binary_data": true} on the output, or "parameters": {"binary_data_output": true} on the '
        "request",
    )


def kind_of(name: str) -> str:
    """What msgspec calls ``int`` or ``float | null``, in words."""
    return " or ".join(_KINDS.get(part, part) for part in name.split(" | ") if part != "null" or name == "null")


def split_path(error: Exception) -> tuple[str, str]:
    """A msgspec error's message without its path, and the path without ``$``: ``.inputs[0].shape[1]``."""
    message, found, path = str(error).rpartition(" - at `$")
    return (message, path[:-1]) if found else (str(error), "")


def unreadable(error: Exception, text: bytes | memoryview, fields: dict[str, tuple[str, ...]] | None) -> BadRequest:
    """Put into words why a request's JSON does not parse.

    Args:
        error: one of `PARSE_ERRORS`.
        text: the JSON.
        fields: the known fields of an object, by its path with indices left out: ``""``, ``"inputs"``, ``"outputs"``;
            None: the request has its inputs as fields, by name, and no binary data.
    """
    if isinstance(error, RecursionError):
        return BadRequest("body: expected a request to infer, got JSON that is nested too deeply", field="body")
    if isinstance(error, UnicodeDecodeError):
        return BadRequest(
            f"body: expected JSON in UTF-8, got byte 0x{error.object[error.start]:02x} in a string", field="body"
        )
    if not isinstance(error, msgspec.ValidationError):
        return _malformed(str(error), text, fields is None)
    message, path = split_path(error)
    path = path.lstrip(".")
    entry = _entry(path, text)
    tensor = entry.name if isinstance(entry, _Entry) and isinstance(entry.name, str) else None
    if path.endswith("[...]"):
        path = path.removesuffix("[...]") + _guilty_parameter(entry, dict if "got `object`" in message else list)
        message = message.replace(" | array", "").replace(" | null", "")  # which only some of the parameters can be
    if field := _FIELD.match(message):
        known = (fields or {}).get(path.partition("[")[0], ())
        name, listed = field[2], ", ".join(known)
        if field[1] == "contains unknown":
            inner = f"{path}.{key_text(name)}" if path else key_text(name)
            return at(inner, tensor, f"expected one of the fields {listed}, got {shown(name)}")
        inner = f"{path}.{name}" if path else name
        return at(inner, tensor, f"expected this field, got an object without it; the fields are {listed}")
    if kinds := _EXPECTED.match(message):
        return at(path or "body", tensor, f"expected {kind_of(kinds[1])}, got {kind_of(kinds[2])}")
    return at(path or "body", tensor, f"expected a valid value, got this: {message[:200]}")


def _loose(text: bytes | memoryview) -> _Loose | None:
    if len(text) > _LOOK_AGAIN_BYTES:
        return None
    try:
        return _LOOSE.decode(text)
    except PARSE_ERRORS:
        return None


def _entry(path: str, text: bytes | memoryview) -> _Entry | _Loose | None:
    """The input or output that a path lies in, or the request itself; None if that is not to be had."""
    loose = _loose(text)
    place = re.match(r"(inputs|outputs)\[(\d+)\]", path)
    if loose is None or place is None:
        return loose
    entries: list[_Entry] = getattr(loose, place[1])
    return entries[int(place[2])]


def _guilty_parameter(entry: _Entry | _Loose | None, kind: type[Any]) -> str:
    """msgspec says ``parameters[...]``: find which one is of that kind."""
    values = entry.parameters if entry is not None else None
    if isinstance(values, dict):
        for name, value in values.items():
            if isinstance(value, kind):
                return f".{key_text(name)}"
    return ""


def _malformed(message: str, text: bytes | memoryview, flat: bool) -> BadRequest:
    where = _BYTE.search(message)
    position = int(where[1]) if where else len(text)
    here = bytes(text[position : position + 3])
    binary = "binary data, to /infer" if flat else "binary data (parameters.binary_data_size)"
    if not len(text) or bytes(text).isspace():
        needed = "the inputs by name" if flat else "'inputs'"
        return BadRequest(f"body: expected a JSON object with {needed}, got an empty body", field="body")
    if _NOT_FINITE_HERE.match(here):
        field, tensor = _not_finite_tensor(text)
        return at(
            field,
            tensor,
            f"expected JSON numbers, got a NaN or Infinity at byte {position}: JSON has neither; send the tensor as "
            f"{binary}, which has both",
        )
    # A high surrogate with something else than a low one after it: msgspec says so in some places only.
    before = text[max(position - 6, 0) : position] if where else text[-16:]
    if "surrogate" in message or _HIGH_SURROGATE.search(bytes(before)):
        return BadRequest(
            "body: expected strings of Unicode text, got a lone surrogate; bytes that are no text can be sent as "
            f"{binary}",
            field="body",
        )
    reason = message.removeprefix("JSON is malformed: ")
    return BadRequest(f"body: expected JSON, got malformed JSON: {reason}", field="body")


def _not_finite_tensor(text: bytes | memoryview) -> tuple[str, str | None]:
    """The path and name of the first input whose data hold a NaN or an infinity."""
    loose = _loose(_NOT_FINITE.sub(b"null", bytes(text))) if len(text) <= _LOOK_AGAIN_BYTES else None
    for index, tensor in enumerate(loose.inputs if loose else ()):
        if b"null" in bytes(tensor.data):
            return f"inputs[{index}].data", tensor.name if isinstance(tensor.name, str) else None
    return "body", None
