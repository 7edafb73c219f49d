"""What a model is told of requests: the headers that it may see, the records, and the id in the lines that it logs."""

from __future__ import annotations

import contextvars
import logging
import re
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from headwater.errors import BadOutput, LoadError, Problem
from headwater.model import Request

__all__ = [
    "HEADERS", "RESPONSE_HEADERS", "RequestFilter", "checked_headers", "checked_response_headers", "headers_by_row",
    "note_call", "requests_of",
]  # fmt: skip

HEADERS: Final = "headers"
"""The option that names the headers."""
RESPONSE_HEADERS: Final = "response_headers"
"""The option that names the headers of the answer that the model may set."""
MAX_HEADERS: Final = 20
_RESPONSE_NAME: Final = re.compile(r"x-(?!request-id\Z)[a-z0-9-]{1,98}\Z")
_RESPONSE_VALUE: Final = re.compile(r"[ -~]{0,1000}\Z")
_NAME: Final = re.compile(r"[a-z0-9-]{1,100}\Z")
_SECRET: Final = re.compile("authorization|cookie|token|secret|password|api-?key|credential")
_EXPECTED: Final = f"a list of at most {MAX_HEADERS} names of lower-case letters, digits and '-', none with secrets"
_request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


def checked_headers(title: str, names: object) -> tuple[str, ...]:
    """Check the option `HEADERS`; ``title`` begins an error's message.

    Raises:
        LoadError: it is no list of at most `MAX_HEADERS` lower-case names, or names a header with secrets.
    """
    listed = names if isinstance(names, list) else []
    wrong = [name for name in listed if not isinstance(name, str) or not _NAME.match(name) or _SECRET.search(name)]
    if not isinstance(names, list) or len(names) > MAX_HEADERS or wrong:
        reason = f"options.{HEADERS}: expected {_EXPECTED}, got {(wrong or [names])[0]!r:.80}"
        raise LoadError(Problem(title, reason, f"correct `options.{HEADERS}`; the name of an API key is in `key`"))
    return tuple(listed)


def checked_response_headers(title: str, names: object) -> tuple[str, ...]:
    """Check the option `RESPONSE_HEADERS`; ``title`` begins an error's message.

    Raises:
        LoadError: it is no list of at most `MAX_HEADERS` names that begin with ``x-``, or has ``x-request-id``.
    """
    wrong = [name for name in names if not _RESPONSE_NAME.match(str(name))] if isinstance(names, list) else [names]
    if not isinstance(names, list) or len(names) > MAX_HEADERS or wrong:
        reason = (
            f"options.{RESPONSE_HEADERS}: expected a list of at most {MAX_HEADERS} names such as x-cost, of lower-case "
            f"letters, digits and '-', other than x-request-id, got {(wrong or [names])[0]!r:.80}"
        )
        raise LoadError(Problem(title, reason, f"correct `options.{RESPONSE_HEADERS}`"))
    return tuple(names)


def headers_by_row(
    rows: Sequence[int], requests: Sequence[Request], allowed: Collection[str]
) -> dict[int, dict[str, str]]:
    """The headers of the answer that a call has set in the records of its rows, by row.

    Raises:
        BadOutput: a header isn't allowed, or its value can't be sent.
    """
    found = {
        row: request.response_headers for row, request in zip(rows, requests, strict=False) if request.response_headers
    }
    for headers in found.values():
        for name, value in headers.items():
            if name not in allowed:
                expected = f"one of options.{RESPONSE_HEADERS}, {', '.join(allowed) or 'which is empty'}"
                raise BadOutput(f"response_headers: expected {expected}, got {name!r:.100}")
            if not isinstance(value, str) or not _RESPONSE_VALUE.match(value):
                expected = "at most 1,000 printable ASCII characters"
                raise BadOutput(f"response_headers, {name!r}: expected {expected}, got {value!r:.100}")
    return found


def requests_of(texts: Sequence[str], headers: Collection[str]) -> list[Request]:
    """The records of rows, of the values of the parameter `headwater.signature.CONTEXT`; rows of a request share its
    record. Other headers than these are left out, since a pipeline's steps may take different headers."""
    records: dict[str, Request] = {}
    for text in set(texts):
        record = msgspec.json.decode(text, type=Request) if text else Request()
        chosen = {name: value for name, value in record.headers.items() if name in headers}
        records[text] = msgspec.structs.replace(record, headers=chosen)
    return [records[text] for text in texts]


def note_call(requests: Sequence[Request]) -> None:
    """Note the requests of the call that this task makes next; no requests: they aren't known."""
    ids = {request.id for request in requests}
    _request_id.set(ids.pop() if len(ids) == 1 else "")


class RequestFilter(logging.Filter):
    """Gives records the attribute ``request``: `` [request ID]`` in a call whose rows are of one known request, else
    empty."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        id = _request_id.get()
        record.request = f" [request {id}]" if id else ""
        return True
