"""What can go wrong with one request."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

__all__ = ["AskFailed", "Fault", "failed_status", "os_reason"]

LONGEST_REASON: Final = 160
_ID: Final = re.compile(r"\b[0-9a-f]{16,}\b")


class Fault(NamedTuple):
    """One kind of error; equal ones are counted together."""

    kind: str
    """``status``: an answer other than 200; ``connect``: no connection; ``reset``: it ended before the answer did;
    ``timeout``: no whole answer in time; ``bad answer``: status 200, but not what the protocol says; ``stream``: an
    error among the events of a stream."""
    status: int | None
    """Of the answer, or the one that an event of a stream names."""
    reason: str

    def __str__(self) -> str:
        kind = self.kind if self.status is None else f"{self.kind} {self.status}"
        return f"{kind}: {self.reason}" if self.reason else kind


class AskFailed(Exception):
    """A request has no good answer."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def failed_status(status: int, body: bytes, kind: str = "status") -> Fault:
    """The fault of an answer that says it is none. Ids in its reason are left out, so that equal faults are equal."""
    reason = body.decode(errors="replace")
    try:
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        content = None
    if isinstance(content, dict):
        told = content.get("error", content.get("detail", ""))
        reason = str(told.get("message", told)) if isinstance(told, dict) else str(told)
    lines = reason.splitlines()
    return Fault(kind, status, _ID.sub("…", lines[0])[:LONGEST_REASON] if lines else "")


def os_reason(error: BaseException) -> str:
    """An error of the system, in its own words but without addresses."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text)[:LONGEST_REASON]
