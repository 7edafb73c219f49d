"""The faults of a single request."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

__all__ = ["AskFailed", "Fault", "failed_status", "os_reason"]

LONGEST_REASON: Final = 160
_ID: Final = re.compile(r"\b[0-9a-f]{16,}\b")


class Fault(NamedTuple):
    """One kind of error; equal faults are counted together."""

    kind: str
    """``status``: an answer other than 200; ``connect``: no connection; ``reset``: the connection ended before the
    answer; ``timeout``: no whole answer in time; ``bad answer``: status 200, but against the protocol; ``stream``: an
    error among the events of a stream."""
    status: int | None
    """The answer's status, or the one in a stream's error event."""
    reason: str

    def __str__(self) -> str:
        kind = self.kind if self.status is None else f"{self.kind} {self.status}"
        return f"{kind}: {self.reason}" if self.reason else kind


class AskFailed(Exception):
    """A request got no good answer."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def failed_status(status: int, body: bytes, kind: str = "status") -> Fault:
    """The fault of an error answer. Ids in its reason are masked, so that equal faults are counted together."""
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
    """A system error's message, without addresses."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text)[:LONGEST_REASON]
