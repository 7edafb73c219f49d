"""Unknown fields of requests to OpenAI's text routes, such as the fields of other servers: they have no effect here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec
from msgspec import inspect

from headwater_server.codecs.faults import at, key_text, read_json, shown
from headwater_server.codecs.wording import PARSE_ERRORS, structs_of
from headwater_server.errors import UnknownField

__all__ = ["MAX_IGNORED", "check_ignorable", "is_absent", "read_known"]

MAX_IGNORED: Final = 100
"""Most unknown fields of a request."""
_LONG_NAME: Final = 8
"""From so many characters on, a name with two mistakes is a misspelt name."""
_REFUSED: Final = {
    **dict.fromkeys(
        (
            "thread", "thread_id", "previous_response_id", "conversation", "container", "mcp_servers", "file_ids",
            "attachments", "assistant_id",
        ),
        "this server keeps nothing between requests; send the content itself",
    ),
    "chat_template": "the model's own renders the conversation; send its variables as `chat_template_kwargs`",
    **dict.fromkeys(
        ("messages", "prompt", "prompt_embeds", "input", "instructions", "system", "documents"),
        "it is content of another route's requests",
    ),
    "guided_whitespace_pattern": "it would constrain the answer",
    "response_format": "it would constrain the answer; send it as `text.format`",
}  # fmt: skip
"""Fields that are never left out, because the answer would be another: each with the reason."""
_STRICT: Final = frozenset({"structured_outputs"})
"""Fields within which each unknown field is refused: it would constrain the answer."""
_SHORT: Final = len("false")
"""Length of the longest JSON of an empty value without white space."""
_ELSEWHERE: Final = frozenset({"best_of", "mode", "speed", "seeds", "top_a", "top_n", "users"})
"""Fields of other servers with names that are close to fields of ours."""
_Object: Final = dict[str, msgspec.Raw]
_Request = TypeVar("_Request")


def read_known(raw: bytes, kind: type[_Request]) -> tuple[_Request, tuple[str, ...]]:
    """Decode a request's body without its unknown fields. Returns the request, and the paths of these fields. An
    unknown field that is null is left out without a word; see `is_absent`.

    Args:
        raw: the body.
        kind: the request's type, a struct.

    Raises:
        BadRequest: the body is not a valid request: see `read_json`; or an unknown field may be a misspelt field,
            stands for content or for a constraint of the answer, or there are more than `MAX_IGNORED`.
    """
    try:
        return read_json(raw, kind), ()
    except UnknownField:
        read_json(raw, _Object)  # the error stands before what is malformed or a duplicate
        ignored: list[str] = []
        known = _known(raw, structs_of(kind), "", ignored)
        if known is raw:
            raise
    request: _Request = read_json(known, kind)
    return request, tuple(ignored)


def _known(text: bytes, structs: list[inspect.StructType], path: str, ignored: list[str]) -> bytes:
    """The JSON of an object without its unknown fields, whose paths are added to ``ignored``; the text itself if it has
    none, or isn't an object. Raises `BadRequest` as `read_known`."""
    try:
        fields = msgspec.json.decode(text, type=_Object)
    except PARSE_ERRORS:
        return text
    known = {field.encode_name: field for struct in structs for field in struct.fields}
    kept: dict[str, bytes] = {}
    is_changed = False
    for name, value in fields.items():
        raw = bytes(value)
        field = known.get(name)
        if field is None:
            is_changed = True
            if not is_absent(name, msgspec.json.decode(raw) if len(raw) <= _SHORT else raw):
                check_ignorable(name, f"{path}{key_text(name)}", known)
                ignored.append(f"{path}{key_text(name)}")
                if len(ignored) > MAX_IGNORED:
                    raise at("body", None, f"expected at most {MAX_IGNORED} unknown fields, got more")
            continue
        inner = [] if name in _STRICT else structs_of(field.type)
        kept[name] = _known(raw, inner, f"{path}{name}.", ignored) if inner else raw
        is_changed = is_changed or kept[name] is not raw
    if not is_changed:
        return text
    return b"{%b}" % b",".join(b"%b:%b" % (msgspec.json.encode(name), value) for name, value in kept.items())


def is_absent(name: str, value: object) -> bool:
    """Whether an unknown field may be left out without a word: null, or an empty value of a field that would be refused
    with another value.

    Args:
        name: its name.
        value: its value, decoded; a long value may be JSON.
    """
    return value is None or (name in _REFUSED and value in (False, "", []) and isinstance(value, bool | str | list))


def check_ignorable(name: str, path: str, known: Iterable[str]) -> None:
    """Check that an unknown field may be left out.

    Args:
        name: its name.
        path: its path in the request.
        known: the names of the fields that the object may have.

    Raises:
        BadRequest: see `read_known`.
    """
    if path == name and (why := _REFUSED.get(name)) is not None:
        raise at(path, None, f"not supported here: {why}")
    if name in _ELSEWHERE:
        return
    most = 2 if len(name) >= _LONG_NAME else 1
    characters = set(name)
    for field in known:
        if abs(len(field) - len(name)) > most or len(characters.symmetric_difference(field)) > 2 * most:
            continue  # faster than to compute the distance, which is larger
        if _distance(name, field) <= most:
            raise at(path, None, f"expected one of this request's fields, got {shown(name)}; did you mean `{field}`?")


def _distance(name: str, other: str) -> int:
    """How many characters must be inserted, removed or replaced to make one name of the other."""
    row = list(range(len(other) + 1))
    for place, character in enumerate(name, 1):
        before, row[0] = row[0], place
        for at_other, other_character in enumerate(other, 1):
            cost = min(row[at_other] + 1, row[at_other - 1] + 1, before + (character != other_character))
            before, row[at_other] = row[at_other], cost
    return row[-1]
