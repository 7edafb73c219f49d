"""Reads a request's JSON and reports its faults: the field, the expected value, and the value that the client sent.

A fault gets the same message on all routes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from headwater_server.codecs.wording import (
    PARSE_ERRORS,
    PATH_PART,
    ParsedError,
    bounds_at,
    choices_at,
    fields_at,
    kind_of,
    parsed,
)
from headwater_server.errors import BadRequest, HeadwaterError, UnknownField

__all__ = [
    "MAX_CONTAINERS",
    "MAX_VALUES",
    "at",
    "check_keys",
    "check_size",
    "colons",
    "is_narrow",
    "key_text",
    "no_json_form",
    "read_json",
    "shape_text",
    "shown",
    "unreadable",
]

MAX_CONTAINERS: Final = 100_000
"""The most keys, objects and arrays in a body, together; arrays in the data of tensors are not counted. A body is
decoded in a single call, during which no other thread runs: the limit keeps the call to a few hundredths of a
second."""
MAX_VALUES: Final = 1_000_000
"""The most values in a body, counted by their commas, without a tensor's numbers. A plain value takes a tenth of the
time of a key or an object."""

_ENTRY: Final = re.compile(r"\.(?:inputs|outputs)\[\d+\]")
_NOT_FINITE: Final = re.compile(rb"-?\b(?:NaN|Infinity)\b")
_NOT_FINITE_HERE: Final = re.compile(rb"nan|inf", re.IGNORECASE)
_HIGH_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_BACKSLASHES: Final = re.compile(rb"\\*")
# A longer body is not parsed again to make an error's message more precise: errors must be cheap too.
_LOOK_AGAIN_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 16
_FEW_BYTES: Final = 4096
_LONG_TEXT_BYTES: Final = 1 << 20
_LONG_STRING_BYTES: Final = 1 << 16
_STRINGS: Final = re.compile(rb'(?:[^"]*"[^"\\]*(?:\\.[^"\\]*)*")*', re.DOTALL)
"""Whole strings, each with the text before it."""
_IN_STRING: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
"""A string's characters up to its closing quote."""
_FEW_COLONS: Final = 1000

_Value = TypeVar("_Value")


class _Inputs(msgspec.Struct):
    inputs: list[dict[str, msgspec.Raw]] = []


def at(path: str, tensor: str | None, message: str, kind: type[BadRequest] = BadRequest) -> BadRequest:
    """An error whose message names the field by its path and, if given, the tensor."""
    named = f" (tensor {shown(tensor)})" if tensor is not None else ""
    return kind.about(path, f"{named}: {message}")


def shown(value: object) -> str:
    """A JSON value as quoted in a message, with a bounded length; of an object or array only its kind is named."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 80 else f"{value[:80]!r}... ({len(value)} characters)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (int, float)):
        return repr(value)
    return "null" if value is None else kind_of("object" if isinstance(value, dict) else "array")


def key_text(name: str) -> str:
    """A key that a client sent, as the last part of a path in a message, with a bounded length."""
    return repr(name[:80])[1:-1] + "..." * (len(name) > 80)


def shape_text(shape: Sequence[int]) -> str:
    """A shape as quoted in a message, with a bounded length."""
    text = ", ".join(shown(dim) for dim in shape[:12])
    return f"[{text}]" if len(shape) <= 12 else f"[{text}, ...] ({len(shape)} dimensions)"


def no_json_form(path: str, tensor: str, datatype: str) -> BadRequest:
    """The error for an output that was requested in JSON, although its datatype has no JSON form."""
    fix = 'ask for binary data: "parameters": {"binary_data": true} on the output, or "parameters": '
    fix += '{"binary_data_output": true} on the request'
    return at(path, tensor, f"expected a datatype that has a JSON form, got {datatype}; {fix}")


def read_json(
    text: bytes | msgspec.Raw,
    kind: type[_Value] | Any,
    path: str = "",
    *,
    hint: str = "",
    strict: bool = True,
    is_checked: bool = False,
) -> _Value:
    """Decode JSON that has no tensors.

    Args:
        text: the JSON.
        kind: the value's type. If a struct has a field of type None, the field is part of the API but not supported
            here: only null is accepted. If the `msgspec.Meta` of a bound has `extra={"expected": words}`, messages use
            these words for the bound.
        path: the field whose value the JSON is; empty: the body.
        hint: added to an error's message.
        strict: whether to refuse a number or a boolean that is written as a string.
        is_checked: whether the text is a part of a text that this function has already read, so that it has no
            duplicate keys.

    Raises:
        BadRequest: the text isn't JSON, has too many keys or values (see `check_size`), or has a duplicate key; or a
            field is unknown, missing, unsupported, of another type or out of bounds. The message names the field.
    """
    text = bytes(text)
    try:
        check_size(text)
        value: _Value = msgspec.json.decode(text, type=kind, strict=strict)
        if not is_checked:
            check_keys(text)
    except BadRequest as error:
        raise _hinted(error, hint) from None
    except PARSE_ERRORS as error:
        raise _hinted(unreadable(error, text, kind, path), hint) from None
    return value


def _hinted(fault: BadRequest, hint: str) -> HeadwaterError:
    """The fault with a hint added to its message.

    A function, because a fault in a local variable of the function that raises the fault would make a reference cycle,
    which would keep the body in memory.
    """
    return fault.again(f"{fault.message}; {hint}") if hint else fault


def check_size(text: bytes, end: int | None = None, *, tensors: bool = False) -> None:
    """Check that JSON is small enough to be decoded in a single call: see `MAX_CONTAINERS` and `MAX_VALUES`.

    Args:
        text: the JSON; need not be valid.
        end: the offset in ``text`` at which the JSON ends; None: the text's end.
        tensors: whether arrays hold the elements of tensors, so that only keys are counted, up to `MAX_CONTAINERS`.

    Raises:
        BadRequest: the JSON has too many keys, objects and arrays, or too many values.
    """
    end = len(text) if end is None else end
    if end <= MAX_CONTAINERS:
        return
    brackets = () if tensors else (b"[", b"{")
    if colons(text, end) + sum(text.count(bracket, 0, end) for bracket in brackets) > MAX_CONTAINERS:
        kinds = "keys" if tensors else "keys, objects and arrays"
        _check_outside(text, end, (b":", *brackets), MAX_CONTAINERS, kinds)
    if not tensors and text.count(b",", 0, end) > MAX_VALUES:
        _check_outside(text, end, (b",",), MAX_VALUES, "values")


def _check_outside(text: bytes, end: int, counted: Sequence[bytes], limit: int, kinds: str) -> None:
    """Check that the characters ``counted`` occur together at most ``limit`` times outside of strings.

    Counts in pieces, so that other threads can run in between.

    Raises:
        BadRequest: the characters occur more often.
    """
    count = start = 0
    quotes = 0
    while start < end:
        stop = min(start + _PIECE_BYTES, end)
        if text[stop - 1 : stop] == b"\\":  # don't cut an escape in two
            backslashes = _BACKSLASHES.match(text, stop, end)
            assert backslashes is not None  # the pattern also matches an empty text
            stop = min(backslashes.end() + 1, end)
        parts = text[start:stop].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[quotes % 2 :: 2])
        quotes += len(parts) - 1
        count += sum(outside.count(character) for character in counted)
        if count > limit:
            raise at("body", None, f"expected at most {limit} {kinds} in a JSON body, got more; split the request")
        start = stop


def colons(text: bytes, end: int) -> int:
    """The result of ``text.count(b":", 0, end)``, ten times as fast if colons are rare: `bytes.find` uses memchr."""
    if end < _FEW_BYTES:
        return text.count(b":", 0, end)
    count, place = 0, text.find(b":", 0, end)
    while place >= 0:
        if count == _FEW_COLONS:
            return count + text.count(b":", place, end)
        count, place = count + 1, text.find(b":", place + 1, end)
    return count


def check_keys(text: bytes) -> None:
    """Refuse duplicate keys, because JSON parsers disagree about them: some take the first value, most take the last.

    Args:
        text: valid JSON.

    Raises:
        BadRequest: an object has a key twice.
        RecursionError: objects or arrays are nested too deeply.
    """
    if len(text) > _LONG_TEXT_BYTES and not is_narrow(text):
        text = _without_long_strings(text)
    _PAIRS.decode(text.decode(errors="replace"))


def is_narrow(text: bytes) -> bool:
    """Whether the text has only ASCII characters and no Unicode escapes, so that each character of its strings takes a
    single byte in memory."""
    return text.isascii() and b"\\u" not in text


def _without_long_strings(text: bytes) -> bytes:
    """The text with a digest in place of each long string, so that a single call can decode it in a short time.

    No other thread runs during that call, and a wide character makes each character of its string take up to 4 bytes.
    Two long strings with the same characters have different digests if their escapes differ: as keys they count as
    different.

    Args:
        text: valid JSON. It is read in pieces, so that other threads can run in between.
    """
    parts: list[bytes] = []
    kept = end = 0
    while end < len(text):
        strings = _STRINGS.match(text, end, end + _PIECE_BYTES)
        assert strings is not None  # the pattern also matches an empty text
        if strings.end() > end:
            end = strings.end()
            continue
        quote = text.find(b'"', end)
        if quote < 0:
            break
        end = start = quote + 1
        while text[end : end + 1] != b'"':
            inside = _IN_STRING.match(text, end, end + _PIECE_BYTES)
            assert inside is not None
            end = inside.end()
        if end - start > _LONG_STRING_BYTES:
            digest = hashlib.sha256(memoryview(text)[start:end]).hexdigest()
            parts += (text[kept:start], f"{end - start} bytes, SHA-256 {digest}".encode())
            kept = end
        end += 1
    return b"".join((*parts, text[kept:]))


def _unique(pairs: list[tuple[str, object]]) -> None:
    if len(pairs) != len(dict(pairs)):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise at(key_text(key), None, "expected every key of an object once, got this key twice; remove one of the two")


_PAIRS: Final = json.JSONDecoder(object_pairs_hook=_unique, strict=False, parse_int=len, parse_float=len)


def unreadable(
    error: Exception,
    text: bytes | memoryview | msgspec.Raw,
    kind: Any,
    path: str = "",
    *,
    binary: str = "",
    tensor: str | None = None,
) -> BadRequest:
    """The error that says why a request's JSON does not parse.

    Args:
        error: an instance of `PARSE_ERRORS`.
        text: the JSON.
        kind: the expected type.
        path: the field whose value the JSON is; empty: the body.
        binary: words for the way to send a tensor that JSON can't carry; empty: the request has no tensors.
        tensor: the name of the tensor that the value belongs to; None: the name is looked up in the text.
    """
    text = memoryview(text)
    whole = path or "body"
    if isinstance(error, RecursionError):
        return at(whole, None, "expected JSON, got arrays or objects nested too deeply")
    if isinstance(error, UnicodeDecodeError):
        return at(whole, None, f"expected JSON in UTF-8, got byte 0x{error.object[error.start]:02x} in a string")
    fault = parsed(error)
    if not isinstance(error, msgspec.ValidationError):
        return _malformed(fault, text, whole, binary)
    tensor = _tensor(text, fault.path) if tensor is None else tensor
    expected = fault.expected
    place = (path + fault.path).lstrip(".")
    name = fault.missing if fault.unknown is None else fault.unknown
    if name is not None:
        listed = ", ".join(fields_at(kind, fault.path))
        field = f"{place}.{key_text(name)}" if place else key_text(name)
        if fault.missing is None:
            return at(field, tensor, f"expected one of the fields {listed}, got {shown(name)}", UnknownField)
        return at(field, tensor, f"expected this field, got an object without it; the fields are {listed}")
    place = place or "body"
    if expected == "null":
        return at(place, tensor, "this model does not support it; leave it out")
    if expected:
        got = kind_of(fault.got) if fault.got else "another value"
        return at(place, tensor, f"expected {kind_of(expected)}, got {got}")
    if fault.value is not None:
        return at(place, tensor, f"expected {choices_at(kind, fault.path)}, got {fault.value[:80]}")
    if fault.bounded is not None:
        return at(place, tensor, f"expected {bounds_at(kind, fault.path, fault.bounded)}{_got(fault, text)}")
    if fault.is_out_of_range:
        return at(place, tensor, "expected a number in range, got a number out of range")
    return at(place, tensor, f"expected a valid value, got this: {fault.text[:200]}")


def _got(fault: ParsedError, text: bytes | memoryview) -> str:
    """The value that is out of bounds, as the end of a message; empty if the value can't be found."""
    value = _value_at(text, fault.path, check=True)
    if value is None:
        return ""
    if fault.bounded == "str":
        return f", got {len(value)} characters" if value else ", got an empty string"
    if fault.bounded == "array":
        return f", got {len(value)}"
    return f", got {shown(float(value) if fault.bounded == 'float' else value)}"


def _value_at(text: bytes | memoryview, path: str, *, check: bool = False) -> Any:
    """The value at a path, decoded. None if the value is null, a long array or a long object, if the path doesn't lead
    to a value or has ``[...]`` for a key of a dict, or if the text is long or malformed.

    Only the value at the path is built, since a tensor may have many more elements than a request may have keys,
    objects and arrays.

    Raises:
        BadRequest: ``check`` is set, and an object has a key twice.
    """
    if len(text) > _LOOK_AGAIN_BYTES:
        return None
    raw: Any = text
    try:
        if check:
            msgspec.json.decode(raw, type=msgspec.Raw)
            check_keys(bytes(text))
        for part in PATH_PART.finditer(path):
            if part[1] is None:
                raw = msgspec.json.decode(raw, type=list[msgspec.Raw])[int(part[2])]
            else:
                raw = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])[part[1]]
        is_long = len(memoryview(raw)) > _FEW_BYTES and bytes(memoryview(raw)[:1]) in (b"[", b"{")
        return None if is_long else msgspec.json.decode(raw)
    except (*PARSE_ERRORS, LookupError, ValueError):
        return None


def _tensor(text: bytes | memoryview, path: str) -> str | None:
    """The name of the input or output that a path leads into; None if the path leads elsewhere, or has no name."""
    place = _ENTRY.match(path)
    name = None if place is None else _value_at(text, f"{place[0]}.name")
    return name if isinstance(name, str) else None


def _malformed(fault: ParsedError, text: bytes | memoryview, path: str, binary: str) -> BadRequest:
    position = len(text) if fault.byte is None else fault.byte
    here = bytes(text[position : position + 3])
    if not len(text) or bytes(text).isspace():
        return at(path, None, "expected a JSON object, got an empty body")
    if _NOT_FINITE_HERE.match(here):
        field, tensor = _not_finite_tensor(text, position) if binary else (path, None)
        hint = f"; send the tensor as {binary}, which has both" if binary else ""
        message = f"expected JSON numbers, got a NaN or Infinity at byte {position}: JSON has neither{hint}"
        return at(field, tensor, message)
    # A lone surrogate: a high surrogate that no low surrogate follows. msgspec names it only in some cases.
    before = text[-16:] if fault.byte is None else text[max(position - 6, 0) : position]
    if "surrogate" in fault.text or _HIGH_SURROGATE.search(bytes(before)):
        hint = f"; bytes that are not text can be sent as {binary}" if binary else ""
        return at(path, None, f"expected strings of Unicode text, got a lone surrogate{hint}")
    return at(path, None, f"expected JSON, got malformed JSON: {fault.text}")


def _not_finite_tensor(text: bytes | memoryview, position: int) -> tuple[str, str | None]:
    """The path and name of the input whose data contain the NaN or infinity at this byte. ``("body", None)`` if it
    can't be found."""
    if len(text) <= _LOOK_AGAIN_BYTES:
        rest = _NOT_FINITE.sub(b"0", bytes(text[position:]))[1:]
        texts = [b"".join((text[:position], digit, rest)) for digit in (b"0", b"1")]
        try:
            pairs = zip(*[msgspec.json.decode(text, type=_Inputs).inputs for text in texts], strict=True)
        except PARSE_ERRORS:
            return "body", None
        for index, (entry, changed) in enumerate(pairs):
            if entry.get("data") != changed.get("data"):
                return f"inputs[{index}].data", _tensor(texts[0], f".inputs[{index}]")
    return "body", None
