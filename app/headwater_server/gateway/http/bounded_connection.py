"""A client's connection: uvicorn's protocol, with limits on everything that the application does not see.

There are limits on the size of a request's head and the time until it is complete, on the time for the rest of a body
after its answer, and on the time that a client reads nothing of an answer. While requests of a client that pipelines
are waiting, nothing more is read from the client. A refusal without the application is sent in order, after the answers
to earlier requests.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from headwater_server.deadline_timer import DeadlineTimer
from headwater_server.errors import (
    BadRequest,
    BodyTooSlow,
    HeadersTooLarge,
    HeadwaterError,
    MethodNotAllowed,
    Unavailable,
    UnknownCoding,
    VersionNotSupported,
)
from headwater_server.gateway.http.client_probe import ClientProbe
from headwater_server.gateway.http.connections import Closable, Connections
from headwater_server.gateway.http.entry import MAX_HEADER_BYTES, RequestRecords
from headwater_server.gateway.http.exchange import Exchange, LightEvent
from headwater_server.gateway.http.reading_watch import ReadingWatch
from headwater_server.gateway.http.replies import error_reply
from headwater_server.security.keys import is_health_check

__all__ = ["BoundedConnection"]

_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}

_ESCAPED_SLASH: Final = re.compile("%2f", re.IGNORECASE)

_TRANSFER_ENCODING_CHARS: Final = len("transfer-encoding")

_PIECE_BYTES: Final = 16 * 1024
"""Bytes parsed at once. All requests that fit into them may wait behind the running request."""


class BoundedConnection(HttpToolsProtocol):
    """A client's connection.

    Args:
        head_timeout_s: how long a request's line and headers may take from their first byte, how long the rest of a
            body may take after the answer, and how long a client may read nothing of an answer.
        connections: the connections of this worker.
        records: logs and counts the requests that are refused without the application.
        accepted: the connection as it was counted before its TLS handshake; None: the connection has no TLS.
        arguments: uvicorn's arguments.
    """

    # Without slots the instance has more attributes than a shared-key dict can hold, which takes 1 KB more per
    # connection.
    __slots__ = (
        "_accepted", "_head_bytes", "_head_timeout_s", "_head_timer", "_idle_since_s", "_idle_timer", "_in_head",
        "_others", "_probe", "_reading", "_records", "_refusal", "_rest_timer", "_running", "_unparsed", "_waiting",
    )  # fmt: skip

    cycle: Exchange
    """The last request whose head is complete. None before the first request, and on an idle connection."""

    def __init__(
        self,
        *,
        head_timeout_s: float,
        connections: Connections,
        records: RequestRecords,
        accepted: Closable | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._head_timeout_s = head_timeout_s
        self._others = connections
        self._records = records
        self._accepted = accepted
        self._rest_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_timer = DeadlineTimer(self._idle_deadline, self.timeout_keep_alive_handler)
        self._reading: ReadingWatch | None = None
        """None until an answer's end had to wait for its client."""
        self._probe: ClientProbe | None = None
        """None until the client has ended its input."""
        self._idle_since_s = math.inf
        """Loop time at which the connection became idle; infinite while a request is running."""
        self._running: Exchange | None = None
        """The request that the application handles."""
        self._waiting: list[Exchange] = []
        """Requests behind the running request with complete heads, in order."""
        self.pipeline = cast(Any, self._waiting)  # uvicorn's unused deque would take 700 bytes
        self._head_bytes = 0
        """Bytes of the pieces that were parsed after the last piece with a head's first byte, a body's byte, or a
        message's end."""
        self._in_head = False
        """Whether the parser is in a head, which is not complete."""
        self._unparsed: bytes | memoryview = b""
        """Bytes received behind the waiting requests."""
        self._refusal: HeadwaterError | None = None
        """The error that ends the connection after the pending answers; nothing more is parsed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the idle timer for the first byte, and count the connection, in place of ``accepted``."""
        super().connection_made(transport)
        self.flow = _PipelineFlow(transport, self._waiting)
        self._note_idle()
        if self._accepted is not None:
            self._others.remove(self._accepted)
            self._accepted = None
        self._others.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers, stop counting the connection, and tell the running request that its client is gone."""
        self._end_head()
        self._end_rest()
        self._idle_timer.cancel()
        for watch in (self._reading, self._probe):
            if watch is not None:
                watch.cancel()
        self._probe = None  # it refers to this connection
        self._others.remove(self)
        super().connection_lost(exc)
        if self._running is not None:
            self._running.lose()
            self._running.end()
            self._running = None

    def data_received(self, data: bytes) -> None:
        """Parse the data. While requests wait, keep the data unparsed; after a refusal, drop the data."""
        if self._refusal is None:
            self._parse(data if not self._unparsed else bytes(self._unparsed) + data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's input: the client has left, or it waits for its answer. Returns whether the
        connection stays open.

        The two cases look the same until data are sent to the client: `ClientProbe` does that. TLS can't close one
        direction only, and in HTTP/1.0 nothing may precede an answer: such clients count as gone. So does a client that
        has sent no complete request.
        """
        running = self._running
        if self._probe is not None or self.transport.get_extra_info("ssl_object") is not None:
            return self._probe is not None
        if running is None or running.more_body or running.scope["http_version"] != "1.1":
            return False
        self._probe = ClientProbe(self.transport, lambda: self._running)
        if self._in_head or self.cycle.more_body:
            self._refuse(BadRequest("request: expected a complete request, got the end of the client's input"))
        elif not self._unparsed:
            self.cycle.keep_alive = False
        return True

    def _parse(self, data: bytes | memoryview) -> None:
        """Parse piece by piece as long as no request waits, and keep the rest in `_unparsed`; start the timer of a head
        that is still incomplete."""
        self._unparsed = b""
        if len(data) > _PIECE_BYTES:
            data = memoryview(data)
        while data and not self._waiting:
            piece = data[:_PIECE_BYTES]
            taken = len(piece)
            self._head_bytes += taken
            would_upgrade = False
            try:
                try:
                    self.parser.feed_data(piece)
                except httptools.HttpParserUpgrade as stop:
                    taken, would_upgrade = stop.args[0], True
                if would_upgrade:
                    self._ignore_upgrade()
            except httptools.HttpParserError as error:
                self._refuse(_unparsable(error))
                return
            data = data[taken:]
            if self._head_bytes > MAX_HEADER_BYTES:
                self._refuse(HeadersTooLarge(f"headers: expected at most {MAX_HEADER_BYTES} bytes, got more"))
                return
        self._unparsed = data
        if self.cycle is not None and self.cycle.more_body:
            self._others.read(self)
        if self._in_head and self._head_timer is None and not self._waiting:
            late = BodyTooSlow(f"headers: expected all of them within {self._head_timeout_s:g} s")
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._refuse, late)

    def _ignore_upgrade(self) -> None:
        """Treat the request as if it asked for no other protocol (RFC 9110, 7.8).

        The parser stops behind such a head and does not read the body: a new parser reads the head without the
        ``Upgrade`` header, and then the bytes that follow.
        """
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def on_message_begin(self) -> None:
        """Prepare for a request; the parser is at its first byte."""
        self._in_head = True
        self._head_bytes = 0
        self._idle_since_s = math.inf
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header, and check the transfer encoding.

        Raises:
            UnknownCoding: the transfer coding isn't ``chunked``.
        """
        super().on_header(name, value)
        if len(name) == _TRANSFER_ENCODING_CHARS and name.lower() == b"transfer-encoding":
            coding = value.strip().lower()
            if coding != b"chunked":
                raise UnknownCoding(
                    f"header Transfer-Encoding: expected chunked, got {coding[:40].decode('latin-1')!r}; name a packed "
                    "body's coding in Content-Encoding"
                )

    def on_headers_complete(self) -> None:
        """Make the request's `Exchange`, now that its head is complete, and start it or let it wait.

        Raises:
            VersionNotSupported: the request's version of HTTP isn't 1.0 or 1.1.
            MethodNotAllowed: the method is CONNECT.
            HttpParserInvalidURLError: the target has no path.
            Unavailable: the connection has a spare place, and the request isn't a health check.
        """
        parser = self.parser
        http_version = parser.get_http_version()
        if http_version not in ("1.1", "1.0"):
            raise VersionNotSupported(f"request: expected HTTP/1.1 or HTTP/1.0, got HTTP/{http_version}")
        method = parser.get_method()
        if parser.should_upgrade():
            if method == b"CONNECT":
                raise MethodNotAllowed("method CONNECT: not allowed, since this server is no proxy")
            return  # the head is parsed again, see `_ignore_upgrade`
        self._end_head()
        target = httptools.parse_url(self.url)
        if target.path is None:
            raise httptools.HttpParserInvalidURLError("a target without a path")
        path = target.path.decode("ascii")
        if "%" in path:
            # An escaped slash is part of a name (RFC 3986, 2.2); decoded, it would be a separator.
            path = unquote(_ESCAPED_SLASH.sub("%252F", path))
        scope: Any = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": http_version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            "headers": self.headers,
            "state": self.app_state.copy(),
            "method": method.decode("ascii"),
            "path": path,
            "raw_path": target.path,
            "query_string": target.query or b"",
        }
        has_place = self._others.admit(self)
        if not has_place and not is_health_check(scope["method"], path):
            raise Unavailable("the server has as many connections as it takes (server.max_connections)")
        is_first = self.cycle is None or self.cycle.response_complete
        # Positional, since keyword arguments would take longer than everything else here.
        self.cycle = exchange = Exchange(
            scope,
            self.transport,
            self.flow,
            self.logger,
            self.access_logger,
            self.access_log,
            self.server_state.default_headers,
            LightEvent(),
            self.expect_100_continue,
            http_version != "1.0" and parser.should_keep_alive() and has_place and not self._others.is_closing,
            self.on_response_complete,
        )
        if is_first:
            self._start(exchange)
        else:
            self.flow.pause_reading()
            self._waiting.append(exchange)

    def _start(self, exchange: Exchange) -> None:
        """Start the application on a request, which finds the `Exchange` in its scope."""
        self._running = exchange
        exchange.begin()
        task = exchange.task = self.loop.create_task(exchange.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        """Store a piece of a request's body."""
        self._head_bytes = 0
        self.cycle.take_piece(body)

    def on_message_complete(self) -> None:
        """Note that a request's body is complete."""
        if self._in_head:  # the head of a request for an upgrade
            return
        self._end_rest()
        self._head_bytes = 0
        # uvicorn does neither if the answer came before the body's end.
        self.cycle.more_body = False
        self.cycle.message_event.set()
        if not self.cycle.response_complete:
            self._others.begin(self)

    def on_response_complete(self) -> None:
        """Handle the end of an answer; its request's body may be incomplete."""
        self.server_state.total_requests += 1
        if self._running is not None:
            self._running.end()
            self._running = None
        if not self.transport.is_closing():
            if self._waiting:
                self._start(self._waiting.pop(0))
            elif self._refusal is not None:
                _write_refusal(self.transport, self._records, self.client, self._refusal)
            elif self._probe is not None and not self._unparsed:
                self.transport.close()
            else:
                self._note_idle()
        if self.transport.get_write_buffer_size():
            if self._reading is None:
                self._reading = ReadingWatch(self.transport, self._head_timeout_s)
            self._reading.start()
        if self.cycle.response_complete:  # every request that was read is answered
            self._others.end(self)
            if self.cycle.more_body and not self.transport.is_closing():
                # Closed later, since a client that is still sending would lose the answer.
                self._end_rest()
                self._rest_timer = self.loop.call_later(self._head_timeout_s, self.abort)
            elif not self.cycle.more_body:
                self._forget()
        if not self._waiting and not self.transport.is_closing():
            if self._unparsed or self._in_head:
                self._parse(self._unparsed)
            if self.flow.read_paused:
                self.flow.resume_reading()

    def abort(self) -> None:
        """See `headwater_server.gateway.http.connections.Closable`."""
        self.transport.abort()

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _forget(self) -> None:
        """Free the last request, which takes half the memory of an idle connection."""
        self.cycle = None  # type: ignore[assignment]
        if not self._in_head:
            self.headers = None  # type: ignore[assignment]

    def _end_rest(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _note_idle(self) -> None:
        """Start the idle timer. uvicorn makes a timer after each answer and cancels it with the next request; this
        timer keeps running."""
        self._idle_since_s = self.loop.time()
        if not self.transport.is_closing():
            self._idle_timer.start()

    def _idle_deadline(self) -> float:
        return self._idle_since_s + self.timeout_keep_alive

    def _refuse(self, error: HeadwaterError) -> None:
        """Refuse the data that are being parsed, after the answers to earlier requests, and close the connection."""
        self._end_head()
        if self.transport.is_closing():
            return
        self._refusal = error
        self._unparsed = b""
        running = self._running
        in_body = self.cycle is not None and self.cycle.more_body
        if in_body and self._waiting:
            self._waiting.pop()  # the request that this body belongs to
        elif in_body and (running is None or self.cycle.response_started):
            self.transport.close()  # the request has its answer, or part of it
        elif in_body or running is None:
            if running is not None:
                running.lose()
            _write_refusal(self.transport, self._records, self.client, error)


class _PipelineFlow(FlowControl):
    """Resumes reading only while no request waits; what is written without TLS is sent at once."""

    def __init__(self, transport: asyncio.Transport, waiting: list[Exchange]) -> None:
        super().__init__(transport)
        if transport.get_extra_info("ssl_object") is None:
            transport.set_write_buffer_limits(0)  # uvloop would write later, after the request's log and metrics
        self._is_writable_event = LightEvent()
        self._is_writable_event.set()
        self._waiting = waiting

    def resume_reading(self) -> None:
        """See `FlowControl`."""
        if not self._waiting:
            super().resume_reading()


def _write_refusal(
    transport: asyncio.Transport, records: RequestRecords, client: tuple[str, int] | None, error: HeadwaterError
) -> None:
    """Send a refusal, with a request id and a line in the access log, and close the connection. Nothing else is known
    about the request for certain."""
    scope: dict[str, Any] = {
        "type": "http", "method": "-", "path": "-", "query_string": b"", "headers": [], "client": client,
        "state": {"error": error},
    }  # fmt: skip
    record = records.begin(scope)
    body, headers = error_reply(error, scope).content()
    lines = [STATUS_LINE[error.status][:-2], *(b"%s: %s" % pair for pair in (*headers, *record.headers()))]
    if error.status == 405:
        lines.append(b"allow: GET, HEAD, POST, OPTIONS")
    lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
    transport.write(b"\r\n".join(lines))
    transport.close()
    records.end(record, scope, error.status)


def _unparsable(error: httptools.HttpParserError) -> HeadwaterError:
    """The error for bytes that the parser of requests or of targets refuses; the error that a callback raised, if it is
    a `HeadwaterError`.

    Raises:
        Exception: another error of a callback: a bug of the gateway.
    """
    if isinstance(error, httptools.HttpParserCallbackError):
        cause = error.__context__
        if isinstance(cause, HeadwaterError):
            return cause
        if isinstance(cause, httptools.HttpParserInvalidURLError):
            return BadRequest("request: expected a target with a path, such as /v2")
        if cause is not None:
            raise cause  # a bug of the gateway: the event loop logs it and closes the connection
    return BadRequest(f"request: expected HTTP/1.1, but its parser says: {error}")
