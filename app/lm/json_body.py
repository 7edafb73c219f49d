"""Reads a request's JSON into a struct, and says what is wrong with it in the client's terms."""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from app.codecs.faults import PARSE_ERRORS, at, key_text, kind_of, shown, split_path
from app.errors import BadRequest

__all__ = ["read_body"]

_FIELD: Final = re.compile(r"Object (contains unknown|missing required) field `(.*)`\Z", re.DOTALL)
_KINDS: Final = re.compile(r"Expected `([^`]*)`, got `([^`]*)`\Z")

_Body = TypeVar("_Body", bound=msgspec.Struct)


def read_body(raw: bytes, kind: type[_Body]) -> _Body:
    """Decode a body.

    Args:
        raw: the JSON.
        kind: its fields; those of type None are the API's, but not supported here, and only null may stand there.

    Raises:
        BadRequest: it isn't JSON, or a field is unknown, missing, unsupported or of another type; the message names it.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _fault(error, kind) from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise at("body", None, f"expected JSON in UTF-8, got byte 0x{byte:02x} in a string") from None
    except RecursionError:
        raise at("body", None, "expected JSON, got arrays or objects nested too deeply") from None
    except PARSE_ERRORS as error:
        if not raw.strip():
            raise at("body", None, "expected a JSON object, got an empty body") from None
        reason = str(error).removeprefix("JSON is malformed: ")
        raise at("body", None, f"expected JSON, got malformed JSON: {reason}") from None


def _fault(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> BadRequest:
    message, path = split_path(error)
    path = path.lstrip(".")
    if named := _FIELD.match(message):
        name = f"{path}.{key_text(named[2])}" if path else key_text(named[2])
        expected = f"expected the fields {', '.join(_supported(kind))}" if not path else "expected a field that it has"
        if named[1] == "contains unknown":
            return at(name, None, f"{expected}; got {shown(named[2])}")
        return at(name, None, "expected this field, got an object without it")
    if kinds := _KINDS.match(message):
        if kinds[1] == "null":
            return at(path, None, "this model does not support it; leave it out")
        return at(path or "body", None, f"expected {kind_of(kinds[1])}, got {kind_of(kinds[2])}")
    return at(path or "body", None, f"{message[:1].lower()}{message[1:200]}")


def _supported(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind) if field.type is not type(None)]
