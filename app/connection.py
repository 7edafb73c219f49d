"""A client's connection: uvicorn's own, with a bound on the size of a request's head and on the time it may take.

The application sees a request only once its head is complete, so what never completes must be refused here.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.errors import BadRequest, BodyTooSlow, HeadersTooLarge, HeadwaterError
from app.metrics.accounting import UNMATCHED
from app.metrics.recorder import recorder
from app.middleware import MAX_HEADER_BYTES
from app.replies import error_reply

__all__ = ["BoundedConnection"]


class BoundedConnection(HttpToolsProtocol):
    """One connection.

    Args:
        head_timeout_s: how long a request's line and headers may take from their first byte.
        arguments: uvicorn's.
    """

    def __init__(self, *, head_timeout_s: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give it the time of an idle connection for its first byte; requests find ``abort`` in their state."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the head that was under way."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; then see whether a head is still incomplete."""
        was_in_head = self._in_head
        super().data_received(data)
        if not self._in_head:
            return
        if was_in_head:
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEADER_BYTES:
            self._refuse(HeadersTooLarge(f"headers: expected at most {MAX_HEADER_BYTES} bytes, got more"))
        elif self._head_timer is None:
            error = BodyTooSlow(f"headers: expected all of them within {self._head_timeout_s:g} s")
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._refuse, error)

    def on_message_begin(self) -> None:
        """The parser is at a request's first byte."""
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The parser is behind a request's headers."""
        self._end_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(BadRequest(f"request: {msg}"))

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: HeadwaterError) -> None:
        """Answer without the application, and close the connection."""
        self._end_head()
        if self.transport.is_closing():
            return
        recorder().http_requests(UNMATCHED, error.status).add()
        body, headers = error_reply(error, "").content()
        lines = [b"HTTP/1.1 %d" % error.status, *(b"%s: %s" % pair for pair in headers)]
        lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()
