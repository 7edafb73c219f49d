"""An answer that came, and what became of the request as the metrics would call it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["Reply"]

_BY_STATUS: Final = {409: "cancelled", 429: "shed", 503: "unavailable", 504: "timeout"}
_BY_CODE: Final = {"rate_limit_exceeded": "shed", None: "client_error"}
"""Where OpenAI's code has another name; the other codes are these names."""


@dataclass
class Reply:
    """One answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Of a stream."""
    is_done: bool = False
    """Whether ``[DONE]`` came."""

    def json(self) -> Any:
        """What the body says."""
        return json.loads(self.body)

    def take_events(self) -> None:
        """Read the body as server-sent events, if it is a stream of them.

        Raises:
            ValueError: it has lines that belong to no event.
        """
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            return
        for line in self.body.decode().split("\n"):
            if line == "data: [DONE]":
                self.is_done = True
            elif line.startswith("data: "):
                self.events.append(json.loads(line.removeprefix("data: ")))
            elif line not in ("", ": ping"):
                raise ValueError(f"expected an event, got {line[:100]!r}")

    @property
    def outcome(self) -> str:
        """Empty, if only a part of a stream's heads failed, or all: then the stream's own end decides nothing."""
        failures = [event for event in self.events if "error" in event]
        if any("head" in event for event in failures):
            return ""
        if not failures:
            return _named(self.status)
        error = failures[0]["error"]
        if isinstance(error, dict):
            return str(_BY_CODE.get(error["code"], error["code"]))
        return _named(int(failures[0]["status"]))

    @property
    def message(self) -> str:
        """What an error says."""
        failures = [event for event in self.events if "error" in event]
        return str(failures[0]) if failures else self.body[:300].decode(errors="replace")


def _named(status: int) -> str:
    if status < 400:
        return "ok"
    return _BY_STATUS.get(status, "client_error" if status < 500 else "failed")
